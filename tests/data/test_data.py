"""Conversion of data into batches, which depend only on the seed."""

import gzip
import json
import pickle
from pathlib import Path
from types import SimpleNamespace

import datasets
import httpx2
import huggingface_hub
import numpy as np
import pytest
import torch

from cli_runs import END, Letters, tokenizer
from slapo_zoo.cli.training.inputs import other_rows, require_rows
from slapo_zoo.cli.training.options import TrainOptions
from slapo_zoo.data import read
from slapo_zoo.data.batches import Batches, Stream, checksum, divided
from slapo_zoo.data.tasks import (
    IGNORED,
    Causal,
    Classify,
    DataError,
    Masked,
    Pairs,
    Tag,
    Translate,
)

GENERATOR = torch.Generator


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Keep the cache of `datasets` in the folder of the test."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def packed(task, *texts):
    return datasets.Dataset.from_dict(task.encode({"text": texts}))


def documents(path):
    return [row["text"] for row in read.open_table(str(path), "train")]


def test_text_files_are_read_in_name_order_and_binaries_are_skipped(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "a.py").write_text("first")
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / ".hidden").write_text("no")
    assert documents(tmp_path) == ["first", "second"]
    assert documents(tmp_path / "b.txt") == ["second"]


def test_binary_file_among_training_texts_is_skipped_with_a_message(tmp_path, capsys):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("first\r\nline", encoding="utf-8-sig", newline="")
    (folder / "b.txt").write_bytes("caf\xe9".encode("latin-1"))
    assert documents(folder) == ["first\nline"]
    assert "1 of 2 files hold no UTF-8 text; they are left out" in capsys.readouterr().err
    stream = read.open_table(str(folder), "train", stream=True)
    assert [row["text"] for row in stream] == ["first\nline"]


@pytest.mark.parametrize("several", [False, True])
def test_dataset_saved_to_disk_is_streamed_with_its_splits(several, tmp_path):
    data = datasets.Dataset.from_list(ROWS)
    data = datasets.DatasetDict(train=data, test=data.select([3])) if several else data
    data.save_to_disk(tmp_path / "saved")
    path = str(tmp_path / "saved")
    assert read.kind_of(path) == "saved"
    source = read.Source(path, "train", None, Causal(Letters(), 4), {"text": "text"})
    stream = Stream(source, source.task, batch_size=2, seed=0, block=4)
    assert stream.part(0)["input_ids"].shape == (2, 4)
    with pytest.raises(
        DataError, match=r"split 'dev': found no such split, expected train( or test)?\n"
    ):
        read.open_table(path, "dev")
    assert len(read.open_table(path, "test" if several else "train")) == (1 if several else 20)


def test_missing_or_empty_training_data_raises(tmp_path):
    with pytest.raises(DataError, match="found no file, folder or data set"):
        read.kind_of(str(tmp_path / "none"))
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="no UTF-8 text in 1 file\n"):
        documents(tmp_path)


def test_packed_token_rows_are_full_and_every_document_ends_with_the_eos_token():
    rows = packed(Causal(Letters(eos=0), 3), "ab", "cde")[[0, 1]]
    assert rows["input_ids"] == [[97, 98, 0], [99, 100, 101]]
    assert rows["lengths"] == [[3], [3]]
    task = Masked(Letters(cls=1, sep=2), 4, rate=0.0)
    batch = task.collate(packed(task, "abcde")[[0, 1]], GENERATOR())
    assert batch["input_ids"].tolist() == [[1, 97, 98, 2], [1, 99, 100, 2]]


def test_packing_of_documents_keeps_every_token_and_records_document_lengths():
    rows = packed(Causal(Letters(), 6), "abc", "de", "", "fghijklmn", "opqrst")
    assert [t for row in rows["input_ids"] for t in row] == list(range(97, 97 + 18))
    assert rows["lengths"] == [[3, 2, 1], [6], [2, 4]]
    assert not len(packed(Causal(Letters(), 6), "abc"))


def test_packed_documents_with_document_masks_restart_position_ids_at_0():
    task = Causal(Letters(eos=0), 4, document_masks=True)
    batch = task.collate(packed(task, "ab", "cdefg")[[0, 1]], GENERATOR())
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0], [0, 1, 2, 3]]
    assert batch["labels"].tolist() == [[IGNORED, 98, 0, IGNORED], [IGNORED, 101, 102, 103]]


def test_text_too_short_for_one_batch_raises_and_names_the_number_of_rows():
    rows = packed(Masked(Letters(cls=1, sep=2), 4), "abcde")
    with pytest.raises(DataError, match="found 2 rows of up to 4 tokens; expected at least 3"):
        require_rows(rows, 3, TrainOptions("m", seq_len=4))
    with pytest.raises(
        DataError, match="seq_len: found 2, but special tokens already fill a row of that length"
    ):
        packed(Masked(Letters(cls=1, sep=2), 2), "abcde")


def ten_rows(task):
    ids = np.arange(10, 10 + 10 * task.row_tokens).reshape(10, -1)
    return datasets.Dataset.from_dict({"input_ids": ids, "lengths": [[task.row_tokens]] * 10})


def test_training_batches_draw_every_data_row_once_per_epoch():
    task = Causal(Letters(), 2)
    batches = Batches(ten_rows(task), task, 4, seed=3)
    first = torch.cat([batches.part(step)["input_ids"] for step in (0, 1)])
    second = torch.cat([batches.part(step)["input_ids"] for step in (2, 3)])
    assert len(first.unique()) == len(second.unique()) == 16
    assert not torch.equal(first, second)
    other = Batches(batches.rows, task, 4, seed=4)
    assert not torch.equal(first[:4], other.part(0)["input_ids"])


@pytest.mark.parametrize(
    "task", [Causal(Letters(), 2), Masked(Letters(), 2, rate=0.5)], ids=["next", "masked"]
)
def test_batches_of_all_dp_ranks_concatenate_to_the_batch_of_one_process(task):
    batches = Batches(ten_rows(task), task, 4, seed=3)
    for name, whole in batches.part(1).items():
        assert torch.equal(whole, torch.cat([batches.part(1, i, 2)[name] for i in (0, 1)]))


@pytest.mark.parametrize(
    "task", [Causal(Letters(), 2), Masked(Letters(), 2, rate=0.5)], ids=["next", "masked"]
)
def test_evaluation_batches_contain_each_row_once_for_every_number_of_dp_ranks(task):
    rows = divided(ten_rows(task), 0.1, seed=0)[0]
    batches = Batches(rows, task, 4, seed=3)
    assert len(rows) == 9
    assert batches.evaluation_batches() == 3
    assert batches.evaluation_batches(2) == 2
    for number in range(3):
        whole = batches.evaluation_part(number)
        parts = [batches.evaluation_part(number, i, 2) for i in (0, 1)]
        real = len(whole["labels"])
        for name, value in whole.items():
            assert torch.equal(torch.cat([part[name] for part in parts])[:real], value)
        filled = torch.cat([part["labels"] for part in parts])[real:]
        assert (filled == IGNORED).all()


def write_rows(folder, kind, rows):
    data, path = datasets.Dataset.from_list(rows), str(folder / f"rows.{kind}")
    writer = {"jsonl": data.to_json, "csv": data.to_csv, "parquet": data.to_parquet}
    writer[kind](path)
    return path


ROWS = [{"text": f"line {i} of the text", "label": ("bad", "good")[i % 2]} for i in range(20)]


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl", "csv", "parquet", "folder", "saved"])
def test_every_data_file_format_gives_the_same_rows(kind, tmp_path):
    words = tokenizer(eos_token=END)
    if kind == "saved":
        path = str(tmp_path / "saved")
        datasets.Dataset.from_list(ROWS).with_format("numpy").save_to_disk(path)
    elif kind == "folder":
        (tmp_path / "data").mkdir()
        write_rows(tmp_path / "data", "jsonl", ROWS)
        path = str(tmp_path / "data")
    else:
        path = write_rows(tmp_path, kind.removesuffix(".gz"), ROWS)
    if kind == "jsonl.gz":
        Path(f"{path}.gz").write_bytes(gzip.compress(Path(path).read_bytes()))
        path += ".gz"
    data = read.open_table(path, "train")
    assert data.format["type"] is None
    columns = read.columns_of(Classify, {}, data.column_names)
    task = Classify(words, 64, names=read.class_names(data, "label"))
    assert task.settings()["id2label"] == {0: "bad", 1: "good"}
    rows = read.rows_of_table(data, task, columns)
    assert rows[[3, 0]]["labels"] == [1, 0]
    expected = [words(ROWS[i]["text"])["input_ids"] for i in (3, 0)]
    assert rows[[3, 0]]["input_ids"] == expected
    stream = read.rows_of_table(data, Causal(words, 16), {"text": "text"})
    assert stream[:] == packed(Causal(words, 16), *(r["text"] for r in ROWS))[:]
    sent = pickle.dumps(stream)  # as ranks that are spawned get it: by the name of its file
    assert pickle.loads(sent)[[4]] == stream[[4]]
    assert checksum(stream) == checksum(packed(Causal(words, 16), *(r["text"] for r in ROWS)))


def test_tokenized_data_is_cached_for_later_processes(tmp_path, monkeypatch):
    """A second process reads the cached rows of the first; another task or length tokenizes anew."""
    path, calls = write_rows(tmp_path, "jsonl", ROWS), []
    encode = Classify.encode
    monkeypatch.setattr(
        Classify, "encode", lambda self, columns: calls.append(1) or encode(self, columns)
    )
    for seq_len in (64, 64, 8):
        data = read.open_table(path, "train")
        task = Classify(tokenizer(eos_token=END), seq_len, names=("bad", "good"))
        rows = read.rows_of_table(data, task, {"text": "text", "label": "label"})
        assert max(map(len, rows[list(range(20))]["input_ids"])) <= seq_len
    assert len(calls) == 2


MISTAKES = {
    "column": (lambda data: read.columns_of(Classify, {"text": "body"}, data.column_names), "found no column 'body' among text, label"),
    "role": (lambda data: read.columns_of(Classify, {"txt": "text"}, data.column_names), "this task reads text, label, text_pair"),
    "usual": (lambda data: read.columns_of(Tag, {}, data.column_names), r"columns=\{\"tokens\": \"NAME\"\}"),
    "label": (lambda data: read.rows_of_table(data, Classify(tokenizer(eos_token=END), 8, names=("bad",)), {"text": "text", "label": "label"}), "found 'good', expected one of bad"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_missing_or_wrong_data_columns_raise_and_are_named(name, tmp_path):
    data = read.open_table(write_rows(tmp_path, "jsonl", ROWS), "train")
    work, said = MISTAKES[name]
    with pytest.raises(DataError, match=said):
        work(data)


@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_evaluation_split_option_with_a_single_data_file_raises(kind, tmp_path):
    """Without the error the model would be evaluated on its training rows."""
    (tmp_path / f"a.{kind}").write_text('{"text": "to be"}\n' * 8)
    with pytest.raises(DataError, match="have one split only"):
        read.open_table(str(tmp_path / f"a.{kind}"), "test")
    options = TrainOptions("m", data=str(tmp_path / f"a.{kind}"), eval_split="test", seq_len=4)
    with pytest.raises(DataError, match="have one split only"):
        other_rows(Causal(tokenizer(eos_token=END), 4), options)


def test_unknown_dataset_name_sends_only_one_request_to_the_hub(monkeypatch):
    from huggingface_hub import HfApi

    asked = []

    def no_route(self, name, timeout):
        asked.append(name)
        raise httpx2.ConnectError("no route")

    monkeypatch.setattr(HfApi, "dataset_info", no_route)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(DataError, match="no answer of the Hub: no route"):
        read.open_table("nobody/nothing", "train")
    assert asked == ["nobody/nothing"]


def test_broken_data_file_or_unknown_dataset_name_raises(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    (tmp_path / "a.jsonl").write_text("{not json")
    with pytest.raises(DataError):
        read.open_table(str(tmp_path / "a.jsonl"), "train")
    with pytest.raises(DataError, match="that the data have this split"):
        read.open_table("nobody/nothing", "train")
    with pytest.raises(DataError, match="found no file, folder or data set"):
        read.kind_of("gone.parquet")


def test_tagging_translation_and_pair_tasks_collate_the_expected_labels_and_inputs():
    words = tokenizer(eos_token=END)
    tag = Tag(words, 64, names=("O", "NAME"))
    rows = tag.encode({"tokens": [["to", "bee"], ["or"]], "tags": [["NAME", "O"], ["O"]]})
    batch = tag.collate(rows, GENERATOR())
    firsts = [len(words(word)["input_ids"]) for word in ("to", "bee")]
    labels = [1, *[IGNORED] * (firsts[0] - 1), 0, *[IGNORED] * (firsts[1] - 1)]
    assert batch["labels"][0, : sum(firsts)].tolist() == labels
    assert batch["input_ids"].shape[1] % 8 == 0
    seq = Translate(words, 64, target_len=3)
    batch = seq.collate(
        seq.encode({"source": ["to be", "or"], "target": ["or not", "x"]}), GENERATOR()
    )
    assert batch["labels"].shape == (2, 3)
    assert batch["labels"][1].tolist() == [*words("x")["input_ids"], IGNORED, IGNORED]
    found = read.Encoder(seq, {"source": "a", "target": "b"})({"a": ["to", "be"], "b": ["", "x"]})
    assert found["labels"] == words(["x"])["input_ids"]
    assert Classify(words, 64, names=("a", "b")).settings()["problem_type"] is None
    pairs = Pairs(words, 64)
    batch = pairs.collate(
        pairs.encode({"anchor": ["to", "be"], "positive": ["or", "not"]}), GENERATOR()
    )
    found = [row[m == 1].tolist() for row, m in zip(batch["input_ids"], batch["attention_mask"], strict=True)]  # fmt: skip
    assert found == words(["to", "or", "be", "not"])["input_ids"]


@pytest.mark.parametrize("task", [Causal, Translate])
def test_data_stream_restarted_at_a_saved_position_yields_the_following_batches(task, tmp_path):
    """The stream resumes at any step, past the end of an epoch, with only one block of rows in memory."""
    rows = [{"text": "word " * (i % 7), "source": f"{i} in", "target": f"{i}"} for i in range(20)]
    path, words = write_rows(tmp_path, "jsonl", rows), tokenizer(eos_token=END)
    made = task(words, 8)
    columns = {"text": "text"} if task is Causal else {"source": "source", "target": "target"}

    def stream():
        source = read.Source(path, "train", None, made, columns)
        return Stream(source, made, batch_size=2, seed=5, block=6)

    one = stream()
    whole, places = [], []
    for step in range(14):
        whole.append(one.part(step))
        places.append(json.loads(json.dumps(one.position(step + 1))))
    assert len({str(batch) for batch in whole}) > 10
    for begin in (1, 3, 11):
        other = pickle.loads(pickle.dumps(stream()))  # as ranks that are spawned get it
        other.resume(places[begin - 1])
        for step in range(begin, 14):
            batch = other.part(step)
            assert all(torch.equal(batch[name], whole[step][name]) for name in batch)
    if task is Causal:
        block = torch.cat([batch["input_ids"] for batch in whole[:3]]).tolist()
        rows = packed(made, *(row["text"] for row in rows))[:6]["input_ids"]
        assert sorted(block) == sorted(rows)
        assert block != rows, "shuffled within the block"


def test_empty_data_stream_raises(tmp_path):
    task = Causal(tokenizer(eos_token=END), 8)
    stream = Stream(
        SimpleNamespace(name="rows.txt", split="train", opened=list, rows=iter), task, 2, 0, 6
    )
    with pytest.raises(DataError, match="found no row"):
        stream.part(0)
