"""Contents of the wheel and its dependencies: few packages, all that the sources import, and the files that they read."""

import ast
import re
import sys
import tomllib

from sources import CODE, ROOT, files, statements

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]
MOST_DEPENDENCIES = 12
FREE = {"peft", "trl"}  # the user's own objects come from them, so they are there
BROUGHT = {"pyarrow": "datasets", "filelock": "datasets", "megatron": "megatron-core", "yaml": "pyyaml"}  # fmt: skip


def names_of(requirements):
    """Return the packages of a list; an extra of this package counts as its packages."""
    found = set()
    for text in requirements:
        name, inner = re.match(r"([\w.-]+)(?:\[([\w,-]+)\])?", text).groups()
        if name == PROJECT["project"]["name"]:
            found |= names_of(r for extra in inner.split(",") for r in EXTRAS[extra])
        else:
            found.add(name.lower().replace("_", "-"))
    return found


DIRECT = names_of(PROJECT["project"]["dependencies"])


def test_required_dependencies_of_the_package_stay_within_their_limit():
    assert len(DIRECT) <= MOST_DEPENDENCIES, sorted(DIRECT)


def imported():
    """Third-party package --> names of the files that import it."""
    found = {}
    for path in files(*CODE):
        for node in statements(path):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for top in {name.partition(".")[0] for name in names} - {"", "slapo_zoo"}:
                if top not in sys.stdlib_module_names:
                    found.setdefault(top, set()).add(path.name)
    return found


def test_every_package_that_the_source_imports_is_a_dependency_or_in_an_extra():
    offered = DIRECT | names_of(r for name, rs in EXTRAS.items() if name != "dev" for r in rs)
    strange = {
        top: paths for top, paths in imported().items()
        if BROUGHT.get(top, top).replace("_", "-") not in offered | FREE
    }  # fmt: skip
    assert not strange, strange


def test_imports_of_the_train_command_are_covered_by_the_train_extra():
    """`slapo-zoo train` on tables, with trackers: docs/training.md."""
    train = DIRECT | names_of(EXTRAS["train"])
    cli = {path.name for path in files("slapo_zoo/cli", "slapo_zoo/data")}
    missing = {
        top for top, paths in imported().items()
        if paths <= cli and BROUGHT.get(top, top).replace("_", "-") not in train
    }  # fmt: skip
    assert not missing


def test_wheel_contains_every_data_file_that_the_package_reads():
    """Cards are not in the wheel: they are on the Hub and in a checkout, and the package reads none."""
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["slapo_zoo.zoo.hub_cards"]
    held = {p for pattern in patterns for p in (ROOT / "hub_cards").glob(pattern)}
    assert {path.name for path in held} >= {"template.md", "tuning.json", "cpu.json"}
    assert not [
        path for path in held if path.name in ("schedule.json", "verify.json", "bench.json")
    ]
    readers = [path.name for path in files(*CODE) if "hub_cards" in path.read_text()]
    assert sorted(readers) == ["readme.py", "tables.py", "tuned.py"]
