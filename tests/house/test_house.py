"""House rules that can be counted: lines, length of files, docstrings, annotations, names of files."""

import ast
import statistics
import sys

from sources import CODE, ROOT, files, label, lines, tree

MOST_LINES = 400
MOST_ENTRIES = 16  # of slapo_zoo/, the link to kernels/ and py.typed among them
LINE_BUDGET = 58_686
VAGUE = {"utils", "util", "helpers", "common", "misc"}
EVERYTHING = (*CODE, "hub_cards", "tests", "ci")


def test_source_files_have_at_most_400_lines_and_no_vague_names():
    long = [
        f"{label(path)}: {lines(path)}" for path in files(*EVERYTHING) if lines(path) > MOST_LINES
    ]
    assert not long, f"split these by what their parts are about: {long}"
    vague = [label(path) for path in files(*EVERYTHING) if path.stem in VAGUE]
    assert not vague, f"name these after what they hold: {vague}"


def test_median_length_of_source_files_is_below_its_limit():
    median = statistics.median(lines(path) for path in files(*CODE))
    assert median <= 120, f"the median file has {median} lines"


def test_package_has_at_most_the_allowed_number_of_lines():
    """Fail above the line budget: unused code is removed before a feature is added."""
    count = sum(lines(path) for path in files(*CODE))
    assert count <= LINE_BUDGET, (
        f"package, kernels and schedules have {count} lines of {LINE_BUDGET}"
    )


def test_package_root_contains_only_subpackages_and_errors():
    inside = (ROOT / "slapo_zoo").iterdir()
    entries = {path.name for path in inside if path.is_file() or any(path.rglob("*.py"))}
    assert len(entries) <= MOST_ENTRIES, f"{len(entries)} entries: {sorted(entries)}"
    loose = {name for name in entries if name.endswith(".py")}
    assert loose == {"__init__.py", "errors.py"}, "every other module belongs into a package"


def test_package_docstrings_state_what_the_package_imports():
    packages = (ROOT / "slapo_zoo").glob("*/__init__.py")
    silent = [label(p) for p in packages if "mports" not in (ast.get_docstring(tree(p)) or "")]
    assert not silent, f"say what lives there and what it imports: {silent}"


def public(nodes, *kinds):
    return [node for node in nodes if isinstance(node, kinds) and not node.name.startswith("_")]


def is_device_code(function):
    """Return True for Triton functions, which have no annotations because Triton interprets them."""
    return any(ast.unparse(d).startswith("triton.jit") for d in function.decorator_list)


def functions(tree):
    """Public functions, and the public methods and constructors of public classes."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    yield from (f for f in public(tree.body, *kinds) if not is_device_code(f))
    for cls in public(tree.body, ast.ClassDef):
        yield from public(cls.body, *kinds)
        yield from (n for n in cls.body if isinstance(n, kinds) and n.name == "__init__")


def bare_arguments(function):
    """Names of arguments without a type; self, cls and ctx have none by custom."""
    spec = function.args
    arguments = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs]
    return [
        a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls", "ctx")
    ]


def test_every_public_name_has_a_docstring():
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    silent = [
        f"{label(path)}: {node.name}" for path in files(*CODE)
        for node in public(tree(path).body, *kinds) if not ast.get_docstring(node)
    ]  # fmt: skip
    assert not silent, f"no docstring: {silent}"


def test_every_public_name_has_type_annotations():
    bare = [
        f"{label(path)}: {f.name}({', '.join(bare_arguments(f))})" for path in files(*CODE)
        for f in functions(tree(path)) if bare_arguments(f)
    ]  # fmt: skip
    assert not bare, f"arguments without a type: {bare}"


def test_ci_run_script_imports_only_the_standard_library():
    """ci/run.py starts before anything is installed."""
    names = set()
    for node in ast.walk(tree(ROOT / "ci" / "run.py")):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    assert names <= sys.stdlib_module_names
