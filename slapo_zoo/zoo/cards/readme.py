"""README.md of a card (a published schedule): filled in from a template, read with a restricted YAML parser."""

import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

from slapo_zoo.errors import CardError

MAX_METADATA, MAX_DEPTH = 2**16, 16
_BLOCK = re.compile(r"\A---\r?\n(.*?)\n---\r?\n", re.DOTALL)
_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`[^`\n]*`")
_MARKUP = re.compile(r"<\s*[a-zA-Z/!?]|javascript:|data:text/html", re.IGNORECASE)


def render(metadata: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    """Return the text of the README.md of a published schedule, filled in from the template.

    Args:
        metadata: entries of the YAML block at the start.
        values: variable of the template (`hub_cards/template.md`), e.g. "title" --> value; see `Card.page`.
    """
    from huggingface_hub import ModelCard, ModelCardData

    template = resources.files("slapo_zoo.zoo.hub_cards").joinpath("template.md")
    card = ModelCard.from_template(
        ModelCardData(**metadata), template_str=template.read_text(encoding="utf-8"), **values
    )
    return card.content.rstrip() + "\n"


def metadata_of(data: bytes) -> dict[str, Any]:
    """Return the YAML metadata at the start of the README.md of a published schedule.

    Raises CardError for a missing block, HTML in the text, and YAML with tags, aliases or repeated keys.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _refused(f"not UTF-8 at byte {error.start}", "write UTF-8") from None
    block = _BLOCK.match(text)
    if block is None:
        hint = "begin the file with the `---` block of YAML that `slapo-zoo card make` writes"
        raise _refused("found no YAML block at the start of the file", hint)
    body = _CODE.sub("", _FENCE.sub("", text[block.end() :]))
    if found := _MARKUP.search(body) or _MARKUP.search(block[1]):
        problem = f"found the HTML {found[0]!r}, which a page of the Hub could run"
        raise _refused(problem, "write Markdown without HTML")
    return _yaml(block[1])


def _refused(problem: str, hint: str = "") -> CardError:
    hint = hint or "write plain YAML without tags, anchors, repeated keys and deep nesting"
    return CardError("README.md", "metadata", problem, hint)


def _yaml(text: str) -> dict[str, Any]:
    import yaml

    if len(text) > MAX_METADATA:
        problem = f"found {len(text)} characters, expected at most {MAX_METADATA}"
        raise _refused(problem, "move text out of the YAML block, below its second ---")
    try:
        document = _plain_loader()(text).get_single_data()
    except CardError:
        raise
    except (yaml.YAMLError, ValueError) as error:
        problem = f"this is not valid YAML: {str(error).splitlines()[0]:.120}"
        raise _refused(problem, "correct the block between the two ---") from None
    if not isinstance(document, dict):
        raise _refused(
            f"found {type(document).__name__}, expected a mapping",
            "write lines `key: value` between the ---",
        )
    return document


def _plain_loader() -> Any:
    """Return a subclass of `yaml.SafeLoader` that refuses tags, anchors, repeated keys and deep nesting."""
    import yaml

    class Plain(yaml.SafeLoader):
        depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            event = self.peek_event()
            if isinstance(event, yaml.AliasEvent) or event.anchor:
                raise _refused("found an anchor (&name) or an alias (*name) of YAML")
            if event.tag:
                raise _refused(f"found the tag {event.tag!r:.80}")
            self.depth += 1
            if self.depth > MAX_DEPTH:
                raise _refused(f"found values nested deeper than {MAX_DEPTH}")
            node = super().compose_node(parent, index)
            self.depth -= 1
            keys = [key.value for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []  # fmt: skip
            if twice := [key for i, key in enumerate(map(str, keys)) if key in map(str, keys[:i])]:
                raise _refused(f"found the key {twice[0]!r:.80} twice, expected once")
            return node

    return Plain
