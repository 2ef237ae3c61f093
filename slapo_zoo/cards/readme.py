"""README.md of a card: rendered from one template, read with the plainest YAML there is."""

import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

from slapo_zoo.errors import CardError

_BLOCK = re.compile(r"\A---\r?\n(.*?)\n---\r?\n", re.DOTALL)
_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`[^`\n]*`")
_MARKUP = re.compile(r"<\s*[a-zA-Z/!?]|javascript:|data:text/html", re.IGNORECASE)


def render(metadata: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    """The text of a card.

    Args:
        metadata: the YAML block.
        values: what the template names.
    """
    from huggingface_hub import ModelCard, ModelCardData

    template = resources.files("slapo_zoo.hub_cards").joinpath("template.md")
    card = ModelCard.from_template(
        ModelCardData(**metadata), template_str=template.read_text(encoding="utf-8"), **values
    )
    return card.content.rstrip() + "\n"


def metadata_of(data: bytes, where: str = "README.md") -> dict[str, Any]:
    """The YAML block of a card's text; CardError on tags, aliases, repeated keys, markup or none."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CardError(where, "text", f"not UTF-8 at byte {error.start}", "write UTF-8") from None
    block = _BLOCK.match(text)
    if block is None:
        raise CardError(where, "metadata", "found no YAML block at its start", "see hub_cards/")
    body = _CODE.sub("", _FENCE.sub("", text[block.end() :]))
    if found := _MARKUP.search(body) or _MARKUP.search(block[1]):
        problem = f"found {found[0]!r}: markup that a page could run"
        raise CardError(where, "text", problem, "a card is Markdown without HTML")
    return _yaml(block[1], where)


def _yaml(text: str, where: str) -> dict[str, Any]:
    import yaml

    def fail(problem: str) -> CardError:
        return CardError(where, "metadata", problem, "plain YAML: no tags, anchors, repeated keys")

    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
                raise fail("found an anchor or an alias")
            if getattr(event, "tag", None):
                raise fail(f"found the tag {event.tag!r:.80}")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        _refuse_twice(node, fail)
        document = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, CardError):
            raise
        raise fail(f"no YAML: {str(error).splitlines()[0]:.120}") from None
    if not isinstance(document, dict):
        raise fail(f"found {type(document).__name__}, expected a mapping")
    return document


def _refuse_twice(node: Any, fail: Any, depth: int = 0) -> None:
    import yaml

    if depth > 16:
        raise fail("nested deeper than 16")
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value]
        if len({str(key) for key in keys}) < len(keys):
            raise fail("a key stands there twice")
        for _, value in node.value:
            _refuse_twice(value, fail, depth + 1)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _refuse_twice(value, fail, depth + 1)
