"""Attention over all tokens of a row when each cp rank holds a part of them (context parallelism).

Queries reach the keys of other ranks in one of three ways: cut_gather.py, cut_ulysses.py, cut_ring.py. Mask, bias and
dropout equal those of a run without cp. Each rank makes its masks from the padding and positions of the whole row, which
are gathered; masks [S, T] are not. B batch size, s tokens of this rank, S = n * s tokens of a row, T keys.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from slapo_zoo.errors import SlapoError
from slapo_zoo.hf import cut_gather, cut_ring, cut_ulysses
from slapo_zoo.hf.attention_backends import implementation
from slapo_zoo.hf.padding import SKIPS
from slapo_zoo.parallel.known import known
from slapo_zoo.parallel.made_again import made_again
from slapo_zoo.parallel.token_cut import TokenCut, cut_now

# of rotary frequencies that depend on the longest position of the call
GROWING = ("dynamic", "longrope")
WAYS = {"gather": cut_gather.attend, "ulysses": cut_ulysses.attend, "ring": cut_ring.attend}


def attend(cut: TokenCut, *given: Any) -> tuple[Tensor, Any]:
    """Compute attention of this cp rank's tokens to all tokens; return (output [B, s, H, d], None or weights).

    Args:
        cut: number of cp ranks that shard the tokens of each row, this rank's index, and "gather", "ring" or "ulysses".
        given: in this order: the attention module of `transformers`; queries [B, H, s, d], keys, values [B, K, t, d] of
            this rank's tokens; mask or None; dict of further arguments of the attention function; function (q, k, v,
            mask, options) --> (output, weights) that computes attention.
    """
    if torch.compiler.is_compiling():
        problem = "compiled code would not gather the keys of the other ranks"
        hint = "leave the blocks uncompiled, or use cp=1"
        raise SlapoError("torch.compile", "cp > 1", problem, hint)
    mask, total = given[4], cut.n * given[2].shape[2]
    if mask is not None and mask.shape[-1] != total:
        problem = f"the mask is for {mask.shape[-1]} keys, expected {total} on cp={cut.n} ranks"
        raise SlapoError(type(given[0]).__name__, "cp > 1", problem, "use cp=1 for this model")
    return WAYS[cut.way](cut, *given)


def with_mask_again(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap transformers' sdpa attention so that autograd saves the bool mask, from which the backward makes the additive
    one (0 or -inf) again; otherwise each layer would save an additive mask.
    """

    def masked(
        attention: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any
    ) -> Any:
        if mask is None or mask.dtype != torch.bool or options.get("position_bias") is not None:
            return run(attention, q, k, v, mask, **options)
        for axis in range(mask.ndim - 2):
            mask = mask.narrow(axis, 0, 1) if mask.stride(axis) == 0 else mask
        make = partial(cut_gather.additive, mask, q.dtype)
        with made_again([(added := make(), make)]):
            return run(attention, q, k, v, added, **options)

    return masked


def over_all_tokens(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `make`, a mask function of `transformers`, for steps whose tokens are sharded over n cp ranks. The wrapper,
    called on rank r for its own s queries and t keys, all-gathers the padding mask over cp and returns the mask of
    these s queries (if attention is by heads, "ulysses", of all n * s queries) for all n * t keys; None if no mask is
    needed.

    rewrite:  make(q_length=s, kv_length=t, attention_mask=[B, t])  -->
              make(q_length=s, q_offset=r * s, kv_length=n * t, attention_mask=[B, n * t])
    """

    @wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        if (cut := cut_now()) is None:
            return make(*args, **kwargs)
        rows = kwargs["q_length"]
        padding = None if known().padded is False else kwargs.get("attention_mask")
        kwargs["kv_length"] *= cut.n
        if cut.by_heads:
            kwargs["q_length"] = cut.n * rows
        else:
            kwargs["q_offset"] = kwargs.get("q_offset", 0) + cut.r * rows
        if not cut.by_heads and padding is None:
            whole = {"q_length": cut.n * rows, "q_offset": 0, "device": "meta"}
            if make(*args, **{**kwargs, **whole}) is None:  # none is needed
                return None
        if padding is not None or not cut.by_heads:
            kwargs |= dict.fromkeys(SKIPS, False)
        kwargs["attention_mask"] = None if padding is None else cut.whole_of_numbers(padding, 1)
        return make(*args, **kwargs)

    return made


def with_all_positions(function: Callable[..., Any], argument: int) -> Callable[..., Any]:
    """Wrap `function`, whose argument number `argument` (from 0) is position ids, from which it finds the sequences
    packed in a row. In a step with cp > 1 the wrapper first all-gathers this rank's ids [B, s] over cp to [B, S].
    """

    @wraps(function)
    def told(*args: Any) -> Any:
        if (cut := cut_now()) is not None:
            whole = cut.whole_of_numbers(args[argument], 1)
            args = (*args[:argument], whole, *args[argument + 1 :])
        return function(*args)

    return told


def bias_by_place(attention: Any, stream: Any) -> None:
    """Replace the forward of a T5 attention by one that computes its relative bias [1, H, s, S] for this cp rank's s of
    all S tokens; with attention by heads (Ulysses), [1, H, S, S]. `stream`, the model's random stream, says in
    `stream.cut` how the running step shards tokens.
    """
    own = attention.forward

    @wraps(own)
    def forward(
        hidden_states: Tensor, mask: Tensor | None = None, key_value_states: Tensor | None = None,
        position_bias: Tensor | None = None, **options: Any,
    ) -> Any:  # fmt: skip
        cut, count = stream.cut, hidden_states.shape[1]
        if cut is not None and position_bias is None and attention.has_relative_attention_bias:
            total, at = cut.n * count, hidden_states.device
            places = (total, total, at) if cut.by_heads else (count, total, at, cut.r * count)
            position_bias = attention.compute_bias(*places)
        return own(hidden_states, mask, key_value_states, position_bias, **options)

    attention.forward = forward


def positions_by_place(embedding: Any, stream: Any) -> None:
    """Replace the forward of a position embedding of BART or Pegasus by one that counts from this cp rank's first token,
    not from 0. `stream`, the model's random stream, says in `stream.cut` how the running step shards tokens.
    """
    own = embedding.forward

    @wraps(own)
    def forward(
        tokens: Any, before: int = 0, position_ids: Tensor | None = None, **by_name: int
    ) -> Tensor:
        count = tokens.shape[1] if isinstance(tokens, Tensor) else tokens[1]
        first = 0 if stream.cut is None else stream.cut.r * count
        position_ids = None if position_ids is None else position_ids + first
        return own(tokens, sum(by_name.values(), before) + first, position_ids)

    embedding.forward = forward


def frequencies_by_length(rotary: Any, stream: Any) -> None:
    """Replace the forward of a rotary embedding whose frequencies depend on the longest position. The new forward
    all-gathers the position ids over cp, computes cosines and sines of all tokens, and returns those [B, s, d] of this
    rank's s tokens. `stream`, the model's random stream, says in `stream.cut` how the running step shards tokens.
    """
    own = rotary.forward

    @wraps(own)
    def forward(x: Tensor, position_ids: Tensor, *more: Any, **options: Any) -> Any:
        if (cut := stream.cut) is None:
            return own(x, position_ids, *more, **options)
        found = own(x, cut.whole_of_numbers(position_ids, 1), *more, **options)
        return tuple(cut.part(part, 1) for part in found)

    rotary.forward = forward


def scores_by_place(attention: Any, stream: Any) -> None:
    """Replace `_attn`, the method with which GPT-Neo and GPT-J compute scores, by one that sees all tokens of a row.

    With cp > 1 the new method all-gathers the keys and values [B, H, s, d], and lets the old one take this rank's rows
    of the causal mask; or if attention is by heads ("ulysses"), all-to-alls give it some heads of all tokens instead.
    `stream`, the model's random stream, says in `stream.cut` how the running step shards tokens.
    """
    own = attention._attn

    @wraps(own)
    def scored(query: Tensor, key: Tensor, value: Tensor, *mask: Any, **more: Any) -> Any:
        if (cut := stream.cut) is None:
            return own(query, key, value, *mask, **more)
        if cut.by_heads:
            scores, weights = own(*map(cut.exchanged, (query, key, value)), *mask, **more)
            return cut.exchanged(scores.transpose(1, 2)).transpose(1, 2), weights
        rows, total = query.shape[2], cut.n * key.shape[2]
        with _rows_of(attention, cut, rows, total), cut_gather.gathered(cut, key, value) as whole:
            return own(query, *whole, *mask, **more)

    attention._attn = scored


@contextmanager
def _rows_of(attention: Any, cut: TokenCut, rows: int, total: int) -> Iterator[None]:
    """Context in which the causal mask of a GPT-Neo or GPT-J attention, its buffer `bias` [1, 1, P, P], is replaced by
    one whose last `rows` rows are those of this cp rank's `rows` queries, because the attention always takes the last
    rows. `total` is the number of keys of all cp ranks.
    """
    whole = getattr(attention, "bias", None)
    if whole is not None:
        first = whole[:, :, : total - rows, :total]
        attention.bias = torch.cat([first, cut.part(whole[:, :, :total, :total], 2)], 2)
    try:
        yield
    finally:
        if whole is not None:
            attention.bias = whole


def follow_places(modules: Mapping[str, Any], stream: Any, positions: str) -> None:
    """Replace methods of modules that number tokens or compute scores themselves, so that the positions of this cp
    rank's tokens are those in the whole row.

    Args:
        modules: path --> module of a model.
        stream: random stream of the model, which says how the running step's tokens are sharded.
        positions: how the model positions its tokens: with "relative" (T5) position biases are replaced, with "placed"
            (BART) position embeddings. Scores (GPT-J) and length-dependent rotary embeddings are always replaced.
    """
    for path, module in modules.items():
        if positions == "relative" and hasattr(module, "compute_bias"):
            bias_by_place(module, stream)
        elif positions == "placed" and counts_by_place(path, module):
            positions_by_place(module, stream)
        elif any(kind in GROWING for kind in kinds_of_rope(module)):
            frequencies_by_length(module, stream)
        elif hasattr(module, "_attn"):
            config = getattr(module, "config", modules[""].config)
            config._attn_implementation = implementation("eager")  # for its masks
            scores_by_place(module, stream)


def kinds_of_rope(module: Any) -> tuple[str, ...]:
    """Return the `rope_type` of a rotary embedding, e.g. ("dynamic",), one per kind of layer; () for another module."""
    kinds = getattr(module, "rope_type", ())
    return tuple(kinds.values()) if isinstance(kinds, dict) else (kinds,) if kinds else ()


def counts_by_place(path: str, module: Any) -> bool:
    """Return whether the module at `path` is a position embedding that numbers its tokens from 0 itself (BART, Pegasus)."""
    takes = {*signature(module.forward).parameters} if path.endswith("embed_positions") else set()
    counts = takes & {"past_key_values_length", "cache_length"}  # the second from 5.24 on
    return bool(counts) and not takes & {"attention_mask", "inputs_embeds"}
