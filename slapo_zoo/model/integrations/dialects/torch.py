"""Data parallelism of a sharded model by torch instead of by this package: DDP or FSDP2 (`fully_shard`) over dp.

Sources: arXiv:2006.15704 (DDP), arXiv:2304.11277 (FSDP); `torch.distributed.fsdp.fully_shard`.
"""

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from slapo_zoo.errors import MeshError, SlapoError
from slapo_zoo.model.dp.data_parallel import (
    DataParallel,
    Native,
    Whole,
    use_engine,
    within_engine,
)
from slapo_zoo.model.integrations.dialects import register_dialect
from slapo_zoo.model.integrations.dialects.engine import (
    TargetEngine,
    is_exact,
    is_scheduled,
    made_optimizer,
)
from slapo_zoo.parallel import compat
from slapo_zoo.parallel.local_tensors import held_here, whole_over_dp
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.pipeline.pipeline_runtime import pipeline_step

KINDS = (None, "ddp", "fsdp2")


@register_dialect("runtime_engine", "torch")
def torch_engine(
    sch: Any,
    optimizer: Any = None,
    data_parallel: str | None = None,
    clip: float = 0.0,
    **options: Any,
) -> tuple[Any, Any]:
    """Run a scheduled model under torch; return (engine with `update(batch)` for an optimizer step, optimizer).

    Args:
        sch: a model of AutoScheduledModel; or a Schedule (of `create_schedule`): then its module, wrapped in DDP or
            FSDP2 if chosen, is returned instead of an engine.
        optimizer: torch optimizer or None; or a function parameters --> optimizer, as FSDP2 makes new parameters.
        data_parallel: None averages gradients by our own hooks, "ddp" by torch's DDP; "fsdp2" shards parameters,
            gradients and optimizer over dp as well. With pp > 1 "ddp" and "fsdp2" need one stage per rank.
        clip: largest global gradient norm of `update`; 0 does not clip.
        **options: options of DistributedDataParallel, or of fully_shard.
    """
    mesh = sch.mesh
    _check(sch, mesh, optimizer, data_parallel)
    model = sch if is_scheduled(sch) else sch.model
    native, strategy = model, None
    if data_parallel == "ddp" and mesh.size("loss") > 1:
        native = _ddp(model, mesh, options)
        strategy = (Native if mesh.pp == 1 else _DdpStages)(native, float(mesh.size("loss")))
    elif data_parallel == "fsdp2" and mesh.size("loss") > 1:
        native = _fsdp2(model, mesh, options)
        strategy = _Fsdp2(mesh) if mesh.pp == 1 else _Fsdp2Stages(native, mesh)
    optimizer = made_optimizer(optimizer, model.parameters())
    if not is_scheduled(sch):
        return native, optimizer
    if strategy is not None:
        use_engine(model, strategy, divides=data_parallel == "fsdp2")
    return TargetEngine(model, native, optimizer, clip), optimizer


def _check(sch: Any, mesh: Mesh, optimizer: Any, kind: str | None) -> None:
    what = f"data_parallel={kind!r}"
    if kind not in KINDS:
        problem = f"found no such kind of data parallelism, expected one of {KINDS}"
        raise SlapoError("target='torch'", what, problem, "choose one of them")
    if kind is not None and is_exact(sch):
        problem = "found a model loaded with exact=, several ranks per process, but DDP and FSDP2 take one rank per process"
        raise SlapoError("target='torch'", what, problem, "leave data_parallel= out")
    if kind == "fsdp2" and is_scheduled(sch) and sch._slapo.precision.dtype is not None:
        problem = "found a model with precision=, but FSDP2 casts parameters itself"
        hint = "leave precision= out and pass mp_policy=MixedPrecisionPolicy(param_dtype=...)"
        raise SlapoError("target='torch'", what, problem, hint)
    if kind is not None and mesh.pp > 1:
        _check_stages(sch, what)
    if kind == "fsdp2" and hasattr(optimizer, "param_groups"):
        problem = "the optimizer holds parameters that FSDP2 replaces"
        hint = "pass a function: optimizer=lambda parameters: AdamW(parameters, lr=...)"
        raise SlapoError("target='torch'", "optimizer", problem, hint)


def _check_stages(model: Any, what: str) -> None:
    """Raise MeshError if a rank has several pipeline stages, since DDP and FSDP2 would reduce the gradient of a
    parameter before the last backward that adds to it. `what` is the user's option that chose DDP or FSDP2, for the
    error.
    """
    places, pp = model._slapo.pipeline.places, model.mesh.pp
    if places.num_stages != pp:
        problem = f"found {places.num_stages} stages on pp={pp} ranks, in the order {places.order.name}, expected {pp}"
        hint = "load with pipeline_order= of one stage per rank (1f1b or gpipe), or leave data_parallel= out"
        raise MeshError("target='torch'", what, problem, hint)


def _ddp(model: nn.Module, mesh: Mesh, options: dict[str, Any]) -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    options = {compat.DDP_BUFFERS: False, **options}  # buffers are equal on all ranks already
    return DistributedDataParallel(model, process_group=mesh.group("loss"), **options)


def _fsdp2(model: nn.Module, mesh: Mesh, options: dict[str, Any]) -> nn.Module:
    """Apply `fully_shard`, with its `options`, to each block, then to the model, and return the model. A block is
    gathered while it runs; parameters outside the blocks stay gathered from forward to backward.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    kind = next(model.parameters()).device.type
    group: Any = mesh.group("loss")
    # torch keeps plans of DTensors by mesh: after a new init_process_group the same ranks may have a
    # group of another name, which only the name of the mesh dim tells apart
    over_dp = DeviceMesh.from_group(group, kind, mesh_dim_names=(f"dp_{group.group_name}",))
    for block in _blocks(model):
        fully_shard(block, mesh=over_dp, **options)
    divided: Any = fully_shard(model, mesh=over_dp, **options)
    return divided


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a model's repeated blocks: items (with parameters) of each ModuleList that is inside no other."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from (block for block in child if next(block.parameters(), None) is not None)
        else:
            yield from _blocks(child)


class _DdpStages(DataParallel):
    """Data parallelism of a pipeline stage by DDP's reducer, without DDP's forward. Micro-batches accumulate in
    `.grad`, which is averaged in the backward of the last one, as in `torch.distributed.pipelining`.
    """

    def __init__(self, native: Any, loss_scale: float):
        self.sums, self.loss_scale = native.reducer, loss_scale

    def run_stages(self, pipeline: Any, *step: Any) -> Tensor:
        """Run forward and backward of all micro-batches; return the sum of their losses on the last stage, 0 on others.
        `step` is loss function, entries of the batch to split by rows, other entries, number of micro-batches. DDP
        averages gradients in the backward of the last micro-batch.
        """
        self.sums._rebuild_buckets()  # once, in the order of the first backward
        return pipeline_step(pipeline, *step, before_last=self._expect_gradients)

    def _expect_gradients(self, outputs: Any) -> None:
        found = [outputs] if isinstance(outputs, Tensor) else outputs
        self.sums.prepare_for_backward([x for x in found if x.requires_grad])


class _Fsdp2(DataParallel):
    """Data parallelism by FSDP2: parameters are DTensors sharded over dp, and each backward reduce-scatters."""

    def __init__(self, mesh: Mesh):
        self.loss_scale = float(mesh.size("loss"))

    def run(self, model: Any, batch: dict[str, Any]) -> Any:
        with within_engine(model), warnings.catch_warnings():
            # FSDP2 warns of in-place changes of a block's output; tests of equal results cover them
            warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
            return model(**batch)

    def tensors(self, model: Any, grads: bool = False) -> dict[str, Tensor]:
        found = super().tensors(model, grads)
        whole = {id(tensor): whole_over_dp(tensor.detach()) for tensor in found.values()}
        return {name: whole[id(tensor)] for name, tensor in found.items()}

    def whole(self, model: Any, optimizer: Any = None) -> Whole:
        return _WholeDTensors(model, optimizer)


class _Fsdp2Stages(_Fsdp2):
    """FSDP2 on a pipeline stage: parameters outside the blocks stay gathered during a step. A stage that is not the
    last leaves the model's forward in the middle, so FSDP2's hook at the end of the forward, which would gather those
    parameters for the backward, does not run.
    """

    def __init__(self, native: Any, mesh: Mesh):
        super().__init__(mesh)
        self.native = native
        native.set_reshard_after_backward(False, recurse=False)

    def run_stages(self, pipeline: Any, *step: Any) -> Tensor:
        """Run forward and backward of all micro-batches; return the sum of their losses on the last stage, 0 on others.
        `step` is loss function, entries of the batch to split by rows, other entries, number of micro-batches. Each
        backward reduce-scatters the gradients of its blocks.
        """
        try:
            return pipeline_step(pipeline, *step)
        finally:
            self.native.reshard()


class _WholeDTensors(Whole):
    """Copies of FSDP2's parameters and optimizer state, gathered over dp, from which a checkpoint is written or into
    which one is read: `tensors` {name: copy} and `optimizer`. `put_back` writes the copies into FSDP2's shards.
    """

    def __init__(self, model: Any, optimizer: Any):
        self.divided = dict(model.named_parameters())
        copies = {n: nn.Parameter(_copied(p), p.requires_grad) for n, p in self.divided.items()}
        super().__init__({**copies, **dict(model.named_buffers())})
        self.given = optimizer
        if optimizer is not None:
            self.optimizer = self._whole_optimizer(optimizer, copies)

    def _whole_optimizer(self, optimizer: Any, copies: dict[str, nn.Parameter]) -> Any:
        """Return an optimizer of the class of `optimizer`, its state unsharded, over `copies` {name: parameter}."""
        named = {id(p): copies[name] for name, p in self.divided.items()}
        groups = [
            {**g, "params": [named[id(p)] for p in g["params"]]} for g in optimizer.param_groups
        ]
        mine = copy.copy(optimizer)
        mine.param_groups, mine.state = groups, copy.copy(optimizer.state)
        mine.state.clear()
        for p, remembered in optimizer.state.items():
            mine.state[named[id(p)]] = {k: _copied(v) for k, v in remembered.items()}
        return mine

    def put_back(self) -> None:
        back = {id(self.tensors[name]): p for name, p in self.divided.items()}
        with torch.no_grad():
            for name, p in self.divided.items():
                held_here(p).copy_(held_here(_divided_like(p, self.tensors[name])))
        if self.given is None:
            return
        for mine, group in zip(self.optimizer.param_groups, self.given.param_groups, strict=True):
            group.update({k: v for k, v in mine.items() if k != "params"})
        self.given.state.clear()
        for p, remembered in self.optimizer.state.items():
            divided = back[id(p)]
            self.given.state[divided] = {
                k: _divided_like(divided, v) if isinstance(v, Tensor) and v.shape == p.shape else v
                for k, v in remembered.items()
            }


def _copied(value: Any) -> Any:
    return whole_over_dp(value.detach()).clone() if isinstance(value, Tensor) else value


def _divided_like(divided: Any, whole: Tensor) -> Tensor:
    """Return this rank's shard of the unsharded tensor `whole`, as a DTensor with the placements of `divided`."""
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = divided.device_mesh, divided.placements
    return distribute_tensor(whole.detach(), mesh, placements, src_data_rank=None)
