"""Conversion of docstrings into pages: `rewrite:` of a primitive keeps its lines, `<name>` is no HTML tag.

A Griffe extension; mkdocs.yml names it.
"""

import re
from typing import Any

from griffe import Extension  # pyright: ignore[reportMissingImports] - comes with the extra `docs`

REWRITE = re.compile(r"^rewrite:.*?(?=\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(```.*?```|`[^`\n]+`)", re.DOTALL)


def as_markdown(text: str) -> str:
    """A docstring as Markdown."""
    fenced = REWRITE.sub(lambda found: f"```text\n{found[0]}\n```", text)
    parts = CODE.split(fenced)  # every second one is code
    parts[::2] = (re.sub(r"<(?=\w)", "&lt;", part) for part in parts[::2])
    return "".join(parts)


class Docstrings(Extension):
    """Called for every object that is documented."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Rewrite its docstring."""
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
