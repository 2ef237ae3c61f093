"""Example batches, with and without labels, for every model head that slapo_zoo supports."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slapo_zoo.parallel.losses.heads import CLASS, FLAG, PAIR, TAG, TOKEN, head_of

CHARACTERS = 96  # vocabulary of a model without `vocab_size`
RESERVED = 3  # token ids below are special
END = 3  # end token of a text, if the config names none
LABELLED = 0.7  # the share of tokens that have a label; the loss ignores the others


def accepts(cls: Any, name: str) -> bool:
    """Return whether the forward of a class has an argument of that name."""
    return name in inspect.signature(cls.forward).parameters


def example_batch(model: Any, batch_size: int, seq_len: int) -> dict[str, Tensor]:
    """Return zeros that the forward of `model` takes for `batch_size` rows of `seq_len` tokens: images, audio features,
    tokens, or images with tokens; no labels.
    """
    config, takes = model.config, inspect.signature(model.forward).parameters
    looks = model.main_input_name == "pixel_values"
    seen = looks or "return_loss" in takes  # this one compares images with texts
    images = _images(config, batch_size) if seen and "pixel_values" in takes else {}
    if looks and "input_ids" not in takes:
        return images
    choices = (2,) if head_of(type(model).__name__).takes_choices else ()
    ids = torch.zeros((batch_size, *choices, seq_len), dtype=torch.int64)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    decodes = config.is_encoder_decoder and "Encoder" not in type(model).__name__
    is_audio = "input_features" in takes and "input_ids" not in takes
    if is_audio and hasattr(config, "num_mel_bins"):
        frames = 2 * getattr(config, "max_source_positions", seq_len)
        shape = (batch_size, config.num_mel_bins, frames)
        batch, decodes = {"input_features": torch.zeros(shape)}, "decoder_input_ids" in takes
    return batch | images | ({"decoder_input_ids": ids} if decodes else {})


def _images(config: Any, batch_size: int) -> dict[str, Tensor]:
    of_images = getattr(config, "vision_config", config)
    size, channels = getattr(of_images, "image_size", 224), getattr(of_images, "num_channels", 3)
    height, width = (size, size) if isinstance(size, int) else size
    return {"pixel_values": torch.zeros(batch_size, channels, height, width)}


def random_batch(model: Any, batch_size: int, seq_len: int, seed: int = 0) -> dict[str, Tensor]:
    """Return a batch with content drawn by `seed`, and labels; the other arguments are those of `example_batch`."""
    batch, g = example_batch(model, batch_size, seq_len), torch.Generator().manual_seed(seed)
    for name, value in batch.items():
        if name.endswith("input_ids"):
            vocabulary = getattr(model.config.get_text_config(), "vocab_size", CHARACTERS)
            batch[name] = torch.randint(RESERVED, vocabulary, value.shape, generator=g)
        elif value.is_floating_point():
            batch[name] = torch.randn(value.shape, generator=g)
    return with_labels(model, batch)


def training_batch(model: Any, batch_size: int, seq_len: int) -> dict[str, Tensor]:
    """Return a batch of zeros, `batch_size` rows (of `seq_len` tokens, if any), with labels for the model's head."""
    return with_labels(model, example_batch(model, batch_size, seq_len))


def with_labels(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return `batch` with labels: its token ids for a head that predicts tokens, zeros for others that have a loss."""
    first = next(iter(batch.values()))
    rows = torch.zeros(len(first), dtype=torch.int64)
    labels = dict.fromkeys(head_of(type(model).__name__).labels, rows)
    if getattr(model.config, "problem_type", None) == "multi_label_classification":
        return {**batch, **dict.fromkeys(labels, torch.zeros(len(rows), model.config.num_labels))}
    for name, kind in head_of(type(model).__name__).labels.items():
        if kind in (TAG, FLAG):
            labels[name] = torch.zeros_like(batch["input_ids"])
        elif kind == TOKEN:
            labels[name] = batch.get("input_ids", batch.get("decoder_input_ids", rows))
    return {**batch, **labels}


def cut_example(
    model: Any, batch: dict[str, Tensor], ranks: int, positions: str
) -> dict[str, Tensor]:
    """Return an example batch with only the first cp rank's tokens, of `ranks` cp ranks. `shift_labels` is added if the
    head compares tokens with the next label, and `position_ids` if `positions`, a value of `Table.cut_tokens`, is
    "counted", "counted by mask" or "counted real", not "placed", "relative" or "none". Both have the shapes, but not
    the values, that training (`slapo_zoo.model.step.cut_batch`) gives them.
    """
    if positions.startswith("counted"):
        batch = {**batch, "position_ids": batch["input_ids"]}
    if head_of(type(model).__name__).shifts and "labels" in batch:
        batch = {**batch, "shift_labels": batch["labels"]}
    return {name: x[:, : -(-x.shape[1] // ranks)].contiguous() for name, x in batch.items()}


def example_shard(model: Any, positions: str) -> Callable[..., Any]:
    """Return a function (cut, tensors, others) --> (tensors, others) that stands in for the sharding of a batch over
    cp: it shortens `tensors` {name: [B, S, ...]} to the first S / cut.n tokens on any rank, since only shapes matter.
    It adds `position_ids` if `positions` ("counted", "placed", ...) says that under cp the model must be passed them.
    """
    return lambda cut, tensors, others: (cut_example(model, tensors, cut.n, positions), others)


def padded_batch(
    model: Any, rows: int, tokens: int, seed: int = 0, tp: int = 1
) -> dict[str, Tensor]:
    """Return a batch that exposes errors of sharding: rows of different lengths, and some labels that the loss ignores.

    Args:
        model: a model of `transformers`, of which only class and config are read.
        rows: number of rows.
        tokens: tokens of each row, padding included; the first row has no padding.
        seed: seed of the random values.
        tp: number of vocabulary shards; the batch has the first and the last id of each.

    Returns:
        name --> tensor, with labels where the model's class takes some.
    """
    g, config = torch.Generator().manual_seed(seed), model.config
    batch = example_batch(model, rows, tokens)
    for name, value in batch.items():
        if value.is_floating_point():
            batch[name] = torch.randn(value.shape, generator=g)
    text = next((n for n in ("input_ids", "decoder_input_ids") if n in batch), "")
    if text:
        ids, mask = _text(batch[text].shape, config.get_text_config(), tp, g)
        batch |= {text: ids} | ({"attention_mask": mask} if text == "input_ids" else {})
    else:
        ids = mask = next(iter(batch.values()))
    kinds = dict(head_of(type(model).__name__).labels)
    if not kinds and text and accepts(type(model), "labels"):
        kinds["labels"] = TOKEN
    for name, kind in kinds.items():
        batch[name] = _label(kind, ids, mask, config, g)
        if name == "mc_labels":
            batch["mc_token_ids"] = mask.sum(-1) - 1
    if "labels" in batch:
        batch.pop("decoder_input_ids", None)  # the model makes them of the labels
    return batch


def _text(shape: Any, config: Any, tp: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return (random token ids of `shape` [..., T], each row closed by the end token; mask [..., T] that is 0 at
    padding). If T is large enough, the ids on both sides of each border between `tp` vocabulary shards are among them.
    `config` has the vocabulary size and the ids of end and padding.
    """
    size, end = getattr(config, "vocab_size", CHARACTERS), getattr(config, "eos_token_id", None)
    end = end if isinstance(end, int) else END
    ids = torch.randint(RESERVED, size, tuple(shape), generator=g)
    ids = ids.masked_fill(ids == end, RESERVED if end != RESERVED else RESERVED + 1)
    share = -(-size // tp)
    edges = {size - 1} | {i for k in range(1, tp) for i in (k * share - 1, k * share)}
    spots = ids.view(-1, shape[-1])[:2].T
    for i, edge in enumerate(sorted(e for e in edges if RESERVED <= e < size)[: spots.numel()]):
        spots[divmod(i, spots.shape[1])] = edge
    lengths = torch.randint(max(1, shape[-1] // 2), shape[-1] + 1, tuple(shape[:-1]), generator=g)
    lengths.view(-1)[:1] = shape[-1]
    ids.scatter_(-1, lengths[..., None] - 1, end)
    mask = (torch.arange(shape[-1]) < lengths[..., None]).long()
    return ids * mask + (getattr(config, "pad_token_id", None) or 0) * (1 - mask), mask


def _label(kind: str, ids: Tensor, mask: Tensor, config: Any, g: torch.Generator) -> Tensor:
    """Return random labels of a `kind` from `losses.heads`. TOKEN (a token id per position): 70 % of the `ids` [B, S],
    else -100. TAG (a class per position): [B, S], -100 at padding. FLAG (0 or 1 per position): [B, S]. Others have one
    label per row: [B], or [B, num_labels] if `config` says that a row has several.
    """
    if kind == TOKEN:
        some = torch.rand(ids.shape, generator=g) < LABELLED
        return ids.masked_fill(~(some & mask.bool()), -100)
    if getattr(config, "problem_type", None) == "multi_label_classification":
        return torch.rand(len(ids), config.num_labels, generator=g).round()
    high = {CLASS: config.num_labels, TAG: config.num_labels, PAIR: 2, FLAG: 2}.get(kind)
    shape = tuple(ids.shape) if kind in (TAG, FLAG) else (len(ids),)
    found = torch.randint(0, ids.shape[1] if high is None else high, shape, generator=g)
    return found.masked_fill(~mask.bool(), -100) if kind == TAG else found
