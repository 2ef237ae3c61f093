"""README.md of a card: filled in from a template, and read with a restricted YAML parser."""

import re
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

from slapo_zoo.errors import CardError

MAX_METADATA, MAX_DEPTH = 2**16, 16
_BRACKET = re.compile(r"[\[{\]}]")
_BLOCK = re.compile(r"\A---\r?\n(.*?)\n---\r?\n", re.DOTALL)
_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`[^`\n]*`")
_MARKUP = re.compile(r"<\s*[a-zA-Z/!?]|javascript:|data:text/html", re.IGNORECASE)


def render(metadata: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    """Return the text of README.md, filled in from the template.

    Args:
        metadata: entries of the YAML block at the start.
        values: variables of the template, by name.
    """
    from huggingface_hub import ModelCard, ModelCardData

    template = resources.files("slapo_zoo.hub_cards").joinpath("template.md")
    card = ModelCard.from_template(
        ModelCardData(**metadata), template_str=template.read_text(encoding="utf-8"), **values
    )
    return card.content.rstrip() + "\n"


def metadata_of(data: bytes, where: str = "README.md") -> dict[str, Any]:
    """Return the YAML metadata at the start of a README.md.

    Raises CardError for a missing block, HTML in the text, and YAML with tags, aliases or repeated keys.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CardError(where, "text", f"not UTF-8 at byte {error.start}", "write UTF-8") from None
    block = _BLOCK.match(text)
    if block is None:
        raise CardError(
            where,
            "metadata",
            "found no YAML block at the start of the file",
            "begin the file as the cards in hub_cards/ do",
        )
    body = _CODE.sub("", _FENCE.sub("", text[block.end() :]))
    if found := _MARKUP.search(body) or _MARKUP.search(block[1]):
        problem = f"found {found[0]!r}: markup that a page could run"
        raise CardError(where, "text", problem, "write Markdown without HTML")
    return _yaml(block[1], where)


def _depth(text: str) -> int:
    """Return the deepest nesting of brackets, those in strings included; called before YAML is parsed."""
    depth = deepest = 0
    for bracket in _BRACKET.findall(text):
        depth = max(0, depth + (1 if bracket in "[{" else -1))
        deepest = max(deepest, depth)
    return deepest


def _yaml(text: str, where: str) -> dict[str, Any]:
    import yaml

    def fail(problem: str) -> CardError:
        return CardError(
            where, "metadata", problem, "write plain YAML without tags, anchors and repeated keys"
        )

    if len(text) > MAX_METADATA:
        raise fail(f"found {len(text)} characters, expected at most {MAX_METADATA}")
    if _depth(text) > MAX_DEPTH:
        raise fail(f"nested deeper than {MAX_DEPTH}")
    try:
        events = list(_plain_events(text, fail))
        document = _document(events, fail)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, CardError):
            raise
        raise fail(f"no YAML: {str(error).splitlines()[0]:.120}") from None
    if not isinstance(document, dict):
        raise fail(f"found {type(document).__name__}, expected a mapping")
    return document


def _plain_events(text: str, fail: Any) -> Iterator[Any]:
    """Yield the parser events of a YAML text; raise `fail(problem)` for tags, anchors and deep nesting."""
    import yaml

    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise fail(f"nested deeper than {MAX_DEPTH}")
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise fail("found an anchor or an alias")
        if getattr(event, "tag", None):
            raise fail(f"found the tag {event.tag!r:.80}")
        yield event


def _document(events: list[Any], fail: Any) -> Any:
    """Return the value that YAML events describe; raise `fail(problem)` for a repeated key."""
    from yaml.composer import Composer
    from yaml.constructor import SafeConstructor
    from yaml.resolver import Resolver

    class Loader(Composer, SafeConstructor, Resolver):
        def __init__(self) -> None:
            for base in (Composer, SafeConstructor, Resolver):
                base.__init__(self)
            self.left = events[::-1]

        def check_event(self, *kinds: Any) -> bool:
            return bool(self.left) and (not kinds or isinstance(self.left[-1], kinds))

        def peek_event(self) -> Any:
            return self.left[-1]

        def get_event(self) -> Any:
            return self.left.pop()

    loader = Loader()
    node = loader.get_single_node()
    _refuse_twice(node, fail)
    return None if node is None else loader.construct_document(node)


def _refuse_twice(node: Any, fail: Any) -> None:
    import yaml

    inside = []
    if isinstance(node, yaml.MappingNode):
        keys = {str(key.value) for key, _ in node.value}
        if len(keys) < len(node.value):
            raise fail("found a key twice")
        inside = [value for _, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        inside = node.value
    for value in inside:
        _refuse_twice(value, fail)
