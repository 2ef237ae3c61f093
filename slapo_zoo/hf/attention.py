"""Attention function for `transformers`: it calls an attention module's child `core_attn`, or sdpa if there is none."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slapo_zoo.errors import SlapoError
from slapo_zoo.hf.attention_backends import BACKENDS, find_backend, implementation
from slapo_zoo.hf.cut_attention import (
    attend,
    over_all_tokens,
    with_all_positions,
    with_mask_again,
)
from slapo_zoo.hf.padding import mask_without_wait, packing_without_wait
from slapo_zoo.parallel.known import known
from slapo_zoo.parallel.rng.layout_independent_random import RandomStream, dropout
from slapo_zoo.parallel.rng.stream_position import SiteName

ATTRIBUTE = "core_attn"
CACHES = ("past_key_values", "cache", "cache_params")  # arguments; 5.24 renames the first


def register_attention() -> None:
    """Register slapo_zoo's attention and mask functions with `transformers`, one of each per attention back end.

    Without a mask function of the same name `transformers` would pass None as mask and ignore padding.
    """
    from transformers import AttentionInterface, masking_utils
    from transformers.masking_utils import AttentionMaskInterface

    find = masking_utils.find_packed_sequence_indices
    if not hasattr(find, "__wrapped__"):
        found = with_all_positions(packing_without_wait(find), 0)
        masking_utils.find_packed_sequence_indices = found
        name = "remap_positions_for_packed_sequence"  # in transformers from 5.23 on
        if apart := getattr(masking_utils, name, None):
            setattr(masking_utils, name, with_all_positions(apart, 1))
    for name, backend in BACKENDS.items():
        AttentionInterface.register(implementation(name), _attention)
        masks: Any = AttentionMaskInterface()
        make = masks[backend.mask]
        make = mask_without_wait(make) if backend.mask in ("sdpa", "eager") else make
        AttentionMaskInterface.register(implementation(name), over_all_tokens(make))


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
):  # the names are transformers', since some callers pass them by name
    core, given = module._modules.get(ATTRIBUTE), (query, key, value, attention_mask)
    if core is None:
        return sdpa(module, *given, **kwargs)
    return core(*given, attention=module, **kwargs)


def sdpa(attention: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any):
    """Return (output [B, S, H, d], None) of attention by transformers' sdpa for q [B, H, S, d] and k, v [B, K, T, d];
    if kwargs["softcap"] bounds scores, which sdpa cannot, by a CoreAttention made for this call.
    """
    if kwargs.get("softcap") is not None:  # capped scores without a core_attn
        if attention.training and kwargs.get("dropout"):
            problem = f"dropout={kwargs['dropout']} with capped scores (softcap) needs a child core_attn of this module"
            hint = "set the config's attention dropout to 0, or add that child by schedule[path of the module].core_attention(num_heads=...)"
            raise SlapoError("attention", type(attention).__name__, problem, hint)
        core = CoreAttention(RandomStream(), ATTRIBUTE, ()).eval()
        return core(q, k, v, mask, attention=attention, **kwargs)
    return BACKENDS["sdpa"].run(attention, q, k, v, mask, **kwargs)


@dataclass(frozen=True)
class DeviceDropout:
    """Attention and dropout kernels that make dropout masks from seeds; the attention keeps no scores in memory.

    Args:
        serves: function: (q, attention mask, number of keys, True if a CPU generator draws dropout masks, False if they
            are hashes of seeds) --> True if `attention` supports these arguments and is the faster choice for them.
        attention: function: (q, k, v, attention mask, causal, scaling, seeds [B * H], p, drawn, places) --> output
            [B, S, H, d]. `drawn` is 0 if dropout masks are hashed; else a generator draws them for rows of `drawn`
            tokens, and `places` [S] has the indices in such a row of the S tokens left without padding, or is None.
        plain: function: (x, seeds=, p=) --> x after dropout.
    """

    serves: Callable[[Tensor, Tensor | None, int, bool], bool]
    attention: Callable[..., Tensor]
    plain: Callable[..., Tensor]


class CoreAttention(nn.Module):
    """Module that computes softmax(q k^T * scaling + mask) v; dropout depends on a head's index in the unsharded model.

    Args:
        stream: the model's RandomStream, which makes the dropout masks or their seeds.
        site: name, usually the path of this module, that with the stream's seed, step and rows determines the masks.
        heads: indices in the unsharded model of this rank's query heads; empty: this rank has all heads.
        backend: name of the attention back end (see `attention_backends`) for calls without dropout.
        device: a `DeviceDropout`, kernels that make dropout masks from seeds; None: masks are always made as tensors.
    """

    def __init__(
        self, stream: RandomStream, site: str | SiteName, heads: Sequence[int], backend: str = "sdpa",
        device: DeviceDropout | None = None,
    ):  # fmt: skip
        super().__init__()
        self.stream, self.site, self.heads = stream, SiteName(site), heads
        self.name, self.backend = backend, find_backend(backend)
        self.device_dropout = device

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        attention: nn.Module,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """Return (output [B, S, H, d], attention weights or None, as the back end returns them).

        Args:
            q: queries [B, H, S, d].
            k: keys [B, K, T, d]; K, the number of KV heads, divides H.
            v: values [B, K, T, d].
            mask: broadcasts to [B, 1, S, T]; bool (True is visible) or additive; or None.
            attention: the attention module of `transformers`.
            dropout: probability that an attention weight becomes 0.
            scaling: factor of the scores; None is d ** -0.5.
            **kwargs: further arguments of the back end, e.g. `position_bias`, `softcap`, `is_causal`.
        """
        if not self.heads:
            self.heads = range(q.shape[1])
        if self.stream.real_tokens is not None:
            return self._within_rows(q, k, v, attention, dropout, scaling), None
        run = OverKeys(self, attention, dropout if self.training else 0.0, scaling)
        if self.stream.cut is not None:
            return attend(self.stream.cut, attention, q, k, v, mask, kwargs, run)
        return run(q, k, v, mask, kwargs)

    def over_keys(
        self, attention: nn.Module, dropout: float, scaling: float | None,
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any],
    ) -> tuple[Tensor, Any]:  # fmt: skip
        """Return (output [B, S, H, d], weights or None) of attention with H query heads q [B, H, S, d] over K key heads
        k, v [B, K, T, d], whose T tokens may be those of all cp ranks. `mask`, bool or additive, broadcasts to
        [B, 1, S, T]. `attention` is transformers' module, `options` are further arguments of the back end.
        """
        bias, cap = options.get("position_bias"), options.get("softcap")
        if not dropout and (cap is None or self.name != "sdpa"):  # sdpa cannot cap (Gemma 2)
            run = self.backend.run
            if self.stream.cut is not None and self.name == "sdpa":
                run = with_mask_again(run)
            return run(attention, q, k, v, mask, dropout=0.0, scaling=scaling, **options)
        if not self.backend.drops:
            problem = f"this backend draws other dropout masks on each rank: dropout={dropout}"
            hint = "set the config's attention dropout to 0, or use sdpa or eager"
            raise SlapoError(str(self.site), f"attention={self.name!r}", problem, hint)
        scaling = q.shape[-1] ** -0.5 if scaling is None else scaling
        causal = options.get("is_causal")
        causal = getattr(attention, "is_causal", True) if causal is None else causal
        return self._dropped(q, k, v, mask, bias, dropout, scaling, causal, cap), None

    def _within_rows(
        self, q: Tensor, k: Tensor, v: Tensor, attention: nn.Module, p: float, scaling: float | None
    ) -> Tensor:
        """Return attention [1, S, H, d] of q [1, H, S, d] and k, v [1, K, S, d], in which the S tokens of all batch
        rows that are no padding follow one another: `self.stream.real_tokens` [B, tokens] is True for these. A token
        sees its own row only. `attention` is transformers' module, `p` the dropout probability, `scaling` the scores'
        factor.
        """
        real: Any = self.stream.real_tokens
        p = p if self.training else 0.0
        scale = q.shape[-1] ** -0.5 if scaling is None else scaling
        device: Any = self.device_dropout
        if self.stream.hashes(q.device) and device and (p or device.serves(q, None, 0, False)):
            return self._among_padding(device, q, k, v, p, scale)
        seeds: Any = self.stream.found(q.device, self.site, len(real), self.heads) if p else None
        found, start, (H, S) = [], 0, (q.shape[1], real.shape[1])
        for row, count in enumerate(known().real or real.sum(1).tolist()):
            q_row, k_row, v_row = (x[:, :, start : start + count] for x in (q, k, v))
            start += count
            if p:
                first = bool(real[row, :count].all())  # padding comes only after real tokens
                places = None if first else real[row].nonzero()[:, 0]
                mine = seeds[row * H : (row + 1) * H]
                args = (q_row, k_row, v_row, None, False, scale, mine, p, S, places)
                found.append(device.attention(*args))
            else:
                options = {"dropout": 0.0, "scaling": scale, "is_causal": False}
                found.append(self.backend.run(attention, q_row, k_row, v_row, None, **options)[0])
        return torch.cat(found, 1)

    def _among_padding(
        self, device: DeviceDropout, q: Tensor, k: Tensor, v: Tensor, p: float, scaling: float
    ) -> Tensor:
        """Return what `_within_rows` does, without row lengths on the host: q, k, v [1, H, S, d], the tokens of all
        batch rows without padding, are moved to padded rows [B, H, tokens, d] by `self.stream.real_at`, and back after
        the kernel `device.attention` has computed them. `p` is the dropout probability, `scaling` the factor of the
        scores.
        """
        real: Any = self.stream.real_tokens
        at: Any = self.stream.real_at

        def padded(x: Tensor) -> Tensor:
            tokens = x[0].transpose(0, 1)
            whole = tokens.new_zeros((real.numel(), *tokens.shape[1:])).index_copy(0, at, tokens)
            return whole.view(*real.shape, *tokens.shape[1:]).transpose(1, 2)

        groups = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (k, v))
        q, k, v = padded(q), padded(k), padded(v)
        seeds = self.stream.seeds(q, self.site, self.heads) if p else None
        out = device.attention(q, k, v, real[:, None, None], False, scaling, seeds, p)
        return out.flatten(0, 1).index_select(0, at)[None]

    def _dropped(self, q, k, v, mask, bias, p, scaling, causal, cap) -> Tensor:
        """Return attention [B, S, H, d] of q [B, H, S, d] and k, v [B, K, T, d] with dropout masks of the model's
        random stream, which torch's fused attention cannot take. `p` is the dropout probability; scores are multiplied
        by `scaling`, added to `bias`, and bounded to cap * tanh(scores / cap) by `cap`. `mask`, bool or additive,
        broadcasts to [B, 1, S, T]; if None, `causal` hides later keys. `bias` and `cap` may be None.
        """
        groups = q.shape[1] // k.shape[1]
        if groups > 1:
            k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        S, T = q.shape[-2], k.shape[-2]
        drawn, device = self.stream.draws_in_blocks(q.device), self.device_dropout
        by_seeds = drawn or self.stream.hashes(q.device)
        if mask is None and causal and 1 < S != T:
            mask = torch.ones(S, T, dtype=torch.bool, device=q.device).tril()
        causal = mask is None and causal
        explicit = bias is not None or cap is not None or (drawn and p >= 1.0)
        explicit = explicit or q.shape[-1] != v.shape[-1]
        explicit = explicit or self.stream.cut is not None  # masks of this rank's queries or heads
        if by_seeds and device and not explicit and device.serves(q, mask, T, drawn):
            seeds = self.stream.seeds(q, self.site, self.heads)
            return device.attention(q, k, v, mask, causal, scaling, seeds, p, T if drawn else 0)
        if causal and S > 1:
            mask = torch.ones(S, T, dtype=torch.bool, device=q.device).tril()
        if mask is not None:
            mask = additive(mask[..., :T], q.dtype)
        scores = (q * scaling) @ k.transpose(-1, -2)
        scores = scores if bias is None else scores + bias
        scores = scores if cap is None else (scores / cap).tanh() * cap
        scores = scores if mask is None else scores.add_(mask)
        probabilities = scores.softmax(-1)  # in fp32 inside, also for bf16 scores
        if device and p and self.stream.hashes(q.device):
            seeds = self.stream.seeds_of_queries(probabilities, self.site, self.heads)
            probabilities = device.plain(probabilities, seeds=seeds, p=p)
        else:
            probabilities = dropout(probabilities, p, self.stream, self.site, self.heads)
        return (probabilities @ v).transpose(1, 2).contiguous()


@dataclass(frozen=True, eq=False)  # the compiler of torch < 2.13 hashes it before it has fields
class OverKeys:
    """Function (q, k, v, mask, options) --> (output, weights or None): the attention `core` with the arguments that are
    fixed in a call of a layer. With cp > 1 it is called with the keys of other ranks too. `attention` is transformers'
    module, `dropout` the probability that a weight becomes 0, `scaling` the factor of the scores (None: d ** -0.5).
    """

    core: CoreAttention
    attention: nn.Module
    dropout: float
    scaling: float | None

    def __call__(self, *given: Any) -> tuple[Tensor, Any]:
        """Return (output [B, S, H, d], attention weights or None) for `given`: queries [B, H, S, d], keys and values
        [B, K, T, d], attention mask or None, dict of further arguments of the back end (is_causal, softcap, ...).
        """
        return self.core.over_keys(self.attention, self.dropout, self.scaling, *given)

    def mask_again(self, x: Tensor) -> Callable[[], Tensor] | None:
        """Return a function that draws this call's dropout mask, 0 and 1, in shape and dtype of attention weights x
        [B, H, s, T], the same mask each time, so that a backward can draw it again; None without dropout.
        """
        core = self.core
        if not self.dropout:
            return None
        return core.stream.queries_again(x, self.dropout, core.site, core.heads)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an attention mask as a tensor to add to scores; False in a bool mask becomes the lowest number of `dtype`."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(
        ~mask, torch.finfo(dtype).min
    )
