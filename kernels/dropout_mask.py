"""Dropout masks of the kernels: given as a tensor, or hashed from one seed per cell where they are used.

A cell is a row of the batch (in attention: a row and a head); see slapo_zoo.parallel.rng.random_stream. The mask of element
i of a cell depends on (seed, i) alone, so forward, backward and recomputation draw the same one, on
every device and in every block size, and nothing of its size is stored.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from slapo_zoo.parallel.rng.device_seeds import hashed_cells, split_cells


def mask_like(x: Tensor, keep: Tensor | None, seeds: Tensor | None, p: float) -> Tensor | None:
    """The mask of x, 0 or 1/(1-p) in its shape and dtype; None where nothing is dropped.

    Args:
        x: what is dropped.
        keep: the mask itself, or None.
        seeds: int64, one per cell; x is cut into as many equal runs. Used if `keep` is None.
        p: probability that an element becomes 0.
    """
    if keep is not None or seeds is None or p == 0.0:
        return keep
    kept = hashed_cells(x.detach(), p, seeds)
    return kept / (1.0 - p) if p < 1.0 else kept


def dropout_of(module: Any, x: Tensor, cells: int = 0) -> dict[str, Any]:
    """Return the mask that a dropout module draws for x, as the arguments `keep`, `seeds` and `p`.

    A schedule gives a module a forward with a random stream of its own, which says what it `draws`:
    a mask on a CPU, seeds elsewhere. Another forward is asked for its mask; a plain module on a GPU gets one
    seed per cell from torch's generator. Nothing in eval().

    Args:
        module: nn.Dropout.
        x: what is dropped; only its shape, dtype and device count.
        cells: number of cells; by default what the stream has, or the rows of x.
    """
    if not module.training or module.p == 0.0:
        return {}
    forward = module.__dict__.get("forward")
    if draws := getattr(forward, "draws", None):
        found = draws(x)
        if cells and "seeds" in found:
            parts = cells // max(len(found["seeds"]), 1)
            size = x.numel() // max(cells, 1)
            found = {**found, "seeds": split_cells(found["seeds"], parts, size)}
        return found
    if forward is not None or not x.is_cuda:
        return {"keep": module(x.detach().new_ones(()).expand(x.shape))}
    return new_seeds(cells or x.shape[0], module.p, x.device)


def new_seeds(cells: int, p: float, device: Any) -> dict[str, Any]:
    """Seeds from torch's generator, as the arguments `seeds` and `p`; nothing for p = 0."""
    if p == 0.0:
        return {}
    return {"seeds": torch.randint(2**63 - 1, (cells,), device=device), "p": p}


def keys_of(mask: Tensor | None, size: int) -> Tensor | None:
    """Return which keys are real, [B, size], from a mask of transformers, [B, 1, S or 1, T].

    The last query sees every real key, causal or not; see `hides_only_padding`.
    """
    if mask is None:
        return None
    last = mask[:, 0, -1, :size]
    return last if last.dtype == torch.bool else last == 0


def hides_only_padding(mask: Tensor | None, queries: int, size: int, causal: bool) -> bool:
    """Return whether a mask of `transformers` hides only keys that are padding and, if causal, later ones.

    Packed sequences have another. A mask is looked at once; all layers of a model share it.

    Args:
        mask: [B, 1, S or 1, T], what is seen (bool) or what is added to the scores.
        queries: S.
        size: T, of which a mask may have more.
        causal: whether queries see only keys up to their own, the last S of T.
    """
    if mask is None or mask.shape[2] == 1 or mask.is_meta or isinstance(mask, FakeTensor):
        return True
    if torch.compiler.is_compiling():  # an answer would be a break in the graph
        return False
    known: dict[Any, bool] = mask.__dict__.setdefault("hides_only_padding", {})  # pyright: ignore[reportAttributeAccessIssue]
    if (queries, size, causal) not in known:
        seen = mask[..., :size] if mask.dtype == torch.bool else mask[..., :size] == 0
        keys: Tensor = keys_of(mask, size)  # pyright: ignore[reportAssignmentType]
        expected = keys[:, None, None].expand(len(keys), 1, queries, size)
        if causal:
            order = torch.ones(queries, size, dtype=torch.bool, device=mask.device)
            expected = expected & order.tril(size - queries)
        known[queries, size, causal] = bool((seen == expected).all())
    return known[queries, size, causal]
