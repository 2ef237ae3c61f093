"""From text files to batches: read, tokenize, pack into blocks, deal out, mask."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slapo_zoo.errors import SlapoError

IGNORED = -100  # a label that counts for nothing, as everywhere in transformers


class DataError(SlapoError, ValueError):
    """There is no text to train on, or not enough, or it does not fit the model."""


def check_data(path: Path) -> None:
    """There is something at `path`; said before anything slow begins."""
    if not path.exists():
        raise DataError(str(path), "--data", "found nothing there", "name a text file or a folder")


def read_documents(path: Path) -> list[str]:
    """The text of a file, or of every UTF-8 file of a folder, in the order of their names."""
    check_data(path)
    files = [path] if path.is_file() else sorted(_visible_files(path))
    documents = [text for file in files if (text := _text_of(file))]
    if not documents:
        problem = f"found no UTF-8 text in {len(files)} file{'' if len(files) == 1 else 's'}"
        raise DataError(str(path), "--data", problem, "name a text file or a folder of such")
    return documents


def _visible_files(folder: Path) -> Iterator[Path]:
    for file in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        if file.is_file() and not hidden:
            yield file


def _text_of(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return ""
    return "" if "\0" in text else text.strip()


def pack(tokenizer: Any, documents: Sequence[str], seq_len: int, least: int) -> torch.Tensor:
    """Tokens of all documents, one after the other, cut into rows of `seq_len`.

    A document ends with the tokenizer's end-of-text token where there is one; where the tokenizer
    has [CLS] and [SEP], every row starts and ends with them.

    Args:
        tokenizer: a tokenizer of transformers.
        documents: texts.
        seq_len: length of a row.
        least: number of rows below which there is too little text.
    """
    tokens: list[int] = []
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    # verbose: a document is longer than the model may take, but a row is not
    for ids in tokenizer(list(documents), add_special_tokens=False, verbose=False)["input_ids"]:
        tokens += ids + end
    before, after = _frame(tokenizer)
    inner = seq_len - len(before) - len(after)
    rows = len(tokens) // inner if inner > 0 else 0
    if rows < least:
        problem = f"found {len(tokens)} tokens, which fill {rows} rows of {seq_len}"
        hint = "give more text, or a smaller --seq-len or --batch-size"
        raise DataError("--data", "", f"{problem}; expected at least {least} rows", hint)
    body = torch.tensor(tokens[: rows * inner]).view(rows, inner)
    edges = [torch.tensor(ids, dtype=torch.long).expand(rows, -1) for ids in (before, after)]
    return torch.cat([edges[0], body, edges[1]], dim=1)


def _frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    if tokenizer.cls_token_id is None or tokenizer.sep_token_id is None:
        return [], []
    return [tokenizer.cls_token_id], [tokenizer.sep_token_id]


@dataclass(frozen=True)
class Masking:
    """BERT's task (arXiv:1810.04805): guess 15 % of the tokens; 8 of 10 read [MASK], 1 another.

    Args:
        mask_id: the [MASK] token.
        vocab_size: replacements are drawn below it.
        special_ids: never masked.
        rate: share of the tokens to guess.
    """

    mask_id: int
    vocab_size: int
    special_ids: tuple[int, ...]
    rate: float = 0.15

    def __call__(self, ids: torch.Tensor, generator: torch.Generator) -> dict[str, torch.Tensor]:
        chance, fate = (torch.rand(ids.shape, generator=generator) for _ in range(2))
        other = torch.randint(self.vocab_size, ids.shape, generator=generator)
        special = torch.isin(ids, torch.tensor(self.special_ids, dtype=ids.dtype))
        guess = (chance < self.rate) & ~special
        read = torch.where(guess & (fate < 0.8), self.mask_id, ids)
        read = torch.where(guess & (fate >= 0.9), other, read)
        return {"input_ids": read, "labels": torch.where(guess, ids, IGNORED)}


@dataclass(frozen=True)
class Batches:
    """The batch of every step, a function of the seed alone: any rank can make its part.

    Args:
        rows: token rows, from `pack`.
        batch_size: rows per step, over all data-parallel ranks together.
        seed: decides the order of the rows and the masks.
        masking: None trains on the next token.
    """

    rows: torch.Tensor
    batch_size: int
    seed: int
    masking: Masking | None = None

    def part(self, step: int, dp_coord: int = 0, dp: int = 1) -> dict[str, torch.Tensor]:
        """The batch of one data-parallel rank; tp and pp peers get the same."""
        picked = self.rows[self._indices(step)]
        batch = {"input_ids": picked, "labels": picked}
        if self.masking is not None:
            batch = self.masking(picked, self._generator(step, 1))
        return {name: part.chunk(dp)[dp_coord].contiguous() for name, part in batch.items()}

    def _indices(self, step: int) -> torch.Tensor:
        """Every row once per epoch, each epoch in an order of its own; a short rest is dropped."""
        per_epoch = len(self.rows) // self.batch_size
        epoch, turn = divmod(step, per_epoch)
        order = torch.randperm(len(self.rows), generator=self._generator(epoch, 0))
        return order[turn * self.batch_size : (turn + 1) * self.batch_size]

    def _generator(self, number: int, purpose: int) -> torch.Generator:
        mixed = hash((self.seed, number, purpose)) % 2**63  # of integers: the same everywhere
        return torch.Generator().manual_seed(mixed)
