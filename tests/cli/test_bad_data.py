"""Unusable data: each kind is an error in four parts; rows with gaps are dropped with a message."""

import json
from dataclasses import replace

import pyarrow as pa
import pytest
from datasets import ClassLabel, Dataset
from pyarrow import parquet
from transformers import AutoTokenizer

from cli_runs import failure, run, write_gpt2
from slapo_zoo.cli.training.checks import resolved
from slapo_zoo.cli.training.inputs import read_inputs
from slapo_zoo.cli.training.options import TrainOptions
from slapo_zoo.data.read import kind_of
from slapo_zoo.data.tasks import DataError


def rows(**columns):
    count = max(map(len, columns.values()))
    one = lambda i: {name: held[i % len(held)] for name, held in columns.items()}  # noqa: E731
    return "".join(json.dumps(one(i)) + "\n" for i in range(20 * count))


TAGGED = {"tokens": [["to", "be"]]}
TABLES = {
    "null.parquet": pa.table({"text": pa.nulls(9, pa.string()), "label": [0, 1, 0] * 3}),
    "none.parquet": pa.table({"text": pa.array([], pa.string()), "label": pa.array([], pa.int64())}),
    "some.parquet": pa.table({"text": ["to be", None, "or not"] * 9, "label": [0, 1, None] * 9}),
}  # fmt: skip
FILES = {
    "empty.jsonl": "", "blank.jsonl": "\n\n", "empty.csv": "", "head.csv": "text,label\n", "bad.parquet": "PAR1",
    "ragged.csv": "text,label\nto be,a\nto,b,c,d\n", "cut.jsonl": rows(text=["to"], label=["a"]) + '{"text": "to',
    "number.jsonl": rows(text=[1, 2], label=[0, 1]), "name.jsonl": rows(txt=["to be"], label=[0]),
    "minus.jsonl": rows(text=["to be"], label=[-1, 0, 1]), "real.jsonl": rows(text=["to"], label=[0.5, 1.5]),
    "tags.jsonl": rows(**TAGGED, tags=[[0, 1], [0]]), "words.jsonl": rows(tokens=["to be"], tags=[[0, 1]]),
    "text.jsonl": rows(text=["to be or not"]), "one.jsonl": rows(text=["to"], label=[7]),
    "half.jsonl": rows(text=["to"], label=[0.5, 1, 2]),
    "ids.jsonl": rows(text=["to"], label=[1_000_000_000, 1]), "few.csv": "text,label\n" + "to,1\nbe,0\nor,\n" * 9,
    "void.jsonl": rows(text=["to", "", "be"], label=["a", "b", "c"]), "TEXT.JSONL": rows(text=["to be or not"]),
    "text.ndjson": rows(text=["to be or not"]),
}  # fmt: skip
CASES = {
    "empty.jsonl": "found no row", "blank.jsonl": "found no row", "empty.csv": "No columns", "head.csv": "found no row",
    "none.parquet": "found no row", "null.parquet": "found 9 rows, none of which has all of text",
    "bad.parquet": "Parquet", "ragged.csv": "Expected 2 fields in line 3", "cut.jsonl": "JSON parse error",
    "number.jsonl": "column 'text': found 1, expected a text", "name.jsonl": 'columns={"text": "NAME"}',
}  # fmt: skip
LABELLED = {
    "minus.jsonl": ("classify", "found -1, expected 0 to 1"), "real.jsonl": ("classify", "labels of float"),
    "number.jsonl": ("classify", "expected a text"), "tags.jsonl": ("tag", "found 1 tags for 2 words"),
    "one.jsonl": ("classify", "found one class, 7, expected at least two"),
    "ids.jsonl": ("classify", "found the label 1000000000, expected class numbers below"),
    "half.jsonl": ("classify", "found labels of float, e.g. 0.5; int, e.g. 1, expected names or numbers of classes"),
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


@pytest.mark.one_in(2)
@pytest.mark.parametrize("stream", ["false", "true"])
@pytest.mark.parametrize("name", CASES)
def test_unusable_training_data_is_refused_with_reason(name, stream, place, capsys):
    said = failure(capsys, *words_of(place, name, "--set", f"stream={stream}"))
    wanted = CASES[name]
    if stream == "true" and name == "null.parquet":
        wanted = "found no row"
    assert wanted in said
    assert "hint: " in said


@pytest.mark.parametrize("name", LABELLED)
def test_dataset_without_usable_labels_is_refused_with_the_reason(name, place, capsys):
    task, wanted = LABELLED[name]
    said = failure(capsys, *words_of(place, name, "--set", f"task={task}"))
    assert wanted in said
    assert "hint: " in said


@pytest.mark.parametrize("keys", [("stream=true",), ("stream=false",), ("task=classify",)])
def test_data_rows_without_text_or_label_are_dropped_with_a_message(keys, place, capsys):
    """One row has no text, another has no label; training uses the others."""
    sets = [word for key in keys for word in ("--set", key)]
    run(*words_of(place, "some.parquet", "--max-steps", 1, "--batch-size", 4, *sets))
    told = capsys.readouterr()
    if "stream" not in keys[0]:
        assert "18 of 27 rows have no text or label" in told.err
        assert "classify: 9 rows" in told.out
    elif keys[0] == "stream=false":
        assert "9 of 27 rows have no text" in told.err


LEFT = {
    "few.csv": ("9 of 27 rows have no text or label", "18 rows"),  # whose labels pandas reads as 1.0 and 0.0
    "void.jsonl": ("20 of 60 rows have no token", "40 rows"),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_training_runs_on_labelled_rows_after_unlabelled_rows_are_dropped(name, place, capsys):
    run(*words_of(place, name, "--max-steps", 9, "--batch-size", 4, "--set", "task=classify"))
    told = capsys.readouterr()
    assert LEFT[name][0] in told.err
    assert f"classify: {LEFT[name][1]}" in told.out
    assert "nothing that is learned is kept" in told.out


@pytest.mark.parametrize("name", ["TEXT.JSONL", "text.ndjson"])
def test_data_files_ending_in_jsonl_ndjson_or_upper_case_give_equal_training_output(
    name, place, capsys
):
    run(*words_of(place, name, "--max-steps", 1, "--batch-size", 2))
    other = capsys.readouterr().out.partition("training: ")[2]
    run(*words_of(place, "text.jsonl", "--max-steps", 1, "--batch-size", 2))
    assert other == capsys.readouterr().out.partition("training: ")[2] != ""


EVALUATED = {
    "eval_data=notes.txt": "eval_data: task=classify: found plain text, but this task reads named columns",
    "eval_data=name.jsonl": "eval_data: text: found no column",
    "eval_data=one.jsonl": "eval_data: label: found 7, expected 0 to 2",
}


@pytest.mark.parametrize("key", EVALUATED)
def test_train_command_with_invalid_evaluation_data_raises_and_names_the_data(
    key, place, capsys, monkeypatch
):
    monkeypatch.chdir(place)
    (place / "notes.txt").write_text("to be")
    sets = ("--set", "task=classify", "--set", key)
    assert EVALUATED[key] in failure(capsys, *words_of(place, "void.jsonl", *sets))


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("columns.text=body", "no column 'body' among text"),
        ("data_split=test", "have one split only"),
    ],
)
def test_train_command_on_plain_text_refuses_options_for_columns_and_splits(
    key, said, place, capsys
):
    (place / "plain.txt").write_text("to be or not " * 50)
    assert said in failure(capsys, *words_of(place, "plain.txt", "--set", key))


@pytest.mark.parametrize(
    "names", [("a.jsonl", "b.csv"), ("a.jsonl", "b.txt", "c.txt"), ("a.csv", "b.tsv")]
)
def test_data_folder_with_several_file_formats_is_refused(names, tmp_path):
    """`datasets` reads the most frequent kind and would silently skip the others."""
    for name in names:
        (tmp_path / name).write_text("text\nto be\n")
    with pytest.raises(DataError, match="found files of several kinds"):
        kind_of(str(tmp_path))
    (tmp_path / names[-1]).rename(tmp_path / "README.md")
    if len(names) == 2:
        assert kind_of(str(tmp_path)) == "table"


@pytest.mark.parametrize("task", ["classify", "pairs"])
def test_tokenizer_with_a_pad_token_beyond_the_model_vocabulary_is_refused(
    task, place, tmp_path, capsys
):
    """The pad token was added to the tokenizer alone, as many users do for GPT-2."""
    write_gpt2(tmp_path / "gpt2")
    words = AutoTokenizer.from_pretrained(tmp_path / "gpt2")
    words.add_special_tokens({"pad_token": "[PAD]"})
    words.save_pretrained(tmp_path / "gpt2")
    (tmp_path / "rows.jsonl").write_text(
        rows(text=["to", "be"], label=[0, 1], anchor=["a"], positive=["b"])
    )
    said = failure(
        capsys,
        "train",
        tmp_path / "gpt2",
        "--data",
        tmp_path / "rows.jsonl",
        "--set",
        f"task={task}",
    )
    assert (
        f"tokenizer: found token id {len(words) - 1}, but the model's vocabulary has {len(words) - 1}"
        in said
    )


def test_class_label_ids_in_training_are_those_of_the_checkpoint_config(place, tmp_path, capsys):
    """Label ids come from the checkpoint's config, not from the order of the data; a class may be missing in the data."""
    run(
        *words_of(
            place,
            "void.jsonl",
            "--max-steps",
            1,
            "--set",
            "task=classify",
            "--output",
            tmp_path / "m",
        )
    )
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config |= {"id2label": {0: "c", 1: "b", 2: "a"}, "label2id": {"a": 2, "b": 1, "c": 0}}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    options = TrainOptions(
        str(tmp_path / "m"), str(place / "void.jsonl"), task="classify", batch_size=2
    )
    inputs = read_inputs(*resolved(options))
    assert inputs.batches.task.names == ("c", "b", "a")
    assert inputs.batches.rows[[0, 1]]["labels"] == [2, 0]
    numbers = read_inputs(*resolved(replace(options, data=str(place / "few.csv"))))
    assert numbers.batches.task.names == ("c", "b", "a")
    named = Dataset.from_dict({"text": ["to", "be"], "label": [0, 1]})
    named.cast_column("label", ClassLabel(names=["a", "c"])).to_parquet(tmp_path / "named.parquet")
    inputs = read_inputs(*resolved(replace(options, data=str(tmp_path / "named.parquet"))))
    assert inputs.batches.rows["labels"] == [2, 0]
