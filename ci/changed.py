"""Find the tests that a change affects, by the import graph: `ci/run.py test --changed [REV]`; standard library only."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EVERYTHING = ("pyproject.toml", "ci/constraints.txt", "tests/conftest.py", "slapo_zoo/__init__.py")
DATA = {
    "tests/golden": "tests/zoo/test_golden.py",
    "docs": "tests/house",
    "README.md": "tests/house",
}


def changed_files(base: str) -> list[str]:
    """Return the paths that differ from the commit `base` or are not tracked by git."""
    commands = (["diff", "--name-only", base], ["ls-files", "--others", "--exclude-standard"])
    found: list[str] = []
    for command in commands:
        answer = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)
        if answer.returncode:
            raise SystemExit(f"ci/run.py: git knows no {base!r}: {answer.stderr.strip()}")
        found += answer.stdout.split()
    return found


def module_of(path: Path) -> str:
    """Return the import name of a file: kernels/linear.py --> slapo_zoo.kernels.linear."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[:2] == ("tests", "support"):
        return parts[2]
    home = {"kernels": ("slapo_zoo",), "schedules": ("slapo_zoo", "zoo")}.get(parts[0], ())
    parts = (*home, *parts)
    return ".".join(parts).removesuffix(".__init__")


def public_homes() -> dict[str, str]:
    """Return {name that slapo_zoo exports: module that defines it}."""
    text = (ROOT / "slapo_zoo" / "__init__.py").read_text(encoding="utf-8")
    return dict(re.findall(r'^    "(\w+)": "([\w.]+)",', text, re.MULTILINE))


def imports(path: Path, homes: dict[str, str]) -> set[str]:
    """Return the modules that a file imports, also inside functions; `homes` is a result of `public_homes`.

    A public name, as in `slapo_zoo.verify`, counts as an import of the module that defines it.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "slapo_zoo":
            names = {name.name for name in node.names}
            found |= {f"slapo_zoo.{homes.get(name, name)}" for name in names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Attribute) and node.attr in homes:
            found.add(f"slapo_zoo.{homes[node.attr]}")
    return found


def reached(files: list[str]) -> list[str]:
    """Return the test files that import one of the changed `files`, directly or not, and folders of tests that always
    run.
    """
    if any(name in EVERYTHING for name in files):
        return ["tests"]
    homes = public_homes()
    folders = ("slapo_zoo", "kernels", "schedules", "tests")
    paths = {p.resolve() for folder in folders for p in (ROOT / folder).rglob("*.py")}
    needs = {module_of(p): imports(p, homes) for p in paths}
    where = {module_of(p): p for p in paths}
    dirty = {module_of(ROOT / name) for name in files if (ROOT / name).resolve() in paths}
    tables = {name for name in dirty if name.startswith("slapo_zoo.zoo.schedules.")}
    dirty |= {"slapo_zoo.zoo.table"} if tables else set()  # tables are found by name
    while new := {name for name in needs.keys() - dirty if needs[name] & dirty}:
        dirty |= new
    tests = {str(where[n].relative_to(ROOT)) for n in dirty & where.keys()}
    chosen = {name for name in tests if Path(name).name.startswith("test_")}
    chosen |= {test for name in files for start, test in DATA.items() if name.startswith(start)}
    return sorted(chosen | {"tests/house"})


if __name__ == "__main__":
    print("\n".join(reached(changed_files(sys.argv[1] if len(sys.argv) > 1 else "HEAD"))))
