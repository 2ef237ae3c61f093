"""An input for any head of any family, with targets; seeded, padded, with ignored labels."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slapo_zoo.zoo.survey import example_batch

Targets = Callable[[Tensor, Tensor, Any, torch.Generator], dict[str, Tensor]]


def _ints(high: int, shape: Any, g: torch.Generator) -> Tensor:
    return torch.randint(0, high, tuple(shape), generator=g)


def _tokens(ids: Tensor, mask: Tensor, config: Any, g: torch.Generator) -> dict[str, Tensor]:
    some = torch.rand(ids.shape, generator=g) < 0.7
    return {"labels": ids.masked_fill(~(some & mask.bool()), -100)}


def _tags(ids: Tensor, mask: Tensor, config: Any, g: torch.Generator) -> dict[str, Tensor]:
    return {"labels": _ints(config.num_labels, ids.shape, g).masked_fill(~mask.bool(), -100)}


def _class(ids: Tensor, mask: Tensor, config: Any, g: torch.Generator) -> dict[str, Tensor]:
    return {"labels": _ints(config.num_labels, (len(ids),), g)}


def _span(ids: Tensor, mask: Tensor, config: Any, g: torch.Generator) -> dict[str, Tensor]:
    start, end = _ints(ids.shape[1], (2, len(ids)), g)
    return {"start_positions": start, "end_positions": end}


def _next(ids: Tensor, mask: Tensor, config: Any, g: torch.Generator) -> dict[str, Tensor]:
    return {"next_sentence_label": _ints(2, (len(ids),), g)}


def _order(ids: Tensor, mask: Tensor, config: Any, g: torch.Generator) -> dict[str, Tensor]:
    return {"sentence_order_label": _ints(2, (len(ids),), g)}


def _choice(ids: Tensor, mask: Tensor, config: Any, g: torch.Generator) -> dict[str, Tensor]:
    return {"labels": _ints(ids.shape[1], (len(ids),), g)}


def _choice_and_tokens(ids: Tensor, mask: Tensor, config: Any, g: torch.Generator) -> dict:
    places = {"mc_labels": _ints(ids.shape[1], (len(ids),), g), "mc_token_ids": mask.sum(-1) - 1}
    return {**_tokens(ids, mask, config, g), **places}


# ending of a class name --> its targets; the first that fits
TARGETS: dict[str, tuple[Targets, ...]] = {
    "BertForPreTraining": (_tokens, _next),
    "AlbertForPreTraining": (_tokens, _order),
    "DoubleHeadsModel": (_choice_and_tokens,),
    "LMHeadModel": (_tokens,),
    "ForMaskedLM": (_tokens,),
    "ForCausalLM": (_tokens,),
    "ForConditionalGeneration": (_tokens,),
    "ForSequenceClassification": (_class,),
    "ForImageClassification": (_class,),
    "ForTokenClassification": (_tags,),
    "ForQuestionAnswering": (_span,),
    "ForMultipleChoice": (_choice,),
    "ForNextSentencePrediction": (_next,),
}
RESERVED = 3  # token ids below are special


def has_loss(class_name: str) -> bool:
    """Whether the targets of a head are known."""
    return any(class_name.endswith(end) for end in TARGETS)


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
    if "pixel_values" in batch:
        ids = mask = torch.randn(batch["pixel_values"].shape, generator=g)
        batch["pixel_values"] = ids
    else:
        shape = batch["input_ids"].shape
        choices = (2,) if type(model).__name__.endswith("DoubleHeadsModel") else ()
        ids, mask = _text((shape[0], *choices, *shape[1:]), config, tp, g)
        batch |= {"input_ids": ids, "attention_mask": mask}
    for end, targets in TARGETS.items():
        if type(model).__name__.endswith(end):
            for target in targets:
                batch |= target(ids, mask, config, g)
            break
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
