"""Training tasks: which columns of the data each reads, and how it makes tokens and batches from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from slapo_zoo.errors import SlapoError

IGNORED = -100  # label that losses ignore, as in transformers
ASIDE = ("token_type_ids",)  # other outputs of a tokenizer
Columns = Mapping[str, Any]


class DataError(SlapoError, ValueError):
    """Error of data that are missing, too few, or do not fit the model or the task."""


@dataclass(frozen=True)
class Task:
    """Base class of tasks: what a model reads from the data and learns to predict.

    Args:
        tokenizer: tokenizer of `transformers`.
        seq_len: maximum number of tokens per row.
    """

    tokenizer: Any
    seq_len: int
    head: ClassVar[str]  # an auto class of transformers
    roles: ClassVar[Mapping[str, tuple[str, ...]]]  # role --> usual names of its column
    kinds: ClassVar[Mapping[str, str]] = {}  # role --> its type, if not text
    optional: ClassVar[tuple[str, ...]] = ()
    packs: ClassVar[bool] = False  # rows are cut from one stream of tokens
    couples: ClassVar[bool] = False  # the loss of a row depends on the others: no micro-batches

    def encode(self, columns: Columns) -> dict[str, Any]:
        """Tokenize `columns` {role, such as "text": values} to {"input_ids": rows, ...}; subclasses implement this."""
        raise NotImplementedError

    def collate(self, rows: Columns, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the batch {name: [rows, ...]} of `rows` {name: list} from `encode`; `generator` draws e.g. masks."""
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        """Return the fields of the model's config that the task sets, e.g. num_labels."""
        return {}


@dataclass(frozen=True)
class Language(Task):
    """Base class of language tasks, which pack the tokens of all documents into rows of equal length."""

    roles: ClassVar = {"text": ("text", "content", "body", "sentence")}
    packs = True

    @property
    def row_tokens(self) -> int:
        """Return how many tokens of text fill one row, not counting special tokens that the task adds."""
        return self.seq_len

    def encode(self, columns: Columns) -> dict[str, Any]:
        """Tokenize the texts in columns["text"] and pack them. Return {"input_ids": rows of `row_tokens` tokens,
        "lengths": per row, the numbers of tokens of the documents (or parts of documents) in the row}.

        An end-of-text token, if the tokenizer has one, follows each document. Tokens after the last full
        row are dropped.
        """
        if self.row_tokens < 1:
            problem = f"found {self.seq_len}, but special tokens already fill a row of that length"
            raise DataError("train", "seq_len", problem, "choose a larger seq_len")
        end = [t for t in (self.tokenizer.eos_token_id,) if t is not None]
        # verbose: a document is longer than the model may take, but a row is not
        found = self.tokenizer(list(columns["text"]), add_special_tokens=False, verbose=False)
        documents = [np.asarray([*ids, *end], dtype=np.int32) for ids in found["input_ids"]]
        count = sum(map(len, documents)) // self.row_tokens
        used = count * self.row_tokens
        ids = np.concatenate([np.zeros(0, np.int32), *documents])[:used]
        ends = np.cumsum([0, *map(len, documents)])
        edges = np.union1d(np.arange(0, used + 1, self.row_tokens), ends[ends < used])
        firsts = np.flatnonzero(edges[1:-1] % self.row_tokens == 0) + 1  # each begins a row
        lengths = np.split(np.diff(edges), firsts)[:count]
        return {"input_ids": [*ids.reshape(count, self.row_tokens)], "lengths": lengths}


@dataclass(frozen=True)
class Causal(Language):
    """Task of predicting the next token.

    Args:
        document_masks: mask attention between documents of a row, begin positions at 0 in each, and
            do not predict a document's first token.
    """

    document_masks: bool = False
    head = "AutoModelForCausalLM"

    def collate(self, rows: Columns, generator: torch.Generator) -> dict[str, Tensor]:
        """Return {"input_ids", "labels": the same ids, not shifted}, each [rows, tokens], of encoded `rows`. With
        `document_masks` add position_ids that restart in each document, whose first token gets the label -100.
        """
        ids = as_tensor(rows["input_ids"])
        if not self.document_masks:
            return {"input_ids": ids, "labels": ids}
        places = [torch.cat([torch.arange(n) for n in lengths]) for lengths in rows["lengths"]]
        positions = torch.stack(places)
        labels = torch.where(positions == 0, IGNORED, ids)
        return {"input_ids": ids, "labels": labels, "position_ids": positions}


@dataclass(frozen=True)
class Masked(Language):
    """Task of predicting masked tokens, as in BERT (arXiv:1810.04805).

    If the tokenizer has [CLS] and [SEP], every row begins with [CLS] and ends with [SEP].

    Args:
        rate: fraction of the tokens to predict.
    """

    rate: float = 0.15
    head = "AutoModelForMaskedLM"

    def __post_init__(self) -> None:
        if self.tokenizer.mask_token_id is None:
            name = getattr(self.tokenizer, "name_or_path", "")
            problem = "found no [MASK] token"
            hint = "pass a tokenizer that has one, or choose another task"
            raise DataError(name, "tokenizer", problem, hint)

    @property
    def frame(self) -> tuple[list[int], list[int]]:
        """Return (special tokens before the text of a row, special tokens after it)."""
        if self.tokenizer.cls_token_id is None or self.tokenizer.sep_token_id is None:
            return [], []
        return [self.tokenizer.cls_token_id], [self.tokenizer.sep_token_id]

    @property
    def row_tokens(self) -> int:
        return self.seq_len - sum(map(len, self.frame))

    def collate(self, rows: Columns, generator: torch.Generator) -> dict[str, Tensor]:
        """Return {"input_ids": ids of `rows`, masked as in BERT with `generator`, "labels": original ids of the tokens
        to predict (with `rate` > 0 at least one per batch), and -100 elsewhere}.
        """
        from transformers import DataCollatorForLanguageModeling

        first, last = self.frame
        ids = as_tensor([[*first, *row, *last] for row in rows["input_ids"]])
        collator = DataCollatorForLanguageModeling(self.tokenizer, mlm_probability=self.rate)
        collator.generator = generator
        read, labels = collator.torch_mask_tokens(ids.clone())
        if self.rate and not (labels != IGNORED).any():  # a mean over nothing is nan
            middle = ids.shape[1] // 2
            labels[:, middle] = ids[:, middle]
        return {"input_ids": read, "labels": labels}


@dataclass(frozen=True)
class Spans(Language):
    """Task of predicting the spans that sentinel tokens replace, as in T5 (arXiv:1910.10683, 3.1.4).

    All rows have the same number of spans, and of tokens in spans, so the inputs, of at most `seq_len`
    tokens, need no padding.

    Args:
        rate: fraction of the tokens that lie in spans.
        mean: mean length of a span, in tokens.
    """

    rate: float = 0.15
    mean: float = 3.0
    head = "AutoModelForSeq2SeqLM"

    def __post_init__(self) -> None:
        _, spans = self._counts(self.row_tokens)
        if self.row_tokens < 4 or self.tokenizer.unk_token_id in self._sentinels(spans):
            problem = f"rows of {self.seq_len} tokens are too short for a masked span, or the tokenizer lacks {spans} tokens <extra_id_0>, ..."
            hint = "use a tokenizer of T5, and --seq-len 8 or more"
            raise DataError("train", "task=span", problem, hint)

    @cached_property
    def row_tokens(self) -> int:
        """Return the most text tokens of a row whose inputs (sentinels in place of spans) fit into `seq_len` tokens."""

        def inputs(tokens: int) -> int:
            noise, spans = self._counts(tokens)
            return tokens - noise + spans + 1

        return next(n for n in range(2, 2 * self.seq_len + 2) if inputs(n + 1) > self.seq_len)

    def _counts(self, tokens: int) -> tuple[int, int]:
        """Return (number of tokens in spans, number of spans) for a row of `tokens` tokens."""
        noise = min(max(round(tokens * self.rate), 1), tokens - 1)
        return noise, min(max(round(noise / self.mean), 1), tokens - noise)

    def _sentinels(self, count: int) -> list[int]:
        return self.tokenizer.convert_tokens_to_ids([f"<extra_id_{i}>" for i in range(count)])

    def collate(self, rows: Columns, generator: torch.Generator) -> dict[str, Tensor]:
        """Return {"input_ids": rows with a sentinel in place of each span, "labels": each sentinel, then its span}.
        `generator` draws the spans.
        """
        pairs = [self._corrupted(as_tensor(ids), generator) for ids in rows["input_ids"]]
        inputs, labels = (torch.stack(column) for column in zip(*pairs, strict=True))
        return {"input_ids": inputs, "labels": labels}

    def _corrupted(self, ids: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        noise, count = self._counts(len(ids))
        kept = _parts(len(ids) - noise, count, generator)
        lost = _parts(noise, count, generator)
        pieces = ids.split([size for pair in zip(kept, lost, strict=True) for size in pair])
        marks = torch.tensor(self._sentinels(count)).split(1)
        end = torch.tensor([self.tokenizer.eos_token_id])
        inputs = [part for pair in zip(pieces[::2], marks, strict=True) for part in pair]
        labels = [part for pair in zip(marks, pieces[1::2], strict=True) for part in pair]
        return torch.cat([*inputs, end]), torch.cat([*labels, end])


def _parts(total: int, count: int, generator: torch.Generator) -> list[int]:
    """Return `count` positive integers with sum `total`, drawn by `generator`; all such lists are equally likely."""
    cuts = torch.randperm(total - 1, generator=generator)[: count - 1].sort().values + 1
    return torch.tensor([0, *cuts, total]).diff().tolist()


@dataclass(frozen=True)
class Labelled(Task):
    """Base class of tasks that predict classes; `names` are the names of the classes, in the order of their ids."""

    names: tuple[str, ...] = ()

    def settings(self) -> dict[str, Any]:
        names = dict(enumerate(self.names))
        return {"num_labels": len(names), "id2label": names, "label2id": {v: k for k, v in names.items()},
                "pad_token_id": pad_id(self.tokenizer), "problem_type": None}  # fmt: skip


@dataclass(frozen=True)
class Classify(Labelled):
    """Task of predicting the class of a text, or of a pair of texts."""

    head = "AutoModelForSequenceClassification"
    roles: ClassVar = {
        "text": ("text", "sentence", "sentence1", "premise"), "label": ("label", "labels"),
        "text_pair": ("sentence2", "hypothesis"),
    }  # fmt: skip
    kinds: ClassVar = {"label": "a class"}
    optional = ("text_pair",)

    def encode(self, columns: Columns) -> dict[str, Any]:
        """Return {"input_ids": tokens of each text or pair of texts, "labels": class id of each, ...}."""
        texts = [columns[name] for name in ("text", "text_pair") if name in columns]
        return {**_encoded(self, *texts), "labels": as_numbers(columns["label"], self.names)}

    def collate(self, rows: Columns, generator: torch.Generator) -> dict[str, Tensor]:
        """Return {"input_ids", "attention_mask", ...: [rows, tokens], padded to the longest row, "labels": [rows]}."""
        return {**_inputs(self, rows), "labels": as_tensor(rows["labels"])}


@dataclass(frozen=True)
class Tag(Labelled):
    """Task of predicting the class of every word; only the first token of a word has a label."""

    head = "AutoModelForTokenClassification"
    roles: ClassVar = {"tokens": ("tokens", "words"), "tags": ("tags", "ner_tags", "pos_tags", "labels")}  # fmt: skip
    kinds: ClassVar = {"tokens": "a list of texts", "tags": "a list of classes"}

    def encode(self, columns: Columns) -> dict[str, Any]:
        """Return {"input_ids": tokens of each row's words, "labels": a class id or IGNORED (-100) per token, ...}."""
        words = [list(one) for one in columns["tokens"]]
        found = self.tokenizer(words, truncation=True, max_length=self.seq_len, is_split_into_words=True)  # fmt: skip
        labels = []
        for row, tags in enumerate(as_numbers(columns["tags"], self.names)):
            if len(tags) != len(words[row]):
                problem = f"found {len(tags)} tags for {len(words[row])} words {words[row]!r:.60}"
                raise DataError("data", "tags", problem, "give each word one tag")
            places = found.word_ids(row)
            labels.append([
                IGNORED if place is None or place == before else tags[place]
                for place, before in zip(places, [None, *places], strict=False)
            ])  # fmt: skip
        return {**_kept(found), "labels": labels}

    def collate(self, rows: Columns, generator: torch.Generator) -> dict[str, Tensor]:
        """Return {"input_ids", "attention_mask", "labels", ...}, each [rows, tokens], padded to the longest row."""
        batch = _inputs(self, rows)
        return {**batch, "labels": _padded(rows["labels"], IGNORED, batch["input_ids"].shape[1])}


@dataclass(frozen=True)
class Translate(Task):
    """Task of predicting a target text of at most `target_len` tokens from a source text."""

    target_len: int = 128
    head = "AutoModelForSeq2SeqLM"
    roles: ClassVar = {
        "source": ("source", "input", "document", "article", "question"),
        "target": ("target", "output", "summary", "highlights", "answer"),
    }  # fmt: skip

    def encode(self, columns: Columns) -> dict[str, Any]:
        """Return {"input_ids": tokens of each source text, "labels": tokens of each target text}."""
        labels = self.tokenizer(text_target=list(columns["target"]), truncation=True, max_length=self.target_len)  # fmt: skip
        return {**_encoded(self, list(columns["source"])), "labels": labels["input_ids"]}

    def collate(self, rows: Columns, generator: torch.Generator) -> dict[str, Tensor]:
        """Return {"input_ids", "attention_mask": padded to the longest source, "labels": to the longest target}."""
        labels = _padded(rows["labels"], IGNORED, _width(rows["labels"], self.target_len))
        batch = {k: v for k, v in _inputs(self, rows).items() if k not in ASIDE}
        return {**batch, "labels": labels}


@dataclass(frozen=True)
class Pairs(Task):
    """Contrastive task: find the positive of each anchor among the positives of all rows in the batch.

    A row holds two texts, anchor and positive; a batch holds anchor, positive, anchor, positive, ...
    """

    head = "AutoModel"
    roles: ClassVar = {
        "anchor": ("anchor", "query", "question", "sentence1"),
        "positive": ("positive", "passage", "answer", "sentence2"),
    }  # fmt: skip
    couples = True

    def encode(self, columns: Columns) -> dict[str, Any]:
        """Return the tokens of anchors and positives as columns "anchor.input_ids", "positive.input_ids", ..."""
        found = {role: _encoded(self, columns[role]) for role in self.roles}
        return {f"{role}.{k}": v for role, each in found.items() for k, v in each.items()}

    def collate(self, rows: Columns, generator: torch.Generator) -> dict[str, Tensor]:
        """Return {"input_ids", "attention_mask", ...}, each [2 * rows, tokens]: anchor, positive, anchor, ..."""
        names = [name.partition(".")[2] for name in rows if name.startswith("anchor.")]
        columns = {name: zip(*(rows[f"{role}.{name}"] for role in self.roles), strict=True) for name in names}  # fmt: skip
        return _inputs(self, {name: [one for pair in held for one in pair] for name, held in columns.items()})  # fmt: skip


TASKS: dict[str, type[Task]] = {
    "causal": Causal, "masked": Masked, "span": Spans, "classify": Classify, "tag": Tag,
    "seq2seq": Translate, "pairs": Pairs,
}  # fmt: skip


def as_tensor(rows: Any) -> Tensor:
    """Return integers, or rows of equally many integers, as an int64 tensor."""
    return torch.from_numpy(np.asarray(rows, dtype=np.int64))


def as_numbers(labels: Any, names: Sequence[str]) -> Any:
    """Return the class ids of labels, or of lists of labels; a label is an id or one of `names`."""
    if isinstance(labels, list):
        return [as_numbers(one, names) for one in labels]
    is_number = not isinstance(labels, str)
    if not (0 <= labels < len(names) if is_number else labels in names):
        expected = f"0 to {len(names) - 1}" if is_number else f"one of {', '.join(names)}"
        hint = "remove the rows of other classes, or add rows of these classes to the training data"
        raise DataError("data", "label", f"found {labels!r}, expected {expected}", hint)
    return int(labels) if is_number else names.index(labels)


def pad_id(tokenizer: Any) -> int:
    """Return the id of the padding token; the end-of-text token if the tokenizer has no padding token."""
    found = tokenizer.pad_token_id
    found = tokenizer.eos_token_id if found is None else found
    if found is None:
        problem = "found no padding token and no end-of-text token"
        raise DataError("tokenizer", "pad_token", problem, "set tokenizer.pad_token")
    return found


def _encoded(task: Task, *texts: Any) -> dict[str, Any]:
    return _kept(task.tokenizer(*texts, truncation=True, max_length=task.seq_len))


def _kept(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: found[name] for name in ("input_ids", *ASIDE) if name in found}


def _padded(lists: Sequence[Sequence[int]], value: int, width: int) -> Tensor:
    """Return an int64 tensor [rows, width] of lists that are filled up with `value`."""
    return torch.tensor([[*one, *[value] * (width - len(one))] for one in lists], dtype=torch.long)


def _width(lists: Sequence[Sequence[int]], most: int) -> int:
    """Return the longest length of `lists`, rounded up to a multiple of 8; at most `most`."""
    return min(most, -(-max(map(len, lists)) // 8) * 8)


def _inputs(task: Task, rows: Columns) -> dict[str, Tensor]:
    """Return {"input_ids", "attention_mask", and "token_type_ids" if `rows` have some}, each [rows, tokens], padded."""
    ids = rows["input_ids"]
    held = {"input_ids": (ids, pad_id(task.tokenizer)), "attention_mask": ([[1] * len(one) for one in ids], 0)}  # fmt: skip
    held |= {name: (rows[name], 0) for name in ASIDE if name in rows}
    width = _width(ids, task.seq_len)
    return {name: _padded(lists, value, width) for name, (lists, value) in held.items()}
