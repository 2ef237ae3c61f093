"""Attention back ends, which the loader's argument `attention=` names, and checks that one can run on a device."""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slapo_zoo.errors import ArchitectureError, SlapoError
from slapo_zoo.parallel.paths import nearest

NAME = "slapo_zoo"  # value of config._attn_implementation; a back end adds its name


@dataclass(frozen=True)
class Backend:
    """One implementation of softmax(q k^T * scaling + mask) v.

    Args:
        run: (attention module, q, k, v, mask, **kwargs) --> ([B, S, H, d], None or attention weights).
        mask: name of the `transformers` mask function whose masks `run` takes.
        flag: attribute of a model class that is True if the class supports this back end; "" if there is none.
        drops: True if `CoreAttention` computes calls with dropout instead of `run`; False: such calls are refused.
        problem: function: (device type, dtype) --> reason why the back end cannot run there, or "".
    """

    run: Callable[..., Any]
    mask: str
    flag: str = ""
    drops: bool = False
    problem: Callable[[str, torch.dtype], str] = lambda device, dtype: ""


def _of_transformers(name: str) -> Callable[..., Any]:
    def run(attention: nn.Module, *tensors: Any, **kwargs: Any) -> Any:
        from transformers import AttentionInterface

        return AttentionInterface()[name](attention, *tensors, **kwargs)

    return run


def _eager(attention: nn.Module, *tensors: Any, **kwargs: Any) -> Any:
    """Call `eager_attention_forward` of the file that defines the attention's class, as each model family has its own."""
    files = [sys.modules.get(cls.__module__) for cls in type(attention).__mro__]
    family: Any = next((f for f in files if hasattr(f, "eager_attention_forward")), files[0])
    return family.eager_attention_forward(attention, *tensors, **kwargs)


def _xformers(
    attention: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None,
    position_bias: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Return (output [B, S, H, d], None) of xFormers' memory_efficient_attention for q [B, H, S, d], k, v [B, K, T, d];
    `dropout` is ignored, since such calls are refused before. Unmeasured: it needs a CUDA device and the package.
    """
    from xformers import ops  # pyright: ignore[reportMissingImports]

    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (k, v))
    causal = getattr(attention, "is_causal", True) if is_causal is None else is_causal
    bias: Any = None
    if mask is not None or position_bias is not None:
        bias = _aligned_bias(q, k, mask, position_bias, causal)
    elif causal and q.shape[-2] > 1:
        bias = ops.LowerTriangularMask()
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return ops.memory_efficient_attention(q, k, v, attn_bias=bias, scale=scaling), None


def _aligned_bias(
    q: Tensor, k: Tensor, mask: Tensor | None, position_bias: Tensor | None, causal: bool
) -> Tensor:
    """Return mask + position bias [B, H, S, T], to add to scores; the stride of axis S is a multiple of 8. With
    `causal`, a mask of None becomes a causal mask.
    """
    (rows, heads, length, _), width = q.shape, k.shape[-2]
    bias = q.new_zeros(rows, heads, length, -(-width // 8) * 8)[..., :width]
    if position_bias is not None:
        bias += position_bias[..., :width]
    if mask is None and causal and length > 1:
        mask = torch.ones(length, width, dtype=torch.bool, device=q.device).tril(width - length)
    if mask is not None and mask.dtype == torch.bool:
        bias.masked_fill_(~mask[..., :width], torch.finfo(q.dtype).min)
    elif mask is not None:
        bias += mask[..., :width]
    return bias


def _no_flash(device: str, dtype: torch.dtype) -> str:
    from transformers.utils.import_utils import is_flash_attn_2_available

    if device != "cuda" or not is_flash_attn_2_available():
        return f"flash needs the package flash-attn and a CUDA device, found {device}"
    half = dtype in (torch.float16, torch.bfloat16)
    return "" if half else f"flash takes float16 or bfloat16, found {dtype}"


def _no_flex(device: str, dtype: torch.dtype) -> str:
    return "" if device == "cuda" else f"FlexAttention has no backward on {device} in torch"


def _no_xformers(device: str, dtype: torch.dtype) -> str:
    if importlib.util.find_spec("xformers") is None:
        return "the package xformers is not installed"
    return "" if device == "cuda" else f"xformers has no kernel for {device}"


BACKENDS = {
    "sdpa": Backend(_of_transformers("sdpa"), "sdpa", "_supports_sdpa", drops=True),
    "eager": Backend(_eager, "eager", drops=True),
    "flash": Backend(_of_transformers("flash_attention_2"), "flash_attention_2",
                     "_supports_flash_attn", problem=_no_flash),
    "flex": Backend(_of_transformers("flex_attention"), "flex_attention",
                    "_supports_flex_attn", problem=_no_flex),
    "xformers": Backend(_xformers, "sdpa", "_supports_sdpa", problem=_no_xformers),
}  # fmt: skip


def find_backend(name: str) -> Backend:
    """Return the attention back end with that name; an unknown name raises SlapoError, which lists all names."""
    if name not in BACKENDS:
        near = nearest(str(name), BACKENDS) or list(BACKENDS)
        problem = f"no such attention backend; there are {', '.join(BACKENDS)}"
        raise SlapoError("attention", f"attention={name!r}", problem, f"nearest: {near}")
    return BACKENDS[name]


def implementation(name: str) -> str:
    """Return the value of `config._attn_implementation` that selects slapo_zoo's attention with the back end `name`."""
    return NAME if name == "sdpa" else f"{NAME}_{name}"


def require_backend(
    name: str, cls: Any, tunable: tuple[str, ...], device: torch.device, dtype: torch.dtype
) -> None:
    """Raise ArchitectureError when a model class cannot use a back end on this device and dtype.

    Args:
        name: name of the back end, as the loader's `attention=` takes it.
        cls: model class of `transformers`.
        tunable: names of the back ends that the model family supports.
        device: device of the model.
        dtype: dtype of the model.
    """
    backend = find_backend(name)
    what = f"attention={name!r}"
    family = not backend.flag or getattr(cls, backend.flag, False)
    if name not in tunable or not family:
        found = [
            n for n in tunable if not BACKENDS[n].flag or getattr(cls, BACKENDS[n].flag, False)
        ]
        lacks = "does not support this backend" if found else "has no attention whose backend can be chosen"  # fmt: skip
        problem = f"{cls.__name__} {lacks}"
        hint = f"choose one of {', '.join(found)}" if found else "leave attention= out"
        raise ArchitectureError("attention", what, problem, hint)
    if problem := backend.problem(device.type, dtype):
        hint = "choose sdpa or eager, which run everywhere"
        raise ArchitectureError("attention", what, problem, hint)
