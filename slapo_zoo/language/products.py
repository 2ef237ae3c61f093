"""Classify torch operators: matrix products, convolutions and attentions, with sizes, flops and bytes."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


class Product(NamedTuple):
    """Sizes and cost of a batch of matrix products [m, k] x [k, n], or of a fused attention (n = 0).

    Args:
        batch: number of products; for an attention, batch size times heads.
        m: rows of the first matrix; for an attention, queries.
        n: columns of the second matrix; 0 for a fused attention.
        k: length of the summed axis; for an attention, keys.
        flops: floating-point operations of the whole batch.
        moved: bytes read and written by the whole batch.
    """

    batch: float
    m: float
    n: float
    k: float
    flops: float
    moved: float


def product_of(func: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> Product | None:
    """Return the matrix product, convolution or attention that an operator call computes, or None."""
    packet = func._overloadpacket
    is_attention = "scaled_dot_product" in str(packet)
    if packet not in flop_registry and not is_attention:
        return None
    tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)]
    moved = float(sum(t.numel() * t.itemsize for t in tensors))
    if is_attention:
        back = "backward" in str(packet)
        query, key = args[1 if back else 0], args[2 if back else 1]
        flops = (10.0 if back else 4.0) * query.numel() * key.shape[-2]
        batch = math.prod(query.shape[:-2])
        return Product(batch, query.shape[-2], 0, key.shape[-2], flops, moved)
    flops = float(flop_registry[packet](*args, **kwargs, out_val=out))
    found = next(t for t in tree_leaves(out) if isinstance(t, Tensor))
    if found.ndim == 3:
        batch, m, n = found.shape
    else:  # a convolution: one row per output position
        batch, n = 1, found.shape[1] if found.ndim > 1 else 1
        m = found.numel() / max(n, 1)
    k = flops / (2.0 * batch * m * n) if flops else 0.0
    return Product(batch, m, n, k, flops, moved)
