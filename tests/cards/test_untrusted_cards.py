"""Files of strangers: the time to parse them grows linearly with their size, and their values have types and bounds."""

import contextlib
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slapo_zoo.errors import CardError
from slapo_zoo.language.schedule import FORMAT
from slapo_zoo.zoo.cards import Program, strict_json
from slapo_zoo.zoo.cards.readme import metadata_of

SHARD = ["transformer.h.*.mlp", "shard", {"param_name": "weight", "axis": 0}]
GOOD = {
    "format": FORMAT, "model": {"model_type": "gpt2", "class": "GPT2LMHeadModel"},
    "structure": None, "numbers": {"head_dim": "hidden_size // num_heads"}, "constraints": [],
    "steps": [SHARD],
}  # fmt: skip


def changed(**parts):
    return json.dumps({**GOOD, **parts}).encode()


def page(body):
    return b"---\n" + body + b"\n---\nx"


BOMBS = {
    "escaped quotes": (strict_json.parse, lambda n: b'"' + b'\\"' * (n // 2)),
    "quotes": (strict_json.parse, lambda n: b'"' * n),
    "many names, one twice": (
        strict_json.parse,
        lambda n: b"{" + b",".join(b'"k%d":1' % i for i in range(n // 10)) + b',"k1":1}',
    ),
    "brackets": (strict_json.parse, lambda n: b"[" * n),
    "flow": (metadata_of, lambda n: page(b"[" * n)),
    "flow maps": (metadata_of, lambda n: page(b"{a: " * (n // 4))),
    "compact lists": (metadata_of, lambda n: page(b"- " * (n // 2))),
    "questions": (metadata_of, lambda n: page(b"? " * (n // 2))),
    "keys": (metadata_of, lambda n: page(b"".join(b"k%d: v\n" % i for i in range(n // 10)))),
    "a long key": (metadata_of, lambda n: page(b"a" * n + b": b")),
    "backticks": (metadata_of, lambda n: page(b"a: b") + b"`" * n),
    "fences": (metadata_of, lambda n: page(b"a: b") + b"```\n" * (n // 4)),
    "smaller than": (metadata_of, lambda n: page(b"a: b") + b"< " * (n // 2)),
}


@pytest.mark.parametrize("case", BOMBS)
def test_schedule_card_parsers_do_not_hang_on_files_of_a_million_characters(case):
    """A parser that is quadratic in its input would need as long as the whole suite for these files."""
    parse, make = BOMBS[case]
    with contextlib.suppress(CardError):
        metadata = parse is metadata_of
        parse(make(60_000 if metadata else 1_000_000), *(() if metadata else ("x",)))


@given(st.text(alphabet='{}[]",:\\ a1\n', max_size=60))
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_json_depth_found_by_the_scanner_before_parsing_equals_the_parsed_depth(text):
    """The scanner that runs before the parser sees every bracket that the parser will."""

    def depth(value):
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None  # fmt: skip
        return 0 if inside is None else 1 + max(map(depth, inside), default=0)

    try:
        document = json.loads(text)
    except ValueError:
        return
    assert strict_json._depth(text) == depth(document)


WRONG = [
    ("axis", 1.5), ("axis", "x"), ("axis", True), ("axis", None), ("axis", -3), ("axis", 1.0),
    ("axis", [1]), ("axis", 2**40), ("param_name", 3), ("param_name", True), ("pad", 1),
    ("pad", "yes"), ("groups", 3), ("groups", [1.5]), ("groups", [True]), ("unit", 0),
    ("mesh_dim", None), ("together", {"=": 3}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_schedule_card_with_a_directive_argument_of_wrong_type_is_refused(name, value):
    step = [SHARD[0], "shard", {**SHARD[2], name: value}]
    with pytest.raises(CardError):
        Program.parse(changed(steps=[step]))


def test_schedule_card_with_directive_arguments_of_right_type_is_accepted():
    right = {"axis": 1, "groups": [{"=": "num_heads"}, 2], "unit": {"=": "head_dim"}, "pad": True}
    step = [SHARD[0], "shard", {**SHARD[2], **right}]
    assert Program.parse(changed(steps=[step])).steps[0][2]["axis"] == 1
