"""Kernel t5_attention: softmax(q k^T + bias) v, with T5's bias per distance of key and query; scores are unscaled.

B batch rows, S queries, T keys, H heads, D head dim.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slapo_zoo.dispatch.choose_kernel import runs_triton
from slapo_zoo.dispatch.kernel_registry import kernel
from slapo_zoo.kernels.blocked_attention import attention, cannot, in_one_piece
from slapo_zoo.kernels.dropout_mask import hides_only_padding, keys_of, mask_like, new_seeds

SHAPES = [(1, 2, 5, 5, 16, False), (2, 3, 37, 37, 8, True), (1, 2, 150, 150, 16, False),
          (2, 2, 9, 21, 16, False), (0, 2, 8, 8, 16, True)]  # fmt: skip


MATERIALISED = 1 << 25  # bytes of attention weights that a CPU keeps; beyond, memory is O(S + T)


def relative_buckets(
    distance: Tensor, bidirectional: bool, num_buckets: int = 32, max_distance: int = 128
) -> Tensor:
    """Return T5's bucket of each distance j - i of key j and query i: small distances have one each, then buckets widen
    up to `max_distance` (modeling_t5.py). With `bidirectional`, later and earlier keys have different buckets.
    """
    half = num_buckets // 2 if bidirectional else num_buckets
    exact = half // 2
    far = distance.abs() if bidirectional else -distance.clamp(max=0)
    # in fp32 and in this order of operations, so that buckets are those of transformers
    log = torch.log(far.float() / exact) / math.log(max_distance / exact) * (half - exact)
    large = (exact + log.clamp(min=0).long()).clamp(max=half - 1)
    bucket = torch.where(far < exact, far, large)
    return bucket + (distance > 0).long() * half if bidirectional else bucket


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor | None = None,
    bidirectional: bool = True,
    causal: bool = False,
    key_mask: Tensor | None = None,
    max_distance: int = 128,
    seeds: Tensor | None = None,
    p: float = 0.0,
) -> Tensor:
    """Compute T5's attention [B, H, S, D] with its position bias in torch operations (modeling_t5.py:
    T5Attention). `weight` [buckets, H] has a bias per bucket of distances; arguments are those of `t5_attention`.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.transpose(-1, -2)).to(wide)
    S, T = scores.shape[-2:]
    if weight is not None:
        i, j = (
            torch.arange(S, device=q.device)[:, None] + (T - S if causal else 0),
            torch.arange(T, device=q.device),
        )
        buckets = relative_buckets(j - i, bidirectional, len(weight), max_distance)
        scores = scores + weight[buckets].permute(2, 0, 1).to(wide)
    if causal:
        seen = torch.ones(S, T, dtype=torch.bool, device=q.device).tril(T - S)
        scores = scores.masked_fill(~seen, torch.finfo(wide).min)
    if key_mask is not None:
        scores = scores.masked_fill(~key_mask[:, None, None], torch.finfo(wide).min)
    weights = scores.softmax(-1).to(v.dtype)
    mask = mask_like(weights, None, seeds, p)
    return (weights if mask is None else weights * mask) @ v


def inputs(B: int, H: int, S: int, T: int, D: int, causal: bool, **like: Any) -> dict[str, Any]:
    """Return random arguments for q [B, H, S, D] with dropout; the first row has padding. `like` holds dtype and device."""
    q, k, v = (torch.randn(B, H, n, D, **like) for n in (S, T, T))
    real = torch.tensor([[T - T // 4]] + [[T]] * (B - 1))[:B].to(q.device)
    seeds = torch.randint(2**63 - 1, (B * H,), device=like.get("device"))
    return {"q": q / 2, "k": k / 2, "v": v, "weight": torch.randn(32, H, **like), "causal": causal,
            "bidirectional": not causal, "key_mask": torch.arange(T, device=q.device) < real,
            "seeds": seeds, "p": 0.25}  # fmt: skip


def _forward(
    module: Any,
    hidden_states: Tensor,
    mask: Tensor | None = None,
    key_value_states: Tensor | None = None,
    position_bias: Tensor | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None, None]:
    """Run T5Attention.forward (same arguments) with this kernel; return (output, weight, None). T5's `weight`
    [buckets, H] goes to the next layer as `position_bias`, in place of the bias [1, H, S, T] that T5 makes from it.

    The class's own forward runs for packed sequences, for masks under a compiler, if a cache holds tokens, and if
    `position_bias` is [1, H, S, T]; in the last case, and in a first layer with a cache, that bias is returned.
    """
    cache = kwargs.pop("past_key_values", cache)  # its name before transformers 5.24
    held = cache is not None and cache.get_seq_length(module.layer_idx)
    source = hidden_states if key_value_states is None else key_value_states
    causal = module.is_causal and key_value_states is None
    S, T = hidden_states.shape[1], source.shape[1]
    table = position_bias
    if table is None and module.has_relative_attention_bias:
        # a copy: an engine may free a gathered weight before the next layer reads it
        table = module.relative_attention_bias.weight.clone()
    made = position_bias is not None and position_bias.ndim == 4
    scaled = getattr(module, "scaling", 1.0) != 1.0
    if made or held or scaled or not hides_only_padding(mask, S, T, causal):
        own = partial(type(module).forward, module, hidden_states, mask, key_value_states)
        if made or (position_bias is None and cache is not None):
            return own(position_bias, cache, **kwargs)
        bias = None if table is None else _bias_of(module, table, S, T + (held or 0))
        out, _, *others = own(bias, cache, **kwargs)
        return out, table, *others
    q = _heads(module, module.q(hidden_states))
    k, v = _heads(module, module.k(source)), _heads(module, module.v(source))
    if cache is not None:
        k, v = _remember(module, cache, k, v, key_value_states is not None)
    out = t5_attention(
        q, k, v, table, not module.is_decoder, causal,
        keys_of(mask, k.shape[2]), module.relative_attention_max_distance,
        **(_dropout(module, q, k) if module.training else {}),
    )  # fmt: skip
    return module.o(out.transpose(1, 2).flatten(2)), table, None


def _bias_of(module: Any, table: Tensor, S: int, T: int) -> Tensor:
    """Return T5's bias [1, H, S, T] for the last S of T positions, made from T5Attention's weight `table` [buckets, H]."""
    i, j = (torch.arange(n, T, device=table.device) for n in (T - S, 0))
    far = module.relative_attention_max_distance
    bucket = relative_buckets(j - i[:, None], not module.is_decoder, len(table), far)
    return table[bucket].permute(2, 0, 1)[None]


def _heads(module: Any, x: Tensor) -> Tensor:
    return x.view(*x.shape[:-1], -1, module.key_value_proj_dim).transpose(1, 2)


def _remember(module: Any, cache: Any, k: Tensor, v: Tensor, cross: bool) -> tuple[Tensor, Tensor]:
    """Append k and v [B, H, T, D] to a `cache` of transformers; return all of this layer's (keys, values) in it. With
    `cross`, an EncoderDecoderCache stores them as those of cross-attention, to be reused in later calls.
    """
    from transformers import EncoderDecoderCache

    if isinstance(cache, EncoderDecoderCache):
        if cross:
            cache.is_updated[module.layer_idx] = True
        cache = cache.cross_attention_cache if cross else cache.self_attention_cache
    return cache.update(k, v, module.layer_idx)


def _dropout(module: Any, q: Tensor, k: Tensor) -> dict[str, Any]:
    """Return the kernel's dropout arguments, {"keep": mask} or {"seeds": seeds, "p": p}; {} without dropout.

    If the T5Attention `module` has the child `core_attn`, which slapo_zoo adds so that dropout is the same on every mesh,
    the random stream of that child draws the mask or the seeds; otherwise torch's generator draws new seeds.
    """
    (B, H, S, _), core = q.shape, module._modules.get("core_attn")
    if core is None or not module.dropout:
        return new_seeds(B * H, module.dropout, q.device)
    weights = q.detach().new_empty(()).expand(B, H, S, k.shape[2])
    return core.stream.drawn(weights, module.dropout, core.site, part=(core.heads,))


@kernel(
    "t5_attention", reference, inputs, SHAPES, cpu="blocks of queries",
    serves={"T5Attention": _forward, "MT5Attention": _forward}, limits=cannot,
    passes=("relative_attention_bias",),
)  # fmt: skip
def t5_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor | None = None,
    bidirectional: bool = True,
    causal: bool = False,
    key_mask: Tensor | None = None,
    max_distance: int = 128,
    keep: Tensor | None = None,
    seeds: Tensor | None = None,
    p: float = 0.0,
) -> Tensor:
    """Compute T5's attention [B, H, S, D] of q [B, H, S, D] to k, v [B, H, T, D], with deterministic gradients, in O(S
    + T) memory; without Triton, small inputs keep all attention weights. `weight` [buckets, H] is that of
    `relative_attention_bias`, None in cross-attention. With `bidirectional` (the encoder) later and earlier keys have
    different buckets; distances past `max_distance` share one. With `causal` (the decoder) the queries are the last S
    of T positions and see no later key. `key_mask` [B, T] is False where a key is padding. The dropout mask is `keep`
    [B, H, S, T], of 0 and 1/(1-p), or if that is None hashed with probability `p` from `seeds`, int64 [B * H].
    """
    table, classes = None, None
    if weight is not None:
        S, T = q.shape[2], k.shape[2]
        table, classes = _by_class(
            weight, S, T, T - S if causal else 0, bidirectional, max_distance
        )
    size = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * q.dtype.itemsize
    if not runs_triton("t5_attention", q) and size <= MATERIALISED:
        return in_one_piece(q, k, v, 1.0, causal, 0, table, classes, key_mask, keep, seeds, p)
    args = (table, classes, key_mask, keep, seeds, p, False)
    return attention(q, k, v, 1.0, causal, 0, *args)


def _by_class(
    weight: Tensor, S: int, T: int, offset: int, bidirectional: bool, max_distance: int
) -> tuple[Tensor, Tensor]:
    """Return (table [H, buckets], int32 [S + T - 1]). Element j - i + S - 1 of the second is the column of the table
    for key j and query i, which has position i + `offset`. `weight` is T5's bias table [buckets, H], whose buckets are
    sorted so that columns ascend with j - i. With `bidirectional`, later keys have own buckets; distances past
    `max_distance` share one.
    """
    n = weight.shape[0]
    distance = torch.arange(S + T - 1, device=weight.device) - (S - 1 + offset)
    bucket = relative_buckets(distance, bidirectional, n, max_distance)
    half = n // 2 if bidirectional else n
    order = torch.arange(n, device=weight.device)
    order = torch.where(order < half, half - 1 - order, order)  # its own inverse
    return weight[order].t().contiguous(), order[bucket].to(torch.int32)
