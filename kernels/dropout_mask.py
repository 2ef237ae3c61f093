"""Dropout masks of kernels: given as a tensor, or hashed from one seed per cell while they are used.

A cell is one batch row (in attention: one batch row and head); see slapo_zoo.parallel.rng.layout_independent_random.
The mask of element i of a cell depends only on (seed, i), so forward, backward and recomputation draw the same mask
on every device and with every block size, and no mask is stored.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from slapo_zoo.parallel.rng.device_seeds import hashed_cells, split_cells


def mask_like(x: Tensor, keep: Tensor | None, seeds: Tensor | None, p: float) -> Tensor | None:
    """Return the dropout mask of x, 0 or 1/(1-p) in its shape and dtype: `keep` if that is not None, else hashed with
    probability `p` from `seeds`, int64 [n], or None without seeds. x is then cut into n runs of equal length in
    row-major order, and each is masked by its own seed.
    """
    if keep is not None or seeds is None or p == 0.0:
        return keep
    kept = hashed_cells(x.detach(), p, seeds)
    return kept / (1.0 - p) if p < 1.0 else kept


def dropout_of(module: Any, x: Tensor, cells: int = 0) -> dict[str, Any]:
    """Return the arguments with which a kernel drops elements as `module` would: {"keep": mask in the shape of x} or
    {"seeds": int64 [n], "p": probability}; {} if it drops none (eval mode or p = 0).

    A forward that slapo_zoo put into the module, so that dropout is the same on every mesh, has a function `draws`,
    which is called: it returns seeds on a GPU, a mask on a CPU. Any other module gets new seeds from torch's generator
    on a GPU if its forward was not replaced; else it is called on a tensor of ones, and its output is the mask.

    Args:
        module: an nn.Dropout.
        x: tensor to be dropped; only shape, dtype and device are used.
        cells: number n of seeds, for attention batch rows * heads; 0: one per row of x, or as many as `draws` returns.
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
    """Draw `cells` dropout seeds from torch's generator; return {"seeds": int64 [cells], "p": p}, or {} for p = 0."""
    if p == 0.0:
        return {}
    return {"seeds": torch.randint(2**63 - 1, (cells,), device=device), "p": p}


def keys_of(mask: Tensor | None, size: int) -> Tensor | None:
    """Return bool [B, size], False for the keys that an attention mask of `transformers` hides as padding.

    The mask is [B, 1, S or 1, T], of which the first `size` keys count. Only the row of the last query is read, because
    the last query sees all keys but padding, under a causal mask too. The result is None when the mask is None.
    """
    if mask is None:
        return None
    last = mask[:, 0, -1, :size]
    return last if last.dtype == torch.bool else last == 0


def hides_only_padding(mask: Tensor | None, queries: int, size: int, causal: bool) -> bool:
    """Return whether `mask` [B, 1, S or 1, T or more], True or 0 where a key is seen, hides only padding and, if
    `causal`, keys later than the query (masks of packed sequences hide more). There are `queries` = S queries, the last
    of `size` = T positions. The answer is cached on the mask, which all layers share.
    """
    if mask is None or mask.shape[2] == 1 or mask.is_meta or isinstance(mask, FakeTensor):
        return True
    if torch.compiler.is_compiling():  # reading data would break the graph
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
