"""Replacements of `transformers` methods that make the host wait for the device in each layer or forward.

The originals copy a Python number into a tensor on the device, and the host waits for that copy.
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn


def without_waits(model: nn.Module) -> None:
    """Replace methods that make the host wait for the device, in a model's modules, by ones that compute the same. A
    method that somebody has patched, on the class or on a module, is left alone.
    """
    for module in model.modules():
        name, method = METHODS.get(type(module).__name__, ("", None))
        if method is not None and name not in vars(module) and _is_of_its_file(module, name):
            setattr(module, name, MethodType(method, module))


def _is_of_its_file(module: nn.Module, name: str) -> bool:
    """Return whether method `name` of a `transformers` module is unpatched: defined in the file of the module's class."""
    cls = type(module)
    own: Any = vars(cls).get(name)
    return (
        cls.__module__.startswith("transformers.")
        and getattr(own, "__module__", "") == cls.__module__
    )


def _gpt_neo_attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (output [B, H, S, d], attention weights [B, H, S, T]) as GPTNeoSelfAttention._attn does, for an additive
    `mask`. The original copies the lowest number, the score of hidden keys, to the device, for which the host waits.
    """
    scores = q.float() @ k.float().transpose(-1, -2)
    S, T = scores.shape[-2:]
    scores = torch.where(module.bias[:, :, T - S : T, :T], scores, torch.finfo(scores.dtype).min)
    scores = scores if mask is None else scores + mask
    weights = module.attn_dropout(scores.softmax(-1).to(v.dtype))
    return weights @ v, weights


def _deberta_positions(
    module: Any, hidden: Tensor, queries: Tensor | None = None, given: Tensor | None = None
) -> Tensor | None:
    """Return the relative positions [1, S, T] of S queries and T keys, as DebertaV2Encoder.get_rel_pos does: their
    distances, long ones in logarithmic buckets; `given` if it is not None; None without relative attention. `hidden`
    [B, T, D] and `queries` [B, S, D] (None: `hidden`) tell only T and S.
    """
    if given is not None or not module.relative_attention:
        return given
    S, T = (hidden if queries is None else queries).shape[-2], hidden.shape[-2]
    distance = torch.arange(S, device=hidden.device)[:, None] - torch.arange(
        T, device=hidden.device
    )
    size, most = module.position_buckets, module.max_relative_positions
    found = _in_buckets(distance, size // 2, most) if size > 0 and most > 0 else distance
    return found.long()[None]


def _in_buckets(distance: Tensor, mid: int, most: int) -> Tensor:
    """Return DeBERTa's bucket of each signed distance: up to `mid` the distance itself, beyond in logarithmic steps, up
    to 2 * mid - 1 for a distance of `most` - 1; negative for a negative distance.
    """
    far = torch.where(distance.abs() < mid, mid - 1, distance.abs())
    whole = torch.log(torch.tensor((most - 1) / mid))  # on the CPU: a scalar needs no copy
    buckets = torch.ceil(torch.log(far / mid) / whole * (mid - 1)) + mid
    return torch.where(far <= mid, distance.to(buckets.dtype), buckets * distance.sign())


def _falcon_heads(module: Any, fused: Tensor) -> tuple[Tensor, ...]:
    """Return (q, k, v), each [B, S, heads, d], of the joint linear's output `fused`, as FalconAttention._split_heads
    does, but by slices: torch would copy the index [-1] of the original to the device.
    """
    width = module.num_heads // module.num_kv_heads + 2
    grouped = fused.view(*fused.shape[:2], -1, width, module.head_dim)
    q, k, v = grouped[..., :-2, :], grouped[..., -2:-1, :], grouped[..., -1:, :]
    if module.new_decoder_architecture:
        k, v = k.expand(q.shape), v.expand(q.shape)
    return tuple(x.flatten(2, 3) for x in (q, k, v))


METHODS = {
    "FalconAttention": ("_split_heads", _falcon_heads),
    "GPTNeoSelfAttention": ("_attn", _gpt_neo_attention),
    "DebertaV2Encoder": ("get_rel_pos", _deberta_positions),
}
