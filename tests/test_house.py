"""House rules that can be counted: length of files, docstrings, annotations, names of files."""

import ast
import statistics
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CODE = ("slapo_zoo", "kernels", "schedules")
MOST_LINES = 400
VAGUE = {"utils", "util", "helpers", "common", "misc"}


def files(*folders):
    """Python files by their real place: what lies behind a symlink is counted once."""
    found = {path.resolve() for folder in folders for path in (ROOT / folder).rglob("*.py")}
    return sorted(path for path in found if "__pycache__" not in path.parts)


def label(path):
    return str(path.relative_to(ROOT))


def lines(path):
    return len(path.read_text(encoding="utf-8").splitlines())


CODE_FILES = files(*CODE)
ALL_FILES = files(*CODE, "hub_cards", "tests", "ci")


@pytest.mark.parametrize("path", ALL_FILES, ids=label)
def test_file_is_short_and_well_named(path):
    assert lines(path) <= MOST_LINES, f"split {label(path)} by what its parts are about"
    assert path.stem not in VAGUE, f"name {label(path)} after what it holds"


def test_median_file_length(record_property):
    """Reported, and held to the 120 lines that the house aims at."""
    median = statistics.median(lines(path) for path in CODE_FILES)
    record_property("median_file_length", median)
    print(f"median file length: {median} lines over {len(CODE_FILES)} files")
    assert median <= 120


def public(nodes, *kinds):
    return [node for node in nodes if isinstance(node, kinds) and not node.name.startswith("_")]


def is_device_code(function):
    """Triton reads an annotation as an instruction, so its functions have none."""
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


@pytest.mark.parametrize("path", CODE_FILES, ids=label)
def test_public_names_are_documented_and_typed(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    named = public(tree.body, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    silent = [node.name for node in named if not ast.get_docstring(node)]
    assert not silent, f"{label(path)}: no docstring: {silent}"
    bare = {f.name: bare_arguments(f) for f in functions(tree) if bare_arguments(f)}
    assert not bare, f"{label(path)}: arguments without a type: {bare}"


def test_run_needs_only_the_standard_library():
    """ci/run.py starts before anything is installed."""
    tree = ast.parse((ROOT / "ci" / "run.py").read_text(encoding="utf-8"))
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    assert names <= sys.stdlib_module_names
