"""Tasks: which columns a model reads, how they become tokens, and batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from slapo_zoo.cli.data.text_files import DataError

IGNORED = -100  # a label that counts for nothing, as everywhere in transformers
Columns = Mapping[str, Any]


@dataclass(frozen=True)
class Task:
    """One task with its tokenizer.

    Args:
        tokenizer: of transformers.
        seq_len: most tokens of a row.
    """

    tokenizer: Any
    seq_len: int
    head: ClassVar[str]  # an auto class of transformers
    roles: ClassVar[Mapping[str, tuple[str, ...]]]  # what it reads --> usual names of the column
    kinds: ClassVar[Mapping[str, str]] = {}  # of a column that holds other than texts
    optional: ClassVar[tuple[str, ...]] = ()
    packs: ClassVar[bool] = False  # rows are cut from one stream of tokens
    couples: ClassVar[bool] = False  # the loss of a row depends on the others: no micro-batches

    @property
    def row_tokens(self) -> int:
        """Tokens of a row that are read from the text; what is added around them not counted."""
        return self.seq_len

    def encode(self, columns: Columns) -> dict[str, list[Any]]:
        """Columns of texts, by role --> columns of tokens and labels."""
        raise NotImplementedError

    def collate(self, rows: Columns, generator: torch.Generator) -> dict[str, Tensor]:
        """Rows --> the batch of a step, all dp ranks together; chance is the generator's alone."""
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        """Fields of the model's config that the task decides."""
        return {}


def tokens_of(tokenizer: Any, texts: Sequence[str]) -> list[np.ndarray]:
    """The tokens of documents, each ended by the end-of-text token where there is one."""
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    # verbose: a document is longer than the model may take, but a row is not
    found = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    return [np.asarray([*ids, *end], dtype=np.int32) for ids in found]


def padded(lists: Sequence[Sequence[int]], value: int, width: int) -> Tensor:
    """Rows of equal length."""
    rows = [list(one) + [value] * (width - len(one)) for one in lists]
    return torch.tensor(rows, dtype=torch.long)


def width_of(lists: Sequence[Sequence[int]], most: int) -> int:
    """The longest, rounded up to a multiple of 8: few shapes, and the same on every layout."""
    return min(most, -(-max(map(len, lists)) // 8) * 8)


def pad_id(tokenizer: Any) -> int:
    """The token that fills rows; that of the end of a text where there is no other."""
    found = tokenizer.pad_token_id
    found = tokenizer.eos_token_id if found is None else found
    if found is None:
        raise DataError("tokenizer", "pad_token", "found none, and no end-of-text token either")
    return found


def inputs_of(tokenizer: Any, rows: Columns, most: int, prefix: str = "") -> dict[str, Tensor]:
    """input_ids, attention_mask and, where the tokenizer makes them, token_type_ids."""
    ids = rows[prefix + "input_ids"]
    width = width_of(ids, most)
    batch = {
        "input_ids": padded(ids, pad_id(tokenizer), width),
        "attention_mask": padded([[1] * len(one) for one in ids], 0, width),
    }
    if prefix + "token_type_ids" in rows:
        batch["token_type_ids"] = padded(rows[prefix + "token_type_ids"], 0, width)
    return batch
