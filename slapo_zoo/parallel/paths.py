"""Patterns over module paths.

`*` is one segment between dots, `**` any number of segments (also none), and `:Name` at the end keeps only modules
whose class has that name: `**:Dropout` is every dropout of the model. The empty pattern is the model itself.
"""

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache


@lru_cache(maxsize=4096)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of a glob of module paths; the caller has taken off a `:Class` at its end.

    >>> bool(compile_pattern("layers.*.mlp").fullmatch("layers.3.mlp"))
    True
    >>> bool(compile_pattern("layers.*.mlp").fullmatch("layers.3.block.mlp"))
    False
    >>> bool(compile_pattern("**.mlp").fullmatch("mlp"))
    True
    """
    regex = re.escape(pattern).replace(r"\*\*\.", r"(?:[^.]+\.)*").replace(r"\*\*", r".*")
    return re.compile(regex.replace(r"\*", r"[^.]+"))


def select(pattern: str, class_names: Mapping[str, str]) -> list[str]:
    """Return the paths that `pattern` matches, in model order.

    Args:
        pattern: a pattern with `*`, `**` and `:Name`, e.g. `**:Dropout`.
        class_names: path of every module --> name of its class.
    """
    glob, _, class_name = pattern.partition(":")
    found = select_paths(glob, class_names)
    return [path for path in found if class_name in ("", class_names[path])]


def select_paths(glob: str, paths: Collection[str]) -> list[str]:
    """Return those of `paths`, in order, that `glob` matches: `*` is one segment between dots, `**` any number."""
    if "*" not in glob:
        return [glob] if glob in paths else []
    matches = compile_pattern(glob).fullmatch
    return [path for path in paths if matches(path)]


def nearest(pattern: str, paths: Iterable[str], count: int = 3) -> list[str]:
    """Return at most `count` paths that are most similar to a misspelt pattern."""
    return difflib.get_close_matches(pattern, list(paths), n=count, cutoff=0.3)
