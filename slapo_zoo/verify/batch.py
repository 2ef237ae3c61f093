"""An input for any head of any family, with targets; seeded, padded, with ignored labels."""

from typing import Any

import torch
from torch import Tensor

from slapo_zoo.parallel.losses.heads import CLASS, FLAG, PAIR, TAG, TOKEN, head_of
from slapo_zoo.zoo.survey import example_batch

MEDIA = ("pixel_values", "input_features")
RESERVED = 3  # token ids below are special


def has_loss(class_name: str) -> bool:
    """Return whether the labels of a head are known."""
    return bool(head_of(class_name).labels)


def example(model: Any, rows: int, tokens: int, seed: int = 0, tp: int = 1) -> dict[str, Tensor]:
    """A batch with targets, the same for every rank; it holds the first and last id of every shard.

    Args:
        model: of `transformers`; only its class and config count.
        rows: of the batch.
        tokens: of each row; rows are padded differently.
        seed: of the values.
        tp: ranks that divide the vocabulary.
    """
    g, config = torch.Generator().manual_seed(seed), model.config
    batch = example_batch(model, rows, tokens)
    seen = {n: torch.randn(batch[n].shape, generator=g) for n in MEDIA if n in batch}
    text = next((n for n in ("input_ids", "decoder_input_ids") if n in batch), "")
    if text:
        ids, mask = _text(batch[text].shape, config.get_text_config(), tp, g)
        seen |= {text: ids} | ({"attention_mask": mask} if text == "input_ids" else {})
    else:
        ids = mask = next(iter(seen.values()))
    batch |= seen
    for name, kind in head_of(type(model).__name__).labels.items():
        batch[name] = _label(kind, ids, mask, config, g)
        if name == "mc_labels":
            batch["mc_token_ids"] = mask.sum(-1) - 1
    if "labels" in batch:
        batch.pop("decoder_input_ids", None)  # the model makes them of the labels
    return batch


def _text(shape: Any, config: Any, tp: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Token ids [..., T] that are padding where the mask is 0."""
    size = config.vocab_size
    ids = torch.randint(RESERVED, size, tuple(shape), generator=g)
    share = -(-size // tp)
    edges = {size - 1} | {i for k in range(1, tp) for i in (k * share - 1, k * share)}
    for i, edge in enumerate(sorted(e for e in edges if RESERVED <= e < size)):
        ids.view(-1, shape[-1])[i % 2, i // 2] = edge
    lengths = torch.randint(max(1, shape[-1] // 2), shape[-1] + 1, tuple(shape[:-1]), generator=g)
    mask = (torch.arange(shape[-1]) < lengths[..., None]).long()
    mask.view(-1, shape[-1])[:1] = 1
    return ids * mask + (config.pad_token_id or 0) * (1 - mask), mask


def _label(kind: str, ids: Tensor, mask: Tensor, config: Any, g: torch.Generator) -> Tensor:
    """Numbers of a kind (`slapo_zoo.parallel.losses.heads`); some labels of tokens are ignored."""
    if kind == TOKEN:
        some = torch.rand(ids.shape, generator=g) < 0.7
        return ids.masked_fill(~(some & mask.bool()), -100)
    high = {CLASS: config.num_labels, TAG: config.num_labels, PAIR: 2, FLAG: 2}.get(kind)
    shape = tuple(ids.shape) if kind in (TAG, FLAG) else (len(ids),)
    found = torch.randint(0, ids.shape[1] if high is None else high, shape, generator=g)
    return found.masked_fill(~mask.bool(), -100) if kind == TAG else found
