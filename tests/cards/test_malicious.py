"""Cards from strangers: each of these is refused, and nothing is executed, written or left behind."""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import GPT2Config

from slapo_zoo import Mesh
from slapo_zoo.errors import CardError
from slapo_zoo.zoo.cards import Program
from slapo_zoo.zoo.cards.card import read_card
from slapo_zoo.zoo.cards.hub import Reference
from slapo_zoo.zoo.cards.make import zoo_card
from slapo_zoo.zoo.cards.readme import metadata_of

CONFIG = GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=65, architectures=["GPT2LMHeadModel"])  # fmt: skip
CARD = zoo_card(CONFIG, None, Mesh(tp=2, pp=2), "gpt2")
GOOD = CARD.program.document()
SHARD = ["transformer.h.*.mlp", "shard", {"param_name": "weight", "axis": 0}]
MESH = {"tp": 2, "pp": 2, "dp": 1, "stages": 2}


def changed(**parts):
    return json.dumps({**GOOD, **parts}).encode()


def step(pattern=SHARD[0], name=SHARD[1], **arguments):
    return changed(
        steps=[[pattern, name, {**SHARD[2], **arguments} if name == "shard" else arguments]]
    )


def nested(depth):
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


TEXT = json.dumps(GOOD)
PROGRAMS = {
    "empty": b"",
    "not JSON": b"import os",
    "not UTF-8": b'{"format": "\xff"}',
    "a pickle": b"\x80\x04cposix\nsystem\n(S'touch pwned'\ntR.",
    "a list": b"[]",
    "a number": b"7",
    "null": b"null",
    "NaN": TEXT.replace('"structure"', '"structure": NaN, "x"').encode(),
    "infinity": step(axis=0).replace(b'"axis": 0', b'"axis": Infinity'),
    "1e999": step(axis=0).replace(b'"axis": 0', b'"axis": 1e999'),
    "a long decimal": step(axis=0).replace(b'"axis": 0', b'"axis": 0.' + b"1" * 5000),
    "a huge integer": step(axis=10**17),
    "10 ** 4000": step(axis=0).replace(b'"axis": 0', b'"axis": 1' + b"0" * 4000),
    "a repeated key": TEXT.replace('"format"', '"format": "x", "format"', 1).encode(),
    "a repeated key in a step": step().replace(b'"axis": 0', b'"axis": 0, "axis": 1'),
    "nested 20 deep": changed(steps=nested(20)),
    "nested 100000 deep": b"[" * 100_000 + b"]" * 100_000,
    "open brackets only": b'{"a":' * 100_000,
    "2 MB": changed(constraints=["a" * 2**21]),
    "10 ** 7 steps": b'{"steps": [' + b"[]," * 10**7 + b"[]]}",
    "20000 steps": changed(steps=[["", "fork_rng", {}]] * 20_000),
    "a long text": changed(constraints=["1 == " + "1" * 5000]),
    "unknown format": changed(format="slapo-zoo-schedule/2"),
    "no format": json.dumps({k: v for k, v in GOOD.items() if k != "format"}).encode(),
    "no model": json.dumps({k: v for k, v in GOOD.items() if k != "model"}).encode(),
    "an unknown field": changed(code="import os"),
    "an unknown field of the model": changed(model={**GOOD["model"], "module": "os"}),
    "a class path": changed(model={**GOOD["model"], "class": "os.system"}),
    "a dunder class": changed(model={**GOOD["model"], "class": "__import__"}),
    "an unknown primitive": step(name="exec"),
    "hook": step(name="hook", mode="fwd_pre", func="os.system"),
    "replace_all": step(name="replace_all", target_mod_type="Linear", make_mod_fn="os.system"),
    "annotate": step(name="annotate", param_name="weight", key="data", value=0),
    "trace": step(name="trace"),
    "fuse": step(name="fuse", compiler="inductor"),
    "a dunder primitive": step(name="__init__"),
    "a primitive that is a number": changed(steps=[["a", 1, {}]]),
    "an unknown argument": step(code="x"),
    "a missing argument": changed(steps=[["a", "shard", {}]]),
    "a live argument": step(name="replace", new="bias_gelu", subgraph="os"),
    "an object for an argument": step(axis={"x": 1}),
    "an object beside arithmetic": step(axis={"=": "1", "x": 1}),
    "arguments as a list": changed(steps=[["a", "shard", ["weight", 0]]]),
    "a step of four": changed(steps=[[*SHARD, 1]]),
    "a step of two": changed(steps=[SHARD[:2]]),
    "steps as an object": changed(steps={"0": SHARD}),
    "a dunder path": step("transformer.__class__.__init__"),
    "a dunder parameter": step(param_name="__class__"),
    "path traversal": step("../../etc/passwd"),
    "an absolute path": step("/etc/passwd"),
    "a path with a line end": step("transformer\n"),
    "a path with a NUL": step("transformer\x00"),
    "Cyrillic look-alikes": step("trаnsformer.h.*"),  # noqa: RUF001
    "a right-to-left override": step("transformer\u202e.h"),
    "full-width letters": step("ｔransformer"),  # noqa: RUF001
    "a regex bomb of stars": step("*" * 200),
    "a regex bomb of double stars": step(".".join(["**"] * 20) + ".x"),
    "a regex in a path": step("(a+)+$"),
    "a long path": step("a." * 2000),
    "a shell in a parameter": step(param_name="weight; touch pwned"),
    "a call in arithmetic": changed(constraints=["__import__('os') == 1"]),
    "an attribute in arithmetic": changed(numbers={"a": "config.x"}),
    "a power": changed(numbers={"a": "9 ** 9 ** 9"}),
    "a lambda": changed(numbers={"a": "(lambda: 1)()"}),
    "deep parentheses": changed(numbers={"a": "(" * 100 + "1" + ")" * 100}),
    "a sum for a constraint": changed(constraints=["1 + 1"]),
    "a constraint that is no text": changed(constraints=[1]),
    "a dunder number": changed(numbers={"__builtins__": "1"}),
    "a structure that is no hash": changed(structure="sha256:" + "0" * 63),
    "a hash with a line end": changed(structure="sha256:" + "0" * 64 + "\n"),
}  # fmt: skip

RESOLVED = {
    "a division by zero": changed(numbers={"a": "1 // (n_head - n_head)"}),
    "a number beyond 2 ** 53": changed(numbers={"a": "9007199254740992 * 9007199254740992"}),
    "an unknown number": changed(numbers={"a": "secret + 1"}),
    "a text of the config": changed(numbers={"a": "activation_function + 1"}),
    "a method of the config": changed(numbers={"a": "to_dict + 1"}),
    "another family": changed(model={"model_type": "bert", "class": "BertModel"}),
    "a constraint that fails": changed(constraints=["tp == 3"]),
}

PAGES = {
    "no block": b"# a card",
    "a tag": b"---\nx: !!python/object/apply:os.system ['touch pwned']\n---\n",
    "a harmless tag": b"---\nx: !!str 1\n---\n",
    "an alias bomb": b"---\na: &a [1, 1]\nb: &b [*a, *a]\nc: [*b, *b]\n---\n",
    "a repeated key": b"---\na: 1\na: 2\n---\n",
    "a list": b"---\n- a\n---\n",
    "a text": b"---\nhello\n---\n",
    "not YAML": b"---\na: [1\n---\n",
    "not UTF-8": b"---\na: \xff\n---\n",
    "deep": b"---\na: " + b"[" * 500 + b"]" * 500 + b"\n---\n",
    "a script": b"---\na: 1\n---\n<script>alert(1)</script>",
    "an image that runs": b"---\na: 1\n---\n<img src=x onerror=alert(1)>",
    "a link that runs": b"---\na: 1\n---\n[x](javascript:alert(1))",
    "a script in the metadata": b"---\na: <script>1</script>\n---\n",
    "a comment": b"---\na: 1\n---\n<!-- hidden -->",
    "another hash": CARD.contents()["README.md"].replace(b"hash: sha256:", b"hash: sha256:0", 1),
    "no hash": b"---\nlicense: mit\n---\n",
    "a schedule that is a text": b"---\nschedule: x\n---\n",
}


@pytest.fixture
def card(tmp_path, monkeypatch):
    """Return a valid card; fail when the test writes or imports anything else."""
    monkeypatch.chdir(tmp_path)
    CARD.write(tmp_path / "card")
    before, modules = everything(tmp_path), set(sys.modules)
    yield tmp_path / "card"
    assert not (tmp_path / "pwned").exists()
    assert everything(tmp_path) - before == set() or (tmp_path / "planted").exists()
    assert not {name for name in set(sys.modules) - modules if name.startswith("trusted")}


def everything(folder: Path):
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_valid_schedule_card_read_from_its_folder_equals_the_written_card(card):
    assert read_card(card) == CARD
    assert Program.parse(CARD.program.to_bytes()).resolve(CONFIG, MESH)


@pytest.mark.parametrize("case", PROGRAMS)
def test_malicious_schedule_json_of_a_card_is_refused_with_a_short_error(case):
    with pytest.raises(CardError) as caught:
        Program.parse(PROGRAMS[case])
    assert str(caught.value).count("\n") <= 2
    assert len(str(caught.value)) < 2000
    assert caught.value.hint


@pytest.mark.parametrize("case", RESOLVED)
def test_schedule_card_with_invalid_arithmetic_expressions_is_refused(case):
    with pytest.raises(CardError):
        Program.parse(RESOLVED[case]).resolve(CONFIG, MESH)


@pytest.mark.parametrize("case", PAGES)
def test_malicious_readme_of_a_schedule_card_is_refused(case, card):
    (card / "README.md").write_bytes(PAGES[case])
    with pytest.raises(CardError):
        read_card(card)


def _link(card, tmp_path):
    (tmp_path / "planted").write_bytes((card / "schedule.json").read_bytes())
    (card / "schedule.json").unlink()
    (card / "schedule.json").symlink_to(tmp_path / "planted")


def _link_out_of_the_cache(card, tmp_path):
    _link(card, tmp_path)
    return card


def _pipe(card, tmp_path):
    (tmp_path / "planted").touch()
    (card / "bench.json").unlink()
    os.mkfifo(card / "bench.json")


def _folder(card, tmp_path):
    (tmp_path / "planted").touch()
    (card / "bench.json").unlink()
    (card / "bench.json").mkdir()


def _pickle(card, tmp_path):
    (tmp_path / "planted").touch()
    (card / "tuning.pkl").write_bytes(b"\x80\x04.")


def _code(card, tmp_path):
    (tmp_path / "planted").touch()
    (card / "setup.py").write_text("open('pwned', 'w')")


def _tampered(card, tmp_path):
    data = (card / "schedule.json").read_bytes()
    (card / "schedule.json").write_bytes(data.replace(b'"axis": 0', b'"axis": 1', 1))


def _too_large(card, tmp_path):
    (card / "bench.json").write_bytes(b" " * (2**20 + 1))


def _report_list(card, tmp_path):
    (card / "verify.json").write_text("[1]")


def _missing(card, tmp_path):
    (card / "README.md").unlink()


@pytest.mark.parametrize(
    "plant",
    [_link, _link_out_of_the_cache, _pipe, _folder, _pickle, _code, _tampered, _too_large,
     _report_list, _missing],
)  # fmt: skip
def test_schedule_card_folder_with_unexpected_files_is_refused(plant, card, tmp_path):
    root = plant(card, tmp_path)
    with pytest.raises(CardError):
        read_card(card, root)


@pytest.mark.parametrize(
    "name",
    ["../x", "/etc", "a/b/c", "a/../b", "a b/c", "org/name@", "org/name@a b", "org/name@../x",
     "https://x/y", "\u043e/n", "", "org/name@" + "a" * 500],
)  # fmt: skip
def test_malformed_hub_reference_to_a_schedule_card_is_refused(name):
    with pytest.raises(CardError):
        Reference.parse(name)


def test_corpus_of_malicious_schedule_cards_has_at_least_60_entries():
    assert len({*PROGRAMS, *RESOLVED, *(f"page: {name}" for name in PAGES)}) >= 60


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    | st.sampled_from(["shard", "sync", "**", "transformer.h.*", "n_head // tp", "=", "weight"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.sampled_from(["=", "axis", "param_name", "mode", "steps", "format", "x"]) | st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


def fuzz(data: bytes):
    with suppress(CardError):
        Program.parse(data).resolve(CONFIG, MESH)


def mutated():
    """Return a valid document in which one value is replaced by a random one."""
    part = st.sampled_from([*GOOD])
    whole = st.builds(lambda k, v: {**GOOD, k: v}, part, JSON)
    pattern, name = (
        st.text(max_size=12),
        st.sampled_from(["shard", "sync", "checkpoint", "replace"]),
    )
    steps = st.lists(
        st.tuples(pattern, name, st.dictionaries(st.text(max_size=8), JSON, max_size=3)), max_size=3
    )
    return whole | st.builds(lambda s: {**GOOD, "steps": s}, steps)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=200) | mutated().map(lambda d: json.dumps(d).encode()))
def test_randomly_mutated_schedule_json_parses_or_raises_card_error(data):
    fuzz(data)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300).map(lambda b: b"---\n" + b + b"\n---\n") | st.binary(max_size=50))
def test_randomly_mutated_schedule_card_readmes_parse_or_raise_card_error(data):
    with suppress(CardError):
        metadata_of(data)


@pytest.mark.soak
@pytest.mark.parametrize("part", range(10))
@settings(
    max_examples=10_000, derandomize=False, deadline=None, suppress_health_check=list(HealthCheck)
)
@given(st.binary(max_size=200) | mutated().map(lambda d: json.dumps(d).encode()))
def test_hundred_thousand_mutated_schedule_json_files_parse_or_raise_card_error(part, data):
    """Fuzz a hundred thousand programs, in ten parts that each end before a test counts as hanging."""
    fuzz(data)
