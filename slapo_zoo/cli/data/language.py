"""Tasks that need text alone: the next token, masked tokens, masked spans."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from slapo_zoo.cli.data.tasks import IGNORED, Columns, Task, tokens_of
from slapo_zoo.cli.data.text_files import DataError

TEXT = {"text": ("text", "content", "body", "sentence")}


@dataclass(frozen=True)
class Language(Task):
    """Task of a language model: tokens of all documents, one after the other, cut into rows of `seq_len`."""

    roles = TEXT
    packs = True

    def encode(self, columns: Columns) -> dict[str, list[Any]]:
        """The tokens of each document."""
        return {"input_ids": tokens_of(self.tokenizer, columns["text"])}


@dataclass(frozen=True)
class Causal(Language):
    """The next token.

    Args:
        document_masks: tokens see their own document alone, whose positions begin at 0; what begins
            a document is not guessed from the one before.
    """

    document_masks: bool = False
    head = "AutoModelForCausalLM"

    def collate(self, rows: Columns, generator: torch.Generator) -> dict[str, Tensor]:
        """input_ids, labels, and position_ids that tell documents apart."""
        ids = torch.as_tensor(rows["input_ids"])
        if not self.document_masks:
            return {"input_ids": ids, "labels": ids}
        places = torch.as_tensor(rows["position_ids"])
        labels = torch.where(places == 0, IGNORED, ids)
        return {"input_ids": ids, "labels": labels, "position_ids": places}


@dataclass(frozen=True)
class Masked(Language):
    """BERT's task (arXiv:1810.04805): guess 15 % of the tokens; 8 of 10 read [MASK], 1 another.

    Where the tokenizer has [CLS] and [SEP], every row starts and ends with them.

    Args:
        rate: share of the tokens to guess.
    """

    rate: float = 0.15
    head = "AutoModelForMaskedLM"

    def __post_init__(self) -> None:
        if self.tokenizer.mask_token_id is None:
            name = getattr(self.tokenizer, "name_or_path", "")
            raise DataError(name, "tokenizer", "found no [MASK] token", "or choose another task")

    @property
    def frame(self) -> tuple[list[int], list[int]]:
        """Return the special tokens before and after the text of a row."""
        if self.tokenizer.cls_token_id is None or self.tokenizer.sep_token_id is None:
            return [], []
        return [self.tokenizer.cls_token_id], [self.tokenizer.sep_token_id]

    @property
    def row_tokens(self) -> int:
        return self.seq_len - sum(map(len, self.frame))

    def collate(self, rows: Columns, generator: torch.Generator) -> dict[str, Tensor]:
        """Which tokens are guessed, and what is read in their place."""
        body = torch.as_tensor(rows["input_ids"])
        edges = [torch.tensor(e, dtype=torch.long).expand(len(body), -1) for e in self.frame]
        ids = torch.cat([edges[0], body, edges[1]], dim=1)
        chance, fate = (torch.rand(ids.shape, generator=generator) for _ in range(2))
        other = torch.randint(len(self.tokenizer), ids.shape, generator=generator)
        special = torch.isin(ids, torch.tensor(self.tokenizer.all_special_ids, dtype=ids.dtype))
        chance = chance.masked_fill(special, 2.0)
        guess = chance < self.rate
        guess = guess if not self.rate or guess.any() else chance == chance.min()  # one at least
        read = torch.where(guess & (fate < 0.8), self.tokenizer.mask_token_id, ids)
        read = torch.where(guess & (fate >= 0.9), other, read)
        return {"input_ids": read, "labels": torch.where(guess, ids, IGNORED)}


@dataclass(frozen=True)
class Spans(Language):
    """T5's task (arXiv:1910.10683, 3.1.4): spans are replaced by sentinels; guess what they held.

    Every row has the same number of spans and of tokens in them, so nothing is padded: inputs have
    `seq_len` tokens.

    Args:
        rate: share of the tokens in spans.
        mean: length of a span.
    """

    rate: float = 0.15
    mean: float = 3.0
    head = "AutoModelForSeq2SeqLM"

    def __post_init__(self) -> None:
        _, spans = self._counts(self.row_tokens)
        if self.row_tokens < 4 or self.tokenizer.unk_token_id in self._sentinels(spans):
            problem = f"found no {spans} sentinels <extra_id_0>, ..., or rows too short for a span"
            hint = "take a tokenizer of T5, and at least 8 tokens a row"
            raise DataError("train", "task=span", problem, hint)

    @cached_property
    def row_tokens(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The most tokens whose inputs, with sentinels and the end, fit."""
        count = 2
        while self._inputs(count + 1) <= self.seq_len:
            count += 1
        return count

    def _counts(self, tokens: int) -> tuple[int, int]:
        noise = min(max(round(tokens * self.rate), 1), tokens - 1)
        return noise, min(max(round(noise / self.mean), 1), tokens - noise)

    def _inputs(self, tokens: int) -> int:
        noise, spans = self._counts(tokens)
        return tokens - noise + spans + 1

    def _sentinels(self, count: int) -> list[int]:
        names = [f"<extra_id_{i}>" for i in range(count)]
        return self.tokenizer.convert_tokens_to_ids(names)

    def collate(self, rows: Columns, generator: torch.Generator) -> dict[str, Tensor]:
        """Inputs with a sentinel for each span, and labels with each sentinel and its span."""
        pairs = [self._corrupted(torch.as_tensor(ids), generator) for ids in rows["input_ids"]]
        inputs, labels = (torch.stack(column) for column in zip(*pairs, strict=True))
        return {"input_ids": inputs, "labels": labels}

    def _corrupted(self, ids: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        noise, count = self._counts(len(ids))
        kept = _parts(len(ids) - noise, count, generator)
        lost = _parts(noise, count, generator)
        sizes = [size for pair in zip(kept, lost, strict=True) for size in pair]
        pieces = ids.split(sizes)
        marks = torch.tensor(self._sentinels(count)).split(1)
        end = torch.tensor([self.tokenizer.eos_token_id])
        inputs = [part for pair in zip(pieces[::2], marks, strict=True) for part in pair]
        labels = [part for pair in zip(marks, pieces[1::2], strict=True) for part in pair]
        return torch.cat([*inputs, end]), torch.cat([*labels, end])


def _parts(total: int, count: int, generator: torch.Generator) -> list[int]:
    """`total` as a sum of so many numbers of at least 1, all such sums alike probable."""
    cuts = torch.randperm(total - 1, generator=generator)[: count - 1].sort().values + 1
    edges = torch.cat([torch.tensor([0]), cuts, torch.tensor([total])])
    return edges.diff().tolist()
