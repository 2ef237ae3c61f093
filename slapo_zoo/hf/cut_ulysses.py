"""Attention over cp by heads (DeepSpeed Ulysses, arXiv:2309.14509): each cp rank computes some heads of all tokens.

rewrite:  attention(q, k, v)  -->  tokens(attention(heads(q), heads(k), heads(v)))
          heads   [B, H, s, d] --> [B, H / n, n * s, d], an all-to-all over the n ranks of cp
          tokens  [B, n * s, H / n, d] --> [B, s, H, d], its inverse
"""

from collections.abc import Callable
from math import lcm
from typing import Any

from torch import Tensor, nn

from slapo_zoo.errors import MeshError, SlapoError
from slapo_zoo.hf.cut_gather import bias_of_all, grouped, repeated
from slapo_zoo.parallel.token_cut import TokenCut


def attend(
    cut: TokenCut, attention: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None,
    options: dict[str, Any], run: Callable[..., Any],
) -> Any:  # fmt: skip
    """Return (output [B, s, H, d], None or weights) of this cp rank's tokens for all H heads.

    `run(q, k, v, mask, options)` computes attention for the tokens of all n cp ranks and H / n heads. K KV heads that n
    does not divide are repeated as often as needed. q [B, H, s, d], k and v [B, K, t, d] are of this rank's tokens; the
    mask broadcasts to [B, 1 or H, n * s, n * t]. `attention` is transformers' module, `options` its further arguments.
    """
    require_heads(type(attention).__name__, q.shape[1], cut.n)
    own, tokens = k.shape[2], cut.n * q.shape[2]
    if mask is not None and mask.shape[-2] not in (1, tokens):
        problem = f"the mask is for {mask.shape[-2]} queries, expected {tokens} on cp={cut.n} ranks"
        raise SlapoError(type(attention).__name__, "cp > 1", problem, 'use cp_attention="gather"')
    if mask is not None and mask.shape[1] > 1:
        mask = cut.part(mask, 1)
    bias = bias_of_all(attention, options.get("position_bias"), own, cut.n * own)
    bias = cut.part(bias, 1) if bias is not None and bias.shape[1] > 1 else bias
    times = lcm(k.shape[1], cut.n) // k.shape[1]
    q, k, v = (cut.exchanged(x) for x in (q, repeated(k, times), repeated(v, times)))
    with grouped(attention, times):
        out, weights = run(q, k, v, mask, {**options, "position_bias": bias})
    return cut.exchanged(out), weights


def require_heads(where: str, heads: int, n: int) -> None:
    """Raise MeshError if cp = n does not divide the `heads` query heads of a rank; `where` names the attention."""
    if heads % n:
        fits = ", ".join(str(i) for i in range(1, heads + 1) if heads % i == 0)
        problem = f"cp={n} does not divide the {heads} heads of a rank"
        raise MeshError(where, 'cp_attention="ulysses"', problem, f'use cp_attention="gather", or cp among {fits}')  # fmt: skip
