"""The project's sources, read and parsed once for all tests of the house."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = ("slapo_zoo", "kernels", "schedules")
LINKED = {
    "kernels": "slapo_zoo",
    "schedules": "slapo_zoo/zoo",
    "hub_cards": "slapo_zoo/zoo",
}  # where the link is


@cache
def files(*folders):
    """Return Python files by their resolved path, so that a file behind a symlink counts once."""
    found = {path.resolve() for folder in folders for path in (ROOT / folder).rglob("*.py")}
    return sorted(path for path in found if "__pycache__" not in path.parts)


@cache
def text(path):
    return path.read_text(encoding="utf-8")


@cache
def tree(path):
    return ast.parse(text(path))


@cache
def statements(path):
    """Return the module and all statements of a file; their expressions are nine in ten of the nodes of `ast.walk`."""
    found = [tree(path)]
    for node in found:  # it grows
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            found += getattr(node, part, [])
    return found


def label(path):
    return str(path.relative_to(ROOT))


def lines(path):
    return len(text(path).splitlines())
