"""Conversion of docstrings for the site: `rewrite:` of a primitive keeps its line breaks, `<name>` is no HTML tag.

This is an extension of Griffe, which mkdocs.yml names.
"""

import re
from typing import Any

from griffe import Extension  # pyright: ignore[reportMissingImports] - comes with the extra `docs`

REWRITE = re.compile(r"^rewrite:.*?(?=\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(```.*?```|`[^`\n]+`)", re.DOTALL)


def as_markdown(text: str) -> str:
    """Return a docstring as Markdown."""
    fenced = REWRITE.sub(lambda found: f"```text\n{found[0]}\n```", text)
    parts = CODE.split(fenced)  # every second one is code
    parts[::2] = (re.sub(r"<(?=\w)", "&lt;", part) for part in parts[::2])
    return "".join(parts)


class Docstrings(Extension):
    """Extension of Griffe, which calls it for every documented object."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Replace the docstring of `obj` by its Markdown."""
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
