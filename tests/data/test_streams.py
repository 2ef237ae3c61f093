"""Streamed data, whose rows one rank reads for all."""

import json
from pathlib import Path

import pytest
import torch

from cli_runs import END, tokenizer
from slapo_zoo.data import read
from slapo_zoo.data.batches import Stream
from slapo_zoo.data.tasks import Causal
from slapo_zoo.errors import SlapoError


class Counted(read.Source):
    """Source that counts how often it is opened and tokenized."""

    times = 0

    def opened(self):
        Counted.times += 1
        return super().opened()


def stream_on_a_rank(path, last):
    Counted.times = 0
    made = Causal(tokenizer(eos_token=END), 8)
    source = Counted(path, "train", None, made, {"text": "text"})
    stream = Stream(source, made, batch_size=4, seed=5, block=8)
    batches = [stream.part(step)["input_ids"] for step in range(last)]
    return Counted.times, torch.stack(batches), stream.position(last)


def test_data_stream_is_tokenized_by_one_rank_and_sent_to_all_ranks(ranks, tmp_path):
    """The other ranks receive the rows of the reading rank, and have the same position in the data."""
    path = str(tmp_path / "rows.jsonl")
    Path(path).write_text(
        "".join(json.dumps({"text": "word " * (i % 7)}) + "\n" for i in range(20))
    )
    alone = stream_on_a_rank(path, 5)
    found = ranks.run(stream_on_a_rank, 2, path, 5)
    assert [count for count, _, _ in found] == [alone[0], 0]
    for _, batches, place in found:
        assert torch.equal(batches, alone[1])
        assert place == alone[2]


def empty_on_a_rank(path):
    with pytest.raises(SlapoError) as caught:
        stream_on_a_rank(path, 1)
    return str(caught.value)


def test_data_stream_without_rows_raises_on_every_rank(ranks, tmp_path):
    path = tmp_path / "empty.jsonl"
    path.write_text("")
    assert all("found no row" in text for text in ranks.run(empty_on_a_rank, 2, str(path)))
