"""Text becomes batches that depend on the seed and nothing else."""

from types import SimpleNamespace

import pytest
import torch

from slapo_zoo.cli.training.text import IGNORED, Batches, DataError, Masking, pack, read_documents


class Letters:
    """A tokenizer of bytes."""

    def __init__(self, eos=None, cls=None, sep=None):
        self.eos_token_id, self.cls_token_id, self.sep_token_id = eos, cls, sep

    def __call__(self, texts, **options):
        return {"input_ids": [list(text.encode()) for text in texts]}


def test_files_are_read_by_name_and_binaries_are_not(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "a.py").write_text("first\n")
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / ".hidden").write_text("no")
    assert read_documents(tmp_path) == ["first", "second"]
    assert read_documents(tmp_path / "b.txt") == ["second"]


def test_no_data_and_no_text_are_errors(tmp_path):
    with pytest.raises(DataError, match="found nothing there"):
        read_documents(tmp_path / "none")
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="no UTF-8 text in 1 file\n"):
        read_documents(tmp_path)


def test_rows_are_full_and_documents_end():
    rows = pack(Letters(eos=0), ["ab", "cde"], 3, least=2)
    assert rows.tolist() == [[97, 98, 0], [99, 100, 101]]
    rows = pack(Letters(cls=1, sep=2), ["abcde"], 4, least=2)
    assert rows.tolist() == [[1, 97, 98, 2], [1, 99, 100, 2]]


@pytest.mark.parametrize("seq_len", [2, 4])
def test_too_little_text_says_how_much_there_is(seq_len):
    with pytest.raises(DataError, match=r"found 5 tokens, which fill . rows of .; exp"):
        pack(Letters(cls=1, sep=2), ["abcde"], seq_len, least=3)


def test_every_row_comes_once_per_epoch():
    batches = Batches(torch.arange(20).view(10, 2), 4, seed=3)
    first = torch.cat([batches.part(step)["input_ids"] for step in (0, 1)])
    second = torch.cat([batches.part(step)["input_ids"] for step in (2, 3)])
    assert len(first.unique()) == len(second.unique()) == 16
    assert not torch.equal(first, second)
    assert not torch.equal(first[:4], Batches(batches.rows, 4, seed=4).part(0)["input_ids"])


@pytest.mark.parametrize("masking", [None, Masking(5, 20, (0,))])
def test_data_parallel_parts_make_the_whole(masking):
    batches = Batches(torch.arange(20).view(10, 2), 4, seed=3, masking=masking)
    for name, whole in batches.part(1).items():
        assert torch.equal(whole, torch.cat([batches.part(1, i, 2)[name] for i in (0, 1)]))


def test_masking_guesses_fifteen_percent():
    ids = torch.randint(10, 1000, (200, 100))
    ids[:, 0] = 1
    batch = Masking(mask_id=2, vocab_size=1000, special_ids=(1, 2))(ids, torch.Generator())
    guess = batch["labels"] != IGNORED
    assert torch.equal(batch["labels"][guess], ids[guess])
    assert torch.equal(batch["input_ids"][~guess], ids[~guess])
    assert not guess[:, 0].any()
    share = SimpleNamespace(guess=guess[:, 1:].float().mean(), read=batch["input_ids"][guess])
    assert share.guess == pytest.approx(0.15, abs=0.01)
    assert (share.read == 2).float().mean() == pytest.approx(0.8, abs=0.03)
    assert (share.read == ids[guess]).float().mean() == pytest.approx(0.1, abs=0.03)
