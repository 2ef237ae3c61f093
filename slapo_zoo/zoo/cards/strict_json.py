"""JSON parser for untrusted files: bounded size, depth and numbers; no repeated keys, no NaN."""

import json
import math
import re
from typing import Any

from slapo_zoo.errors import CardError

MAX_BYTES, MAX_DEPTH, MAX_STRING, MAX_INTEGER = 2**20, 16, 4096, 2**53
_ESCAPE = re.compile(r"\\.", re.DOTALL)
_BRACKET = re.compile(r"[\[{\]}]")


class RefusedError(ValueError):
    """Error of the parser for a JSON value that the files of a published schedule may not hold."""


def parse(data: bytes, where: str) -> Any:
    """Return the JSON document in `data`; raise CardError about file `where` if it is invalid or too large."""
    try:
        return _parse(data)
    except RefusedError as error:
        problem = str(error)
    except UnicodeDecodeError as error:
        problem = f"found bytes that are not UTF-8, at offset {error.start}"
    except json.JSONDecodeError as error:
        problem = f"{error.msg} in line {error.lineno}"
    hint = "edit the file: a card is short JSON without repeated keys or NaN"
    raise CardError(where, "JSON", problem, hint)


def _parse(data: bytes) -> Any:
    if len(data) > MAX_BYTES:
        raise RefusedError(f"found a file of {len(data)} bytes, expected at most {MAX_BYTES}")
    text = data.decode("utf-8")
    if _depth(text) > MAX_DEPTH:
        raise RefusedError(f"found brackets nested deeper than {MAX_DEPTH}")
    document = json.loads(
        text, object_pairs_hook=_pairs, parse_int=_integer, parse_float=_decimal,
        parse_constant=_constant,
    )  # fmt: skip
    longest = max(map(len, strings(document)), default=0)
    if longest > MAX_STRING:
        raise RefusedError(f"found a string of {longest} characters, expected at most {MAX_STRING}")
    return document


def _pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in items:
        if name in found:
            raise RefusedError(f"found the key {name!r:.80} twice in one object, expected once")
        found[name] = value
    return found


def _integer(digits: str) -> int:
    if len(digits) > 17 or abs(int(digits)) > MAX_INTEGER:
        raise RefusedError(f"found the integer {digits:.20}, expected at most 2**53")
    return int(digits)


def _decimal(digits: str) -> float:
    value = float(digits) if len(digits) <= 40 else math.inf
    return value if math.isfinite(value) else _constant(digits[:20])


def _constant(name: str) -> Any:
    raise RefusedError(f"found the number {name}, expected a finite one")


def _depth(text: str) -> int:
    """Return the deepest nesting of brackets in an unparsed JSON text; brackets in strings do not count."""
    depth = deepest = 0
    outside = " ".join(_ESCAPE.sub("", text).split('"')[::2])
    for bracket in _BRACKET.findall(outside):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    return deepest


def strings(document: Any) -> list[str]:
    """Return every string in a JSON document, keys included."""
    if isinstance(document, str):
        return [document]
    if isinstance(document, dict):
        return [s for key, value in document.items() for s in [key, *strings(value)]]
    if isinstance(document, list):
        return [s for value in document for s in strings(value)]
    return []


def canonical(document: Any) -> bytes:
    """Return a JSON document as bytes to be hashed: sorted keys, no spaces, UTF-8."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)  # fmt: skip
    return text.encode("utf-8")
