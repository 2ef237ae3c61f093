"""Example batches for every head of the zoo, with and without labels."""

import inspect
from typing import Any

import torch
from torch import Tensor

from slapo_zoo.parallel.losses.heads import FLAG, TAG, TOKEN, head_of

CHARACTERS = 96  # vocabulary of a model without `vocab_size`


def example_batch(model: Any, batch_size: int, seq_len: int) -> dict[str, Tensor]:
    """Return a batch of zeros that the model's forward takes: images, audio features or tokens, without labels.

    Args:
        model: a model of `transformers`.
        batch_size: number of rows.
        seq_len: tokens per row.
    """
    config, takes = model.config, inspect.signature(model.forward).parameters
    compares = "return_loss" in takes  # images with texts
    images = _images(config, batch_size) if "pixel_values" in takes else {}
    if model.main_input_name == "pixel_values":
        return images
    choices = (2,) if head_of(type(model).__name__).takes_choices else ()
    ids = torch.zeros((batch_size, *choices, seq_len), dtype=torch.int64)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    decodes = config.is_encoder_decoder and "Encoder" not in type(model).__name__
    if hasattr(config, "num_mel_bins") and {"input_features", "input_ids"} & set(takes) == {
        "input_features"
    }:
        shape = (
            batch_size,
            config.num_mel_bins,
            2 * getattr(config, "max_source_positions", seq_len),
        )
        batch, decodes = {"input_features": torch.zeros(shape)}, "decoder_input_ids" in takes
    return {
        **batch,
        **(images if compares else {}),
        **({"decoder_input_ids": ids} if decodes else {}),
    }


def _images(config: Any, batch_size: int) -> dict[str, Tensor]:
    of_images = getattr(config, "vision_config", config)
    size, channels = getattr(of_images, "image_size", 224), getattr(of_images, "num_channels", 3)
    height, width = (size, size) if isinstance(size, int) else size
    return {"pixel_values": torch.zeros(batch_size, channels, height, width)}


def random_batch(model: Any, batch_size: int, seq_len: int) -> dict[str, Tensor]:
    """Return an example batch with random content from a fixed seed, and labels."""
    batch, g = example_batch(model, batch_size, seq_len), torch.Generator().manual_seed(0)
    for name, value in batch.items():
        if name.endswith("input_ids"):
            vocabulary = getattr(model.config.get_text_config(), "vocab_size", CHARACTERS)
            batch[name] = torch.randint(3, vocabulary, value.shape, generator=g)
        elif value.is_floating_point():
            batch[name] = torch.randn(value.shape, generator=g)
    return with_labels(model, batch)


def training_batch(model: Any, batch_size: int, seq_len: int) -> dict[str, Tensor]:
    """Return an example batch of zeros with labels for the model's head."""
    return with_labels(model, example_batch(model, batch_size, seq_len))


def with_labels(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the batch with labels of the kind that the model's head takes; unchanged for a head without a loss."""
    first = next(iter(batch.values()))
    rows = torch.zeros(len(first), dtype=torch.int64)
    labels = dict.fromkeys(head_of(type(model).__name__).labels, rows)
    if getattr(model.config, "problem_type", None) == "multi_label_classification":
        return {**batch, **dict.fromkeys(labels, torch.zeros(len(rows), model.config.num_labels))}
    for name, kind in head_of(type(model).__name__).labels.items():
        if kind in (TAG, FLAG):
            labels[name] = torch.zeros_like(batch["input_ids"])
        elif kind == TOKEN:
            labels[name] = batch.get("input_ids", batch.get("decoder_input_ids"))
    return {**batch, **labels}
