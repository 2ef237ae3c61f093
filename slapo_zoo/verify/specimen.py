"""A tiny plain model of any config: its weights on disk, and what it computes, to compare with."""

import copy
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from slapo_zoo.hf.example_inputs import random_batch
from slapo_zoo.hf.models import accepts, freeze_as_made, tied_names
from slapo_zoo.parallel.rng.random_stream import drawn_from
from slapo_zoo.zoo.derivation.observe import Observation, observe
from slapo_zoo.zoo.derivation.spelling import find_spelling
from slapo_zoo.zoo.derivation.tiny import TOKENS, Sizes, sizes_in_turn, tiny, without_dropout

NOISE = 0.05  # added to every weight: biases of 0 and norms of 1 would hide mistakes
MOST = 2e7  # parameters that a tiny model may have


@dataclass
class Specimen:
    """A tiny plain model and its results.

    Args:
        config: of it.
        cls: its class.
        folder: of its weights.
        dtype: in which it is compared: float64, or float32 where it cannot run in that.
        batch: the input, with labels.
        outputs: tensors that it returns in eval mode.
        uncached: the same without a cache, which a pipeline has not: some make other masks then.
        loss: of a training forward.
        grads: name --> gradient of that loss; empty for a head without a loss.
        seen: what it does with its parameters.
        dropouts: fields of the given config that drop something; they are 0 in this one.
    """

    config: Any
    cls: Any
    folder: Path
    dtype: torch.dtype
    batch: dict[str, Tensor]
    outputs: dict[str, Tensor]
    uncached: dict[str, Tensor]
    loss: float
    grads: dict[str, Tensor]
    seen: Observation
    dropouts: tuple[str, ...] = ()

    @property
    def is_finite(self) -> bool:
        """Return whether the loss and every gradient are; some classes give NaN for padding."""
        return math.isfinite(self.loss) and all(g.isfinite().all() for g in self.grads.values())


def specimen(config: Any, cls: Any, folder: Path, sizes: Sizes | None = None, rows: int = 4) -> Specimen:  # fmt: skip
    """A tiny model of a config, run in training and in evaluation; the first that plain `transformers` trains.

    Args:
        config: of `transformers`; it is not changed.
        cls: of the model.
        folder: for its weights.
        sizes: None takes the given config as it is.
        rows: of the batch.

    Raises:
        Exception: what the smallest one raised, where none trains.
    """
    problems: list[Exception] = []
    for chosen in sizes_in_turn(sizes) if sizes else [None]:
        for padded in (True, False):
            try:
                small = tiny(config, chosen) if chosen else copy.deepcopy(config)
                found = _specimen(small, cls, folder, rows, padded)
            except Exception as error:
                problems.append(error)
                break
            if found.is_finite:
                return found
            not_finite = ArithmeticError(f"its loss is {found.loss}, or a gradient is not finite")
        else:
            raise not_finite  # a larger one gives no better
    raise problems[0]


def _specimen(small: Any, cls: Any, folder: Path, rows: int, padded: bool) -> Specimen:
    seen_config = copy.deepcopy(small)
    zeroed = (name for name in without_dropout(small) if hasattr(small, name))
    drops = tuple(name for name in zeroed if "drop" in name and "layerdrop" not in name)
    _eager_experts(small)
    model = _plain(small, cls)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
        batch = padded_batch(model, rows, TOKENS) if padded else random_batch(model, rows, TOKENS)
        seen = _watch(seen_config, cls, batch)
        seen.spelling = find_spelling(_files(folder), model.state_dict())
        for dtype in (torch.float64, torch.float32):
            try:
                return replace(_run(small, cls, folder, dtype, batch, seen), dropouts=drops)
            except RuntimeError:
                if dtype == torch.float32:
                    raise
    raise AssertionError


def _files(folder: Path) -> dict[str, Tensor]:
    return {key: tensor for file in folder.glob("*.safetensors") for key, tensor in load_file(file).items()}  # fmt: skip


def padded_batch(model: Any, rows: int, tokens: int) -> dict[str, Tensor]:
    """A batch with labels; every other row ends in padding, and all texts in the end token."""
    batch, config = random_batch(model, rows, tokens), model.config.get_text_config()
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if ids is not None and mask is not None:
        end, length = getattr(config, "eos_token_id", None), tokens - tokens // 4
        end = end if isinstance(end, int) else 3
        ids[0::2, ..., -1] = end
        ids[1::2, ..., length - 1] = end
        ids[1::2, ..., length:] = getattr(config, "pad_token_id", None) or 0
        mask[1::2, ..., length:] = 0
    if "labels" not in batch and ids is not None and accepts(type(model), "labels"):
        batch["labels"] = ids
    if "labels" in batch:
        batch.pop("decoder_input_ids", None)  # the model makes them of the labels
        if ids is not None and batch["labels"].shape == ids.shape:
            batch["labels"] = ids.masked_fill(mask == 0, -100)
    return batch


def _eager_experts(config: Any) -> None:
    if any("experts" in name for name in config.to_dict()):
        config._experts_implementation = "eager"  # the default one knows no fp64


def _plain(config: Any, cls: Any) -> Any:
    with torch.device("meta"):
        count = sum(p.numel() for p in cls(copy.deepcopy(config)).parameters())
    if count > MOST:
        raise MemoryError(f"the test model has {count:.0f} parameters, at most {MOST:.0f} fit")
    with drawn_from(0):
        model = cls(copy.deepcopy(config))
        model.tie_weights()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * NOISE)
            for module in model.modules():
                if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                    module.weight[module.padding_idx] = 0  # as the classes make it, some at a load
    return model


def _watch(config: Any, cls: Any, batch: dict[str, Tensor]) -> Observation:
    """One forward with the dropouts that the config has."""
    with drawn_from(0):
        _eager_experts(config)
        return observe(cls(config).train(), batch)


def _run(config: Any, cls: Any, folder: Path, dtype: torch.dtype, batch: dict[str, Tensor], seen: Observation) -> Specimen:  # fmt: skip
    model = freeze_as_made(cls.from_pretrained(folder, dtype=dtype, **experts(config)))
    silence(model)
    batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
    with torch.no_grad():
        outputs = uncached = tensors(model.eval()(**batch))
        if accepts(cls, "use_cache"):
            uncached = tensors(model(**batch, use_cache=False))
    loss, grads = 0.0, {}
    if "loss" in outputs:
        found = model.train()(**batch).loss
        found.backward()
        loss = float(found.detach())
        grads = {
            n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in own_parameters(model)
        }
    return Specimen(config, cls, folder, dtype, batch, outputs, uncached, loss, grads, seen)


def own_parameters(model: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter once, a tied one under the name that its files have."""
    held = dict(model.named_parameters(remove_duplicate=False))
    ties = ((a, b) for a, b in tied_names(model).items() if a in held)
    tied = {a for a, b in ties if held[a] is held.get(b)}
    return ((name, p) for name, p in held.items() if name not in tied)


def experts(config: Any) -> dict[str, str]:
    """Return the arguments of a load for models with experts."""
    found = getattr(config, "_experts_implementation", None)
    return {"experts_implementation": "eager"} if found == "eager" else {}


def silence(model: nn.Module) -> None:
    """Switch off all dropout, also what a class has written into its code."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0


def tensors(output: Any) -> dict[str, Tensor]:
    """Return the floating tensors of an output by name."""
    named = output.items() if hasattr(output, "items") else enumerate(output)
    return {str(k): v.detach().clone() for k, v in named if isinstance(v, Tensor) and v.is_floating_point()}  # fmt: skip
