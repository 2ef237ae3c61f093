"""Masked tokens and spans: how many, which, and their replacements."""

from types import SimpleNamespace

import pytest
import torch

from cli_runs import Letters, tokenizer
from slapo_zoo.data.tasks import IGNORED, DataError, Masked, Spans

GENERATOR = torch.Generator


def test_masked_language_model_task_masks_fifteen_percent_of_tokens():
    ids = torch.randint(10, 1000, (200, 100))
    task = Masked(Letters(cls=1, sep=0), 102)
    batch = task.collate({"input_ids": ids.tolist()}, GENERATOR())
    framed = torch.nn.functional.pad(ids, (1, 1))
    framed[:, 0] = 1
    guess = batch["labels"] != IGNORED
    assert torch.equal(batch["labels"][guess], framed[guess])
    assert torch.equal(batch["input_ids"][~guess], framed[~guess])
    assert not guess[:, [0, -1]].any()
    share = SimpleNamespace(guess=guess[:, 1:-1].float().mean(), read=batch["input_ids"][guess])
    assert share.guess == pytest.approx(0.15, abs=0.01)
    assert (share.read == 2).float().mean() == pytest.approx(0.8, abs=0.03)
    assert (share.read == framed[guess]).float().mean() == pytest.approx(0.1, abs=0.03)


def t5_words():
    marks = [f"<extra_id_{i}>" for i in range(20)]
    return tokenizer(marks, eos_token="</s>", pad_token="<pad>", unk_token="<unk>")


def test_masked_language_model_task_masks_at_least_one_token_of_a_small_batch():
    """A batch of two tokens still has at least one masked token."""
    for seed in range(20):
        task = Masked(Letters(cls=1, sep=0), 4)
        batch = task.collate({"input_ids": [[10, 11]]}, GENERATOR().manual_seed(seed))
        guess = batch["labels"] != IGNORED
        assert guess[:, 1:-1].any()
        assert not guess[:, [0, -1]].any()


@pytest.mark.parametrize("seq_len", [8, 32, 100])
def test_t5_span_corruption_keeps_every_token_once_in_inputs_or_labels(seq_len):
    words = t5_words()
    task = Spans(words, seq_len)
    ids = torch.arange(1000, 1000 + task.row_tokens)
    batch = task.collate({"input_ids": [ids, ids]}, GENERATOR().manual_seed(1))
    assert batch["input_ids"].shape == (2, seq_len)
    marks = words.convert_tokens_to_ids([f"<extra_id_{i}>" for i in range(20)])
    for inputs, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        assert inputs.pop() == labels.pop() == words.eos_token_id
        spans, mark = {}, None
        for token in labels:
            mark = token if token in marks else mark
            spans.setdefault(mark, []).extend([] if token in marks else [token])
        assert [m for m in inputs if m in marks] == list(spans) == marks[: len(spans)]
        found = [t for token in inputs for t in (spans[token] if token in marks else [token])]
        assert found == ids.tolist()
    assert sum(map(len, spans.values())) == max(1, round(0.15 * task.row_tokens))


def test_t5_span_corruption_without_sentinel_tokens_raises():
    with pytest.raises(DataError, match=r"lacks \d+ tokens <extra_id_0>"):
        Spans(tokenizer(eos_token="</s>", unk_token="<unk>"), 32)
