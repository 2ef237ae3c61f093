"""Precisions by name: the dtype of a model's parameters and the dtype in which it computes."""

from dataclasses import dataclass
from typing import Any

import torch

from slapo_zoo.errors import SlapoError


@dataclass(frozen=True)
class Precision:
    """Dtypes that one value of `precision=` stands for.

    Args:
        parameters: dtype of parameters, gradients and checkpoints.
        compute: dtype of forward and backward.
        scales: whether the loss is scaled, so that small gradients do not underflow.
    """

    parameters: torch.dtype
    compute: torch.dtype
    scales: bool = False


PRECISIONS = {
    "fp32": Precision(torch.float32, torch.float32),
    "bf16": Precision(torch.float32, torch.bfloat16),
    "bf16-pure": Precision(torch.bfloat16, torch.bfloat16),
    "fp16": Precision(torch.float32, torch.float16, scales=True),
}
TARGETS = {"deepspeed": '{"bf16": {"enabled": true}} in its config', "megatron": "dtype="}


def precision_name(value: Any) -> Any:
    """Return "fp32" for torch.float32 or "float32", and any other value unchanged."""
    return "fp32" if str(value).removeprefix("torch.") == "float32" else value


def check_precision(name: str | None, dtype: Any, device: torch.device | str, target: Any) -> None:
    """Raise SlapoError for a precision that is unknown or that device, dtype or engine does not allow.

    Args:
        name: a name of PRECISIONS, or None, which passes.
        dtype: the caller's dtype: "auto", or one that must agree.
        device: device of the model.
        target: name of the engine.
    """
    if name is None:
        return
    where, what = "from_pretrained", f"precision={name!r}"
    if name not in PRECISIONS:
        raise SlapoError(where, what, "no such precision", f"choose one of {', '.join(PRECISIONS)}")
    kept = str(PRECISIONS[name].parameters).removeprefix("torch.")
    if str(dtype).removeprefix("torch.") not in ("auto", kept):
        problem = f"its parameters are {kept}, found dtype={dtype!r}"
        raise SlapoError(where, what, problem, "leave dtype= out")
    if target in TARGETS and name != "fp32":
        problem = f"{target} keeps masters of its own"
        raise SlapoError(where, what, problem, f"leave it out and pass {TARGETS[target]}")
    is_cuda = torch.device(device).type == "cuda"
    if is_cuda and name.startswith("bf16") and not torch.cuda.is_bf16_supported(False):
        problem = f"{torch.cuda.get_device_name()} computes no bfloat16"
        raise SlapoError(where, what, problem, 'the nearest that fits is precision="fp16"')
