"""Data that cannot be trained on: each is an error in four parts, and rows with gaps are left out aloud."""

import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from cli_runs import failure, run, write_gpt2


def rows(**columns):
    count = max(map(len, columns.values()))
    one = lambda i: {name: held[i % len(held)] for name, held in columns.items()}  # noqa: E731
    return "".join(json.dumps(one(i)) + "\n" for i in range(20 * count))


TAGGED = {"tokens": [["to", "be"]]}
TABLES = {
    "null.parquet": pa.table({"text": pa.nulls(9, pa.string()), "label": [0] * 9}),
    "none.parquet": pa.table({"text": pa.array([], pa.string()), "label": pa.array([], pa.int64())}),
    "some.parquet": pa.table({"text": ["to be", None, "or not"] * 9, "label": [0, 1, None] * 9}),
}  # fmt: skip
FILES = {
    "empty.jsonl": "", "blank.jsonl": "\n\n", "empty.csv": "", "head.csv": "text,label\n", "bad.parquet": "PAR1",
    "ragged.csv": "text,label\nto be,a\nto,b,c,d\n", "cut.jsonl": rows(text=["to"], label=["a"]) + '{"text": "to',
    "number.jsonl": rows(text=[1], label=[0]), "name.jsonl": rows(txt=["to be"], label=[0]),
    "minus.jsonl": rows(text=["to be"], label=[-1, 0, 1]), "real.jsonl": rows(text=["to"], label=[0.5, 1.5]),
    "tags.jsonl": rows(**TAGGED, tags=[[0, 1], [0]]), "words.jsonl": rows(tokens=["to be"], tags=[[0, 1]]),
    "text.jsonl": rows(text=["to be or not"]),
}  # fmt: skip
CASES = {
    "empty.jsonl": "found no row", "blank.jsonl": "found no row", "empty.csv": "No columns", "head.csv": "found no row",
    "none.parquet": "found no row", "null.parquet": "found 9 rows, none of which has all of text",
    "bad.parquet": "Parquet", "ragged.csv": "Expected 2 fields in line 3", "cut.jsonl": "JSON parse error",
    "number.jsonl": "column 'text': found 1, expected a text", "name.jsonl": "--set columns.text=NAME",
}  # fmt: skip
LABELLED = {
    "minus.jsonl": ("classify", "found -1, expected 0 to 1"), "real.jsonl": ("classify", "labels of float"),
    "number.jsonl": ("classify", "expected a text"), "tags.jsonl": ("tag", "found 1 tags of 2 words"),
    "words.jsonl": ("tag", "expected a list of texts"), "null.parquet": ("classify", "none of which"),
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    for name, table in TABLES.items():
        parquet.write_table(table, folder / name)
    write_gpt2(folder / "gpt2")
    return folder


def words_of(place, name, *more):
    return "train", place / "gpt2", "--data", place / name, "--device", "cpu", "--seq-len", 8, *more


@pytest.mark.parametrize("stream", ["false", "true"])
@pytest.mark.parametrize("name", CASES)
def test_data_without_an_answer(name, stream, place, capsys):
    said = failure(capsys, *words_of(place, name, "--set", f"stream={stream}"))
    wanted = CASES[name]
    if stream == "true" and name == "null.parquet":
        wanted = "found no row"
    assert wanted in said
    assert "hint: " in said


@pytest.mark.parametrize("name", LABELLED)
def test_labels_without_an_answer(name, place, capsys):
    task, wanted = LABELLED[name]
    said = failure(capsys, *words_of(place, name, "--set", f"task={task}"))
    assert wanted in said
    assert "hint: " in said


@pytest.mark.parametrize("keys", [("stream=true",), ("stream=false",), ("task=classify",)])
def test_rows_with_gaps_are_left_out_aloud(keys, place, capsys):
    """A row lacks a text, another one a label; what is trained on is what is left."""
    sets = [word for key in keys for word in ("--set", key)]
    run(*words_of(place, "some.parquet", "--steps", 1, "--batch-size", 4, *sets))
    told = capsys.readouterr()
    if "stream" not in keys[0]:
        assert "18 of 27 rows have no text or label" in told.err
        assert "classify: 9 rows" in told.out
    elif keys[0] == "stream=false":
        assert "9 of 27 rows have no text" in told.err
