"""Attention over cp by gathered keys and values: queries stay with their rank, which sees the keys of all ranks.

rewrite:  attention(q, k, v)  -->  attention(q, all_gather(k), all_gather(v))

Autograd saves the keys and values of this rank; the backward gathers them again, and reduce-scatters their gradients.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from slapo_zoo.errors import SlapoError
from slapo_zoo.parallel.made_again import made_again
from slapo_zoo.parallel.token_cut import TokenCut

RUN = 2048  # queries; each run adds gradients of all keys, which costs time where runs are short


def attend(
    cut: TokenCut, attention: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None,
    options: dict[str, Any], run: Any,
) -> Any:  # fmt: skip
    """Return (output [B, s, H, d], weights as `run` returns them, or None) of this rank's queries over the keys of all
    n cp ranks, which call this together. q [B, H, s, d], k and v [B, K, t, d] are of this rank's tokens, as many on
    each rank (`cut`: how tokens are sharded); the mask broadcasts to [B, 1, s, n * t]. `attention` is transformers'
    module, `options` its further arguments; `run`, an OverKeys, computes attention (q, k, v, mask, options) locally.
    """
    own, causal = k.shape[2], options.get("is_causal")
    causal = getattr(attention, "is_causal", True) if causal is None else causal
    bias = bias_of_all(attention, options.get("position_bias"), own, cut.n * own)
    options = {**options, "is_causal": False, "position_bias": bias}
    causal, first = causal and mask is None, cut.r * q.shape[2]
    in_runs = causal and bias is None and not run.dropout
    if causal and not in_runs:
        mask = _seen(first, q.shape[2], cut.n * own, q.device)
    groups = q.shape[1] // k.shape[1] if causal or mask is not None else 1
    with grouped(attention, groups), gathered(cut, k, v, groups) as (keys, values):
        if in_runs:
            return _in_runs(first, q, keys, values, options, run)
        return run(q, keys, values, mask, options)


def _in_runs(
    first: int, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], run: Callable[..., Any]
) -> Any:
    """Compute causal attention of q [B, H, s, d] to k, v [B, H, T, d] of all cp ranks by calls of
    `run(q, k, v, mask, options)` for max(2048, H * d) queries each, so that a mask is about as large as the keys of a
    row; the backward makes each mask again. Return (output [B, s, H, d], weights of the last call only, which are None
    but for eager attention). `first` is the position in the row of this rank's first query.
    """
    found, weights = [], None
    for rows in q.split(max(k.shape[1] * k.shape[3], RUN), 2):
        hides = lambda dtype, *given: additive(_seen(*given), dtype)  # noqa: E731
        make = partial(hides, q.dtype, first, rows.shape[2], k.shape[2], q.device)
        with made_again([(mask := make(), make)]):
            out, weights = run(rows, k, v, mask, options)
        found.append(out)
        first += rows.shape[2]
    return found[0] if len(found) == 1 else torch.cat(found, 1), weights


@contextmanager
def gathered(cut: TokenCut, k: Tensor, v: Tensor, groups: int = 1) -> Iterator[list[Tensor]]:
    """Context that yields [keys, values] of all n cp ranks, each [B, K * groups, n * t, d]: each head is followed by
    its `groups` - 1 copies. Of operations in the context autograd saves only `k` and `v` [B, K, t, d] of this rank's
    tokens; the backward gathers the others again.
    """
    whole = [repeated(cut.whole(x, 2), groups) for x in (k, v)]
    again = [partial(_gathered, cut, x.detach(), groups) for x in (k, v)]
    with made_again(list(zip(whole, again, strict=True))):
        yield whole


def repeated(x: Tensor, groups: int) -> Tensor:
    """Return x [B, K, T, d] as [B, K * groups, T, d]: each head is followed by its `groups` - 1 copies."""
    return x.repeat_interleave(groups, 1) if groups > 1 else x


def _gathered(cut: TokenCut, x: Tensor, groups: int) -> Tensor:
    """All-gather x [B, K, t, d] over n cp ranks, repeat each head `groups` times: [B, K * groups, n * t, d], no gradient."""
    with torch.no_grad():
        return repeated(cut.whole_of_numbers(x, 2), groups)


@contextmanager
def grouped(attention: Any, times: int) -> Iterator[None]:
    """Context with `attention.num_key_value_groups` divided by `times`, as each KV head was repeated `times` times."""
    name = "num_key_value_groups"
    groups = getattr(attention, name, None)
    if groups is not None:
        setattr(attention, name, groups // times)
    try:
        yield
    finally:
        if groups is not None:
            setattr(attention, name, groups)


def _seen(first: int, queries: int, total: int, device: torch.device) -> Tensor:
    """Return the causal bool mask [queries, total] for queries whose positions among the `total` keys begin at `first`."""
    rows = torch.arange(first, first + queries, device=device)
    return rows[:, None] >= torch.arange(total, device=device)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bool mask as torch's sdpa adds it to scores: 0 where it is True, else minus infinity."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def bias_of_all(attention: Any, bias: Tensor | None, own: int, total: int) -> Tensor | None:
    """Return the position bias [1, H, s, total] of a T5 layer `attention` for the `total` keys of all cp ranks: `bias`
    itself if it is for these. If `bias` is for this rank's `own` keys, return None if it holds zeros, as in a layer
    without bias weights; else raise SlapoError. None is returned as is.
    """
    if bias is None or bias.shape[-1] == total:
        return bias
    if bias.shape[-1] == own and not attention.has_relative_attention_bias:
        return None
    problem = f"the position bias is for {bias.shape[-1]} keys, expected {total}"
    raise SlapoError(type(attention).__name__, "cp > 1", problem, "use cp=1 for this model")
