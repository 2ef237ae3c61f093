"""megatron-core's own DDP and optimizer around a scheduled model.

Both allocate on "cuda" by name. On a machine without CUDA the same code runs on the CPU: while they
are built and while the optimizer steps, that name stands for the CPU.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from slapo_zoo.errors import SlapoError
from slapo_zoo.model.dp.data_parallel import (
    Native,
    Whole,
    sum_partial_gradients_in_backward,
    use_engine,
)


def with_ddp(model: Any, optimizer: Any, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return (Megatron's DDP around the model, Megatron's optimizer if `optimizer` is an OptimizerConfig).

    Args:
        model: a scheduled model with Megatron's groups and marks.
        optimizer: an OptimizerConfig; anything else is returned as it is.
        options: fields of DistributedDataParallelConfig.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.transformer.transformer_config import TransformerConfig

    _check(model, optimizer, options)
    mesh = model.mesh
    config = TransformerConfig(  # DDP asks it how to average; our losses are shares of the mean
        num_layers=1, hidden_size=mesh.tp, num_attention_heads=mesh.tp,
        tensor_model_parallel_size=mesh.tp, calculate_per_token_loss=True,
        use_cpu_initialization=True,
    )  # fmt: skip
    sum_partial_gradients_in_backward(model)
    with named_devices(next(model.parameters()).device):
        native = DistributedDataParallel(config, DistributedDataParallelConfig(**options), model)
        if is_config(optimizer):  # {}: weight decay on every parameter, as torch does
            optimizer = get_megatron_optimizer(optimizer, [native], config_overrides={})
            _step_here(optimizer, next(model.parameters()).device)
    use_engine(model, _MegatronDdp(native))
    return native, optimizer


def _step_here(optimizer: Any, device: torch.device) -> None:
    """Let the optimizer's step treat "cuda" as `device` too, for small tensors of its norm."""
    own = optimizer.step

    def step() -> Any:
        with named_devices(device):
            return own()

    optimizer.step = step


def is_config(optimizer: Any) -> bool:
    """Return whether an optimizer argument is Megatron's OptimizerConfig."""
    return hasattr(optimizer, "use_distributed_optimizer")


def _check(model: Any, optimizer: Any, options: Mapping[str, Any]) -> None:
    divided = options.get("use_distributed_optimizer") or getattr(
        optimizer, "use_distributed_optimizer", False
    )
    if divided:
        problem = "optimizer state sharded over dp by Megatron cannot be read by our checkpoints"
        hint = "set it to False; target='deepspeed' divides the optimizer over dp"
        raise SlapoError("target='megatron'", "use_distributed_optimizer", problem, hint)
    if dtypes := {str(p.dtype) for p in model.parameters()} - {"torch.float32"}:
        problem = f"found parameters of {sorted(dtypes)}, expected torch.float32"
        raise SlapoError("target='megatron'", "ddp", problem, "leave ddp out, or dtype='float32'")
    on_cpu = next(model.parameters()).device.type == "cpu"
    if on_cpu and getattr(optimizer, "clip_grad", 0.0):
        problem = f"found {optimizer.clip_grad}, but Megatron clips gradients on CUDA only"
        hint = "OptimizerConfig(clip_grad=0.0, ...), and clip= beside it: the same global norm"
        raise SlapoError("target='megatron'", "clip_grad", problem, hint)


class _MegatronDdp(Native):
    """Data parallelism by Megatron's DDP: gradients lie in its buffers, each reduced in one collective."""

    @contextmanager
    def new_gradients(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        """Context of a step, after which `p.grad` is Megatron's buffer plus the gradient of earlier steps."""
        earlier = [p.grad if p.grad is None else p.grad.clone() for p in parameters]
        for p in parameters:
            p.grad = None
        self.native.zero_grad_buffer()
        try:
            yield
        except BaseException:
            for p, grad in zip(parameters, earlier, strict=True):
                p.grad = grad
            raise
        for p, grad in zip(parameters, earlier, strict=True):
            main: Tensor = p.main_grad  # pyright: ignore[reportAttributeAccessIssue]
            p.grad = main if grad is None else main.add_(grad)

    def sum_over_dp(self, parameters: list[nn.Parameter], mesh: Any) -> None:
        self.native.finish_grad_sync()

    def whole(self, model: Any, optimizer: Any = None) -> Whole:
        """Return parameters and optimizer for a checkpoint: the torch optimizer within Megatron's."""
        for inner in getattr(optimizer, "chained_optimizers", ()):
            optimizer = inner.optimizer
        return super().whole(model, optimizer)


class _CpuForCuda(TorchFunctionMode):
    """Mode in which torch functions with device="cuda" make their tensors on the CPU.

    rewrite:  torch.zeros(1, device="cuda")  -->  torch.zeros(1, device="cpu")
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@contextmanager
def named_devices(device: torch.device) -> Iterator[None]:
    """Context in which "cuda" stands for `device`, if that is the CPU."""
    if device.type != "cpu":
        yield
        return
    current = torch.cuda.current_device  # noqa: TID251 - Megatron's code calls it
    setattr(torch.cuda, "current_device", lambda: device)  # noqa: B010
    try:
        with _CpuForCuda():
            yield
    finally:
        setattr(torch.cuda, "current_device", current)  # noqa: B010
