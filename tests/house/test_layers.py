"""Imports only point down: a package imports lower packages, and no files import each other in a circle."""

import ast
import os
import re

import pytest

from sources import CODE, LINKED, ROOT, files, label, tree

LAYERS = (  # low to high; a package imports only lower ones
    "errors",
    "parallel",
    "parallel.losses parallel.rng",
    "parallel.ranks",
    "hf dispatch",
    "data kernels.loss",
    "kernels",
    "language",
    "pipeline weights",
    "zoo",
    "zoo.cards zoo.schedules",
    "tune.planner",
    "model.gradients",
    "model.dp",
    "model.checkpoints model.step",
    "model.integrations model",
    "tune verify",
    "model.load",
    "cli",
)
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer.split()}
SOURCES = [path for path in files(*CODE, "hub_cards") if label(path) != "slapo_zoo/__init__.py"]


def module(path):
    """The dotted name of a file: kernels/linear.py --> slapo_zoo.kernels.linear."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = (*LINKED.get(parts[0], "").split("/"), *parts) if parts[0] in LINKED else parts
    return ".".join(parts).removesuffix(".__init__")


def room(name):
    """The innermost package of LAYERS that a module belongs to: slapo_zoo.model.step.parts --> model.step."""
    parts = name.split(".")[1:]
    rooms = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((found for found in rooms if found in RANK), ".".join(parts[:1]))


def unit(path):
    return room(module(path))


MODULES = {module(path): path for path in SOURCES}


def imported_modules(path):
    """Full names of the slapo_zoo modules that a file imports, at the top or inside a function."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.startswith("slapo_zoo"))
        elif isinstance(node, ast.ImportFrom) and node.module == "slapo_zoo":
            yield from (f"slapo_zoo.{name.name}" for name in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("slapo_zoo."):
            inside = {f"{node.module}.{name.name}" for name in node.names} & MODULES.keys()
            yield from inside or {node.module}


REGISTRIES = {  # who looks its files up by name, at run time: a file that nobody asks for costs nothing
    "slapo_zoo/dispatch/kernel_registry.py": "slapo_zoo.kernels",
    "slapo_zoo/zoo/table.py": "slapo_zoo.zoo.schedules",
}


def modules_by_string(path):
    """Modules that a file names in a string: for `import_module`, `python -m`, or `resources`."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.rstrip(".")
            if re.fullmatch(r"slapo_zoo(\.\w+)+", name) and room(name) in RANK:
                yield name


def imported_units(path):
    return {room(name) for name in imported_modules(path)}


def test_every_source_file_belongs_to_an_import_layer():
    loose = [label(path) for path in SOURCES if unit(path) not in RANK]
    assert not loose, (
        f"in no layer; add their package to LAYERS, as low as its imports allow: {loose}"
    )


def test_package_imports_point_only_to_lower_layers():
    up = [
        f"{label(path)} imports {target or 'slapo_zoo'}" for path in SOURCES
        for target in imported_units(path) - {unit(path)}
        if RANK.get(target, len(RANK)) >= RANK[unit(path)]
    ]  # fmt: skip
    assert not up, f"not from a lower package that defines the name: {up}"


def test_modules_imported_by_a_name_in_a_string_lie_in_lower_layers():
    """A module named in a string is a dependency too, even if another module imports it."""
    up = [
        f"{label(path)} names {name}" for path in SOURCES for name in modules_by_string(path)
        if not name.startswith(REGISTRIES.get(label(path), "nobody"))
        and unit(path) != room(name) and RANK[room(name)] >= RANK[unit(path)]
    ]  # fmt: skip
    assert not up, f"not in a lower package: {up}"


def test_no_module_imports_a_schedule_table_file_by_an_import_statement():
    """`zoo` imports a table by its name at run time, so that unused tables cost no import."""
    named = [
        label(path) for path in SOURCES
        if any(name.startswith("slapo_zoo.zoo.schedules") for name in imported_modules(path))
    ]  # fmt: skip
    assert not named, f"look the table up in slapo_zoo.zoo.table: {named}"


def without_ends(below):
    """Return the import graph without files that import none of the others, removed until none is left: its circles."""
    while free := [name for name, needs in below.items() if not needs & below.keys()]:
        for name in free:
            del below[name]
    return sorted(below)


def test_source_files_have_no_circular_imports():
    """Imports within functions count too."""
    below = {name: set(imported_modules(path)) & MODULES.keys() for name, path in MODULES.items()}
    assert not (left := without_ends(below)), f"these files import each other: {left}"


MOST_FLOORS = 5


def test_longest_import_chain_within_a_package_has_at_most_five_files():
    """Count the longest chain of imports among the files of each folder; `cli` counts with its folders."""
    inside = {}
    for name, path in MODULES.items():
        folder = "slapo_zoo/cli" if "cli" in path.parts else str(path.parent.relative_to(ROOT))
        inside.setdefault(folder, {})[name] = set(imported_modules(path))

    def floor(name, below):
        return 1 + max((floor(other, below) for other in below[name] & below.keys()), default=0)

    floors = {folder: max(floor(name, below) for name in below) for folder, below in inside.items()}
    tall = {name: n for name, n in floors.items() if n > MOST_FLOORS}
    assert not tall, f"floors of imports: {tall}"


def test_ci_scripts_have_no_circular_imports():
    """Scripts of ci/ import each other by their path below ci/: `gpu_models`, `benchmarks.runs`."""
    place = {
        ".".join(path.relative_to(ROOT / "ci").with_suffix("").parts): path for path in files("ci")
    }
    below = {}
    for name, path in place.items():
        nodes = [
            node for node in ast.walk(tree(path)) if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        named = {
            f"{node.module}.{n.name}"
            for node in nodes
            if isinstance(node, ast.ImportFrom)
            for n in node.names
        }
        named |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
        named |= {n.name for node in nodes if isinstance(node, ast.Import) for n in node.names}
        below[name] = named & place.keys()
    assert not (left := without_ends(below)), f"these scripts import each other: {left}"


def test_contributing_page_lists_the_import_layers_of_the_package():
    """CONTRIBUTING.md prints this list, top floor first."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    shown = re.findall(r"^ +(\d+)  ([a-z.]+(?: \| [a-z.]+)?)(?: |$)", text, re.MULTILINE)
    floors = {int(number): set(names.split(" | ")) for number, names in shown}
    assert floors == {i + 1: set(layer.split()) for i, layer in enumerate(LAYERS)}


@pytest.mark.parametrize("name", LINKED)
def test_root_folders_without_init_files_do_not_shadow_installed_packages(name):
    """With an `__init__.py`, ./kernels would hide the package `kernels` that transformers imports."""
    assert not (ROOT / name / "__init__.py").exists()
    link = ROOT / LINKED[name] / name
    assert link.is_symlink(), f"{label(link)} must be a symlink; does the checkout keep symlinks?"
    assert link.resolve() == ROOT / name
    assert not os.readlink(link).startswith("/"), "a relative link works in every checkout"
