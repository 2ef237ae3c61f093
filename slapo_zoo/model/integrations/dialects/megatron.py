"""megatron-core with a scheduled model: its process groups, parameter marks, tp layers and logs.

Sources: arXiv:1909.08053; megatron-core 0.16, `parallel_state` and `tensor_parallel.layers`. Its DDP
and optimizer allocate on "cuda" by name: without CUDA the same code runs on the CPU, which is what that name
means while they are built and while the optimizer steps. docs/engines.md says what is proven.
"""

import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from slapo_zoo.errors import MeshError, SlapoError
from slapo_zoo.language.schedule import Schedule
from slapo_zoo.model.dp.data_parallel import (
    Native,
    Whole,
    sum_partial_gradients_in_backward,
    use_engine,
)
from slapo_zoo.model.integrations.dialects import register_dialect
from slapo_zoo.model.integrations.dialects.engine import (
    TargetEngine,
    made_optimizer,
    require_scheduled,
)
from slapo_zoo.parallel.mesh import Mesh


@register_dialect("runtime_engine", "megatron")
def megatron_engine(
    sch: Any, optimizer: Any = None, clip: float = 0.0, ddp: Mapping[str, Any] | None = None
) -> tuple[Any, Any]:
    """Run a scheduled model on Megatron's process groups; return (engine, optimizer).

    All later collectives of the model use the groups of `megatron.core.parallel_state`, and its
    parameters carry the marks that Megatron's code reads.

    Args:
        sch: a scheduled model.
        optimizer: torch optimizer, or a function parameters --> optimizer; or Megatron's
            OptimizerConfig, for Megatron's own.
        clip: largest global gradient norm of `update`; 0 does not clip.
        ddp: fields of Megatron's DistributedDataParallelConfig: its DDP reduces over dp, as it also
            does under its optimizer. None reduces after the last micro-batch without it.
    """
    model = require_scheduled(sch, "megatron")
    if model.mesh.pp > 1:
        problem = "our stages do not run in Megatron's pipeline, which needs CUDA"
        raise MeshError("target='megatron'", f"pp={model.mesh.pp}", problem, "target='torch'")
    take_groups(model.mesh)
    mark_parameters(model)
    native = model
    if ddp is not None or is_config(optimizer):
        native, optimizer = with_ddp(model, optimizer, ddp or {})
    made = made_optimizer(optimizer, model.parameters())
    return TargetEngine(model, native, made, clip), made


def take_groups(mesh: Mesh) -> None:
    """Use Megatron's process groups as the mesh's, creating them if needed; MeshError if they do not match."""
    state = import_megatron().parallel_state
    if not dist.is_initialized():
        hint = "start the processes with torchrun"
        raise MeshError("target='megatron'", "dist", "there is no process group", hint)
    if not state.model_parallel_is_initialized():
        state.initialize_model_parallel(mesh.tp, mesh.pp, order="tp-cp-ep-dp-pp")
    groups = {
        "tp": state.get_tensor_model_parallel_group(),
        "dp": state.get_data_parallel_group(),
        "pp": state.get_pipeline_model_parallel_group(),
    }
    for mesh_dim, group in groups.items():
        found, expected = dist.get_process_group_ranks(group), mesh.peers(mesh_dim)
        if found != expected:
            problem = f"Megatron's group has ranks {found}, ours {expected}"
            hint = "initialize_model_parallel with the same tp and pp, order tp-cp-ep-dp-pp"
            raise MeshError("target='megatron'", mesh_dim, problem, hint)
    mesh.__dict__["_groups"] = {d: groups[d] for d, size in mesh.sizes.items() if size > 1}


def mark_parameters(model: Any) -> None:
    """Set `tensor_model_parallel`, `partition_dim` and `partition_stride` as Megatron's layers do."""
    plan = model._slapo.plan
    for name, p in model.named_parameters():
        row = plan.of(name) if model.mesh.tp > 1 else None
        placement = row.placement if row else None
        p.tensor_model_parallel = placement is not None
        p.partition_dim = -1 if placement is None else placement.axis
        p.partition_stride = 1


def use_parallel_layers(sch: Schedule, column: Sequence[str], row: Sequence[str]) -> Schedule:
    """Replace linear layers of a bare schedule by Megatron's, their weights sharded over tp.

    rewrite:  Linear(x)  -->  ColumnParallelLinear(x) [.., out/tp]  -->  RowParallelLinear [.., out]

    Args:
        sch: schedule of any module, whose mesh has process groups.
        column: patterns of layers whose output is sharded.
        row: patterns of the layers that take that output; theirs is all-reduced over tp.
    """
    take_groups(sch.mesh)
    for patterns, make in ((column, ColumnParallel), (row, RowParallel)):
        for pattern in patterns:
            for path in sch.matching(pattern, "use_parallel_layers"):
                linear: Any = sch.state.modules[path]
                _check(path, linear, sch.mesh, make.axis)
                sch[path].replace(make(linear, sch.mesh))
    return sch


def _check(path: str, linear: Any, mesh: Mesh, axis: int) -> None:
    if not isinstance(linear, nn.Linear):
        problem = f"found {type(linear).__name__}, expected Linear"
        raise SlapoError(path, "use_parallel_layers", problem, "name linear layers")
    if linear.weight.shape[axis] % mesh.tp:
        problem = f"{linear.weight.shape[axis]} is not a multiple of tp={mesh.tp}"
        raise SlapoError(path, "use_parallel_layers", problem, "Megatron divides evenly")


class _Parallel(nn.Module):
    """Wrapper of a Megatron layer that returns one output, like the Linear it replaces."""

    axis: int

    def __init__(self, linear: nn.Linear, mesh: Mesh, kind: str, **options: Any):
        super().__init__()
        core = import_megatron()
        self.layer = layer = getattr(core.tensor_parallel, kind)(
            linear.in_features, linear.out_features, config=_config(core, linear, mesh),
            tp_group=core.parallel_state.get_tensor_model_parallel_group(), init_method=_leave,
            bias=linear.bias is not None, **options,
        )  # fmt: skip
        with torch.no_grad():
            layer.weight.copy_(linear.weight.chunk(mesh.tp, self.axis)[mesh.coord("tp")])
            if linear.bias is not None:
                bias = (
                    linear.bias.chunk(mesh.tp)[mesh.coord("tp")] if self.axis == 0 else linear.bias
                )
                layer.bias.copy_(bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output without the bias that Megatron's layers return beside it."""
        return self.layer(x)[0]


class ColumnParallel(_Parallel):
    """Megatron's column-parallel linear: its output is this rank's columns."""

    axis = 0

    def __init__(self, linear: nn.Linear, mesh: Mesh):
        super().__init__(linear, mesh, "ColumnParallelLinear", gather_output=False)


class RowParallel(_Parallel):
    """Megatron's row-parallel linear: input is this rank's columns, output the all-reduced sum plus bias."""

    axis = 1

    def __init__(self, linear: nn.Linear, mesh: Mesh):
        options = {"input_is_parallel": True, "skip_bias_add": False}
        super().__init__(linear, mesh, "RowParallelLinear", **options)


def _leave(weight: Tensor) -> Tensor:
    return weight


def _config(core: Any, linear: nn.Linear, mesh: Mesh) -> Any:
    from megatron.core.model_parallel_config import ModelParallelConfig

    return ModelParallelConfig(
        tensor_model_parallel_size=mesh.tp, params_dtype=linear.weight.dtype,
        use_cpu_initialization=linear.weight.device.type == "cpu", perform_initialization=False,
        gradient_accumulation_fusion=False,
    )  # fmt: skip


def import_megatron() -> Any:
    """Import and return megatron.core; SlapoError when it is not installed."""
    try:
        with warnings.catch_warnings():  # of kernels that are not installed
            warnings.simplefilter("ignore")
            import megatron.core
            import megatron.core.parallel_state  # noqa: F401 - submodules of what is returned
            import megatron.core.tensor_parallel  # noqa: F401
    except ImportError as error:
        hint = "pip install slapo-zoo[megatron]"
        raise SlapoError("target='megatron'", "import", str(error), hint) from error
    return megatron.core


@register_dialect("log_parser", "megatron")
def parse_log(path: str | os.PathLike[str]) -> tuple[float, float, float, int]:
    """Parse a log of Megatron-LM: (parameters of a rank, samples/s, peak GB, error code).

    A figure that is missing is 0. Error codes: 0 none, 1 out of memory, 2 no throughput.
    """
    text = Path(path).read_text(errors="replace")
    pattern = r"elapsed time per iteration \(ms\): ([\d.]+).*?global batch size:\s*(\d+)"
    times = [(float(ms), int(size)) for ms, size in re.findall(pattern, text)]
    memory = [float(mb) for mb in re.findall(r"max allocated: ([\d.]+)", text)]
    counts = re.findall(r"number of parameters on \(tensor, pipeline\).*?: (\d+)", text)
    code = 0 if times else 1 if "out of memory" in text else 2
    rate = 1000.0 * times[-1][1] / times[-1][0] if times else 0.0
    return max(map(float, counts), default=0.0), rate, max(memory, default=0.0) / 1024, code


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
