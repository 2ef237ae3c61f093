"""Tasks whose rows say what is right: classes, tags, target texts, pairs that belong together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from slapo_zoo.cli.data.tasks import IGNORED, Columns, Task, inputs_of, pad_id, padded, width_of
from slapo_zoo.cli.data.text_files import DataError

ASIDE = ("token_type_ids",)  # what else a tokenizer may make


def _encoded(task: Task, *texts: Any, prefix: str = "", **options: Any) -> dict[str, Any]:
    found = task.tokenizer(*texts, truncation=True, max_length=task.seq_len, **options)
    return {prefix + name: found[name] for name in ("input_ids", *ASIDE) if name in found}


def as_numbers(labels: Any, names: Sequence[str]) -> Any:
    """Labels, or lists of them, as numbers of their classes."""
    if isinstance(labels, list):
        return [as_numbers(one, names) for one in labels]
    is_number = not isinstance(labels, str)
    if not (0 <= labels < len(names) if is_number else labels in names):
        expected = f"0 to {len(names) - 1}" if is_number else f"one of {', '.join(names)}"
        hint = "leave out rows whose class is not known; evaluate on the classes that are trained"
        raise DataError("--data", "label", f"found {labels!r}, expected {expected}", hint)
    return int(labels) if is_number else names.index(labels)


@dataclass(frozen=True)
class Labelled(Task):
    """A task with classes.

    Args:
        names: of the classes, by number.
    """

    names: tuple[str, ...] = ()

    def settings(self) -> dict[str, Any]:
        names = dict(enumerate(self.names))
        return {"num_labels": len(names), "id2label": names, "label2id": {v: k for k, v in names.items()},
                "pad_token_id": pad_id(self.tokenizer)}  # fmt: skip


@dataclass(frozen=True)
class Classify(Labelled):
    """The class of a text, or of a pair of texts."""

    head = "AutoModelForSequenceClassification"
    roles: ClassVar = {
        "text": ("text", "sentence", "sentence1", "premise"), "label": ("label", "labels"),
        "text_pair": ("sentence2", "hypothesis"),
    }  # fmt: skip
    kinds: ClassVar = {"label": "a class"}
    optional = ("text_pair",)

    def encode(self, columns: Columns) -> dict[str, list[Any]]:
        """Tokens and class of each text."""
        texts = [columns[name] for name in ("text", "text_pair") if name in columns]
        return {**_encoded(self, *texts), "labels": as_numbers(columns["label"], self.names)}

    def collate(self, rows: Columns, generator: torch.Generator) -> dict[str, Tensor]:
        """Padded to the longest of all."""
        labels = torch.as_tensor(rows["labels"], dtype=torch.long)
        return {**inputs_of(self.tokenizer, rows, self.seq_len), "labels": labels}


@dataclass(frozen=True)
class Tag(Labelled):
    """The class of every word; of a word's tokens the first one counts."""

    head = "AutoModelForTokenClassification"
    roles: ClassVar = {
        "tokens": ("tokens", "words"),
        "tags": ("tags", "ner_tags", "pos_tags", "labels"),
    }
    kinds: ClassVar = {"tokens": "a list of texts", "tags": "a list of classes"}

    def encode(self, columns: Columns) -> dict[str, list[Any]]:
        """Tokens, and the class of each."""
        words = [list(one) for one in columns["tokens"]]
        found = self.tokenizer(words, truncation=True, max_length=self.seq_len, is_split_into_words=True)  # fmt: skip
        labels = []
        for row, tags in enumerate(as_numbers(columns["tags"], self.names)):
            if len(tags) != len(words[row]):
                problem = f"found {len(tags)} tags of {len(words[row])} words {words[row]!r:.60}"
                raise DataError("--data", "tags", problem, "give each word one tag")
            places = found.word_ids(row)
            firsts = [p != q for p, q in zip(places, [None, *places], strict=False)]
            labels.append([
                IGNORED if place is None or not first else tags[place]
                for place, first in zip(places, firsts, strict=True)
            ])  # fmt: skip
        kept = {name: found[name] for name in ("input_ids", *ASIDE) if name in found}
        return {**kept, "labels": labels}

    def collate(self, rows: Columns, generator: torch.Generator) -> dict[str, Tensor]:
        """Padded to the longest of all."""
        batch = inputs_of(self.tokenizer, rows, self.seq_len)
        width = batch["input_ids"].shape[1]
        return {**batch, "labels": padded(rows["labels"], IGNORED, width)}


@dataclass(frozen=True)
class Translate(Task):
    """A target text for a source text.

    Args:
        target_len: most tokens of a target.
    """

    target_len: int = 128
    head = "AutoModelForSeq2SeqLM"
    roles: ClassVar = {
        "source": ("source", "input", "document", "article", "question"),
        "target": ("target", "output", "summary", "highlights", "answer"),
    }  # fmt: skip

    def encode(self, columns: Columns) -> dict[str, list[Any]]:
        """Tokens of both."""
        labels = self.tokenizer(text_target=list(columns["target"]), truncation=True, max_length=self.target_len)  # fmt: skip
        return {**_encoded(self, list(columns["source"])), "labels": labels["input_ids"]}

    def collate(self, rows: Columns, generator: torch.Generator) -> dict[str, Tensor]:
        """Padded to the longest of all, sources and targets each."""
        labels = padded(rows["labels"], IGNORED, width_of(rows["labels"], self.target_len))
        batch = inputs_of(self.tokenizer, rows, self.seq_len)
        return {**{k: v for k, v in batch.items() if k not in ASIDE}, "labels": labels}


@dataclass(frozen=True)
class Pairs(Task):
    """Texts that belong together; the other rows' are what they do not belong to.

    A row is a pair: the batch holds anchor, positive, anchor, positive, ...
    """

    head = "AutoModel"
    roles: ClassVar = {
        "anchor": ("anchor", "query", "question", "sentence1"),
        "positive": ("positive", "passage", "answer", "sentence2"),
    }  # fmt: skip
    couples = True

    def encode(self, columns: Columns) -> dict[str, list[Any]]:
        """Tokens of both."""
        return {k: v for name in self.roles for k, v in _encoded(self, columns[name], prefix=name + ".").items()}  # fmt: skip

    def collate(self, rows: Columns, generator: torch.Generator) -> dict[str, Tensor]:
        """Both texts of a pair one after the other, padded to the longest of all."""
        names = [name.partition(".")[2] for name in rows if name.startswith("anchor.")]
        both = {
            name: [one for pair in zip(rows[f"anchor.{name}"], rows[f"positive.{name}"], strict=True) for one in pair]
            for name in names
        }  # fmt: skip
        return inputs_of(self.tokenizer, both, self.seq_len)
