"""megatron-core with a scheduled model: its process groups, attributes of parameters, tp layers and logs.

Sources: arXiv:1909.08053; megatron-core 0.16, `parallel_state` and `tensor_parallel.layers`.
docs/engines.md says what was tested.
"""

import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slapo_zoo.errors import MeshError, SlapoError
from slapo_zoo.language.schedule import Schedule
from slapo_zoo.model.integrations.dialects import register_dialect
from slapo_zoo.model.integrations.dialects.engine import (
    TargetEngine,
    made_optimizer,
    require_scheduled,
)
from slapo_zoo.parallel.mesh import Mesh


@register_dialect("runtime_engine", "megatron")
def megatron_engine(sch: Any, optimizer: Any = None, clip: float = 0.0) -> tuple[Any, Any]:
    """Run a scheduled model on Megatron's process groups; return (engine with `update(batch)` for a step, optimizer).

    All later collectives of the model use the groups of `megatron.core.parallel_state`, and its
    parameters get the attributes that Megatron's code reads (`mark_parameters`).

    Args:
        sch: a scheduled model.
        optimizer: torch optimizer, or a function parameters --> optimizer; None: the caller steps.
        clip: largest global gradient norm of `update`; 0 does not clip.
    """
    model = require_scheduled(sch, "megatron")
    if model.mesh.pp > 1:
        problem = "Megatron's pipeline cannot run the stages of this model"
        hint = "use pp=1, or target='torch'"
        raise MeshError("target='megatron'", f"pp={model.mesh.pp}", problem, hint)
    if hasattr(optimizer, "use_distributed_optimizer"):
        problem = "found an OptimizerConfig, expected a torch optimizer or a function making one"
        hint = "pass e.g. optimizer=torch.optim.AdamW; the model itself averages gradients over dp"
        raise SlapoError("target='megatron'", "optimizer", problem, hint)
    take_groups(model.mesh)
    mark_parameters(model)
    made = made_optimizer(optimizer, model.parameters())
    return TargetEngine(model, model, made, clip), made


def take_groups(mesh: Mesh) -> None:
    """Use Megatron's tp, dp and pp groups, created if needed, as those of `mesh`; MeshError if their ranks differ."""
    state = import_megatron().parallel_state
    if not dist.is_initialized():
        hint = "start the processes with torchrun, and call torch.distributed.init_process_group()"
        problem = "found no process group of torch"
        raise MeshError("target='megatron'", "torch.distributed", problem, hint)
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
            problem = f"found ranks {found} in Megatron's group, expected {expected}"
            hint = "call initialize_model_parallel with the same tp and pp, order tp-cp-ep-dp-pp"
            raise MeshError("target='megatron'", mesh_dim, problem, hint)
    mesh.__dict__["_groups"] = {d: groups[d] for d, size in mesh.sizes.items() if size > 1}


def mark_parameters(model: Any) -> None:
    """Set `tensor_model_parallel`, `partition_dim`, `partition_stride` of all parameters, as Megatron's layers do."""
    plan = model._slapo.plan
    for name, p in model.named_parameters():
        row = plan.of(name) if model.mesh.tp > 1 else None
        placement = row.placement if row else None
        p.tensor_model_parallel = placement is not None
        p.partition_dim = -1 if placement is None else placement.axis
        p.partition_stride = 1


def use_parallel_layers(sch: Schedule, column: Sequence[str], row: Sequence[str]) -> Schedule:
    """Replace linear layers of a scheduled module by Megatron's, their weights sharded over tp; return `sch`.

    rewrite:  Linear(x)  -->  ColumnParallelLinear(x) [.., out/tp]  -->  RowParallelLinear [.., out]

    Args:
        sch: Schedule of any module (`create_schedule`), whose mesh has process groups.
        column: path patterns of layers whose output is sharded.
        row: path patterns of the layers that take that output, and whose own output is all-reduced over tp.
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
        hint = "name only nn.Linear layers in column= and row="
        raise SlapoError(path, "use_parallel_layers", problem, hint)
    if linear.weight.shape[axis] % mesh.tp:
        size = linear.weight.shape[axis]
        problem = f"axis {axis} of the weight has size {size}, not a multiple of tp={mesh.tp}"
        raise SlapoError(path, "use_parallel_layers", problem, "choose a tp that divides this size")


class _Parallel(nn.Module):
    """Wrapper of a Megatron layer that returns only its output, as the Linear that it replaces does."""

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
        """Return the layer's output alone; Megatron's layers return (output, bias)."""
        return self.layer(x)[0]


class ColumnParallel(_Parallel):
    """Megatron's column-parallel linear: its output is this rank's columns."""

    axis = 0

    def __init__(self, linear: nn.Linear, mesh: Mesh):
        super().__init__(linear, mesh, "ColumnParallelLinear", gather_output=False)


class RowParallel(_Parallel):
    """Megatron's row-parallel linear: its input is this rank's columns, its output the all-reduced sum plus bias."""

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
    """Parse the Megatron-LM log at `path`; return (number of parameters on a rank, samples/s, peak GB, error code).

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
