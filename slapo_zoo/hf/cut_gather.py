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


def attend(
    cut: TokenCut, attention: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None,
    options: dict[str, Any], run: Callable[..., Any],
) -> Any:  # fmt: skip
    """Return what `run(q, k, v, mask, options)` returns for this rank's queries and the keys of all cp ranks.

    The arguments are those of `cut_attention.attend`; mask: broadcasts to [B, 1, s, n * t], n is cp.
    """
    own, causal = k.shape[2], options.get("is_causal")
    causal = getattr(attention, "is_causal", True) if causal is None else causal
    if mask is None and causal:
        mask = _causal(cut, q, cut.n * own)
    bias = bias_of_all(attention, options.get("position_bias"), own, cut.n * own)
    options = {**options, "is_causal": False, "position_bias": bias}
    groups = 1 if mask is None else q.shape[1] // k.shape[1]
    with grouped(attention, groups), gathered(cut, k, v, groups) as whole:
        return run(q, *whole, mask, options)


@contextmanager
def gathered(cut: TokenCut, k: Tensor, v: Tensor, groups: int = 1) -> Iterator[list[Tensor]]:
    """Context with keys and values [B, K * groups, n * t, d] of all ranks, which autograd does not save.

    `k` and `v` [B, K, t, d] are those of this rank's tokens; each of their heads is repeated `groups` times.
    """
    whole = [repeated(cut.whole(x, 2), groups) for x in (k, v)]
    again = [partial(_gathered, cut, x.detach(), groups) for x in (k, v)]
    with made_again(list(zip(whole, again, strict=True))):
        yield whole


def repeated(x: Tensor, groups: int) -> Tensor:
    """Return x [B, K, T, d] with each head repeated `groups` times in a row, [B, K * groups, T, d]."""
    return x.repeat_interleave(groups, 1) if groups > 1 else x


def _gathered(cut: TokenCut, x: Tensor, groups: int) -> Tensor:
    """Return x [B, K, t, d] all-gathered over cp, each head repeated `groups` times in a row; without gradient."""
    with torch.no_grad():
        return repeated(cut.whole_of_numbers(x, 2), groups)


@contextmanager
def grouped(attention: Any, times: int) -> Iterator[None]:
    """Context in which an attention of `transformers` takes KV heads that are repeated already, each `times` times."""
    name = "num_key_value_groups"
    groups = getattr(attention, name, None)
    if groups is not None:
        setattr(attention, name, groups // times)
    try:
        yield
    finally:
        if groups is not None:
            setattr(attention, name, groups)


def _causal(cut: TokenCut, q: Tensor, total: int) -> Tensor:
    """Return the causal mask [s, T] of this cp rank's queries and all T keys, `total`; `cut` says which rank."""
    rows = torch.arange(q.shape[2], device=q.device) + cut.r * q.shape[2]
    return rows[:, None] >= torch.arange(total, device=q.device)


def bias_of_all(attention: Any, bias: Tensor | None, own: int, total: int) -> Tensor | None:
    """Return the position bias `bias` if it is None or for all `total` keys; raise SlapoError otherwise. A T5 layer
    (`attention`) without a bias of its own makes zeros for the `own` keys of this rank: they become None.
    """
    if bias is None or bias.shape[-1] == total:
        return bias
    if bias.shape[-1] == own and not attention.has_relative_attention_bias:
        return None
    problem = f"the position bias is for {bias.shape[-1]} keys, expected {total}"
    raise SlapoError(type(attention).__name__, "cp > 1", problem, "use cp=1 for this model")
