"""The pipeline runtime: one step, or one forward, over the stages of a mesh."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slapo_zoo.mesh import Mesh
from slapo_zoo.stages import Boundary, StageDone, boundary_shape

Run = Callable[[Mapping[str, Any]], Any]  # batch --> HuggingFace output, by the model's own forward
ROWS = "_global_rows"  # global batch rows of a micro-batch, cut beside its tensors


class StageModule(nn.Module):
    """What `torch.distributed.pipelining` calls for one micro-batch of one stage.

    Args:
        model: with stand-ins for the other stages.
        run: calls the model's own forward for (batch, rows).
        boundary: where received hidden states go.
        others: arguments that are not divided into micro-batches.
    """

    def __init__(self, model: nn.Module, run: Callable[..., Any], boundary: Boundary, others: dict):
        super().__init__()
        self._modules["model"] = model
        self.run, self.boundary, self.others = run, boundary, others

    def forward(self, *received: Tensor, **batch: Tensor) -> Tensor:
        """Hidden states [rows, tokens, hidden] for the next stage, or the loss [1]."""
        rows = batch.pop(ROWS)
        self.boundary.received = received[0] if received else None
        try:
            return self.run({**batch, **self.others}, rows).reshape(1)
        except StageDone as done:
            return done.output
        finally:
            self.boundary.received = None


def split_batch(batch: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors that have a batch axis, and everything else."""
    tensors = {k: v for k, v in batch.items() if isinstance(v, Tensor) and v.ndim}
    return tensors, {k: v for k, v in batch.items() if k not in tensors}


def pipeline_step(
    stage: StageModule,
    mesh: Mesh,
    tensors: dict[str, Tensor],
    micro_batches: int,
    hidden_size: int,
    dtype: torch.dtype,
) -> Tensor:
    """Forward and backward of all micro-batches; gradients are added to `.grad`.

    The stage object is made anew: `PipelineStage` freezes its shapes at its first step.

    Returns:
        the sum of the micro-batch losses on the last stage, 0 elsewhere.
    """
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    device = next(iter(tensors.values())).device
    rows, tokens, width = boundary_shape(tensors, hidden_size)
    shape = (rows // micro_batches, tokens, width)
    hidden = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
    scalar = torch.empty(1, device="meta", requires_grad=True)
    index, last = mesh.coord("pp"), mesh.pp - 1
    runtime = PipelineStage(
        stage, index, mesh.pp, device,
        input_args=hidden if index else (),
        output_args=hidden if index < last else scalar,
        group=mesh.group("pp"),
    )  # fmt: skip
    # 1F1B needs a micro-batch in flight per stage; with fewer, both orders do the same.
    order = Schedule1F1B if micro_batches >= mesh.pp else ScheduleGPipe
    schedule = order(runtime, micro_batches, loss_fn=lambda out, _: out.sum(), scale_grads=False)
    if index < last:
        schedule.step(**tensors)
        return torch.zeros((), device=device)
    losses: list[Tensor] = []
    schedule.step(target=torch.zeros(micro_batches, device=device), losses=losses, **tensors)
    return torch.stack(losses).sum().detach()


def pipeline_forward(
    mesh: Mesh,
    run: Run,
    boundary: Boundary,
    batch: Mapping[str, Any],
    hidden_size: int,
    dtype: torch.dtype,
) -> Any:
    """One forward without gradients, stage after stage; the output arrives on every rank."""
    tensors, _ = split_batch(batch)
    device = next(iter(tensors.values())).device
    index, last, group = mesh.coord("pp"), mesh.pp - 1, mesh.group("pp")
    output = None
    with torch.no_grad():
        if index:
            boundary.received = torch.empty(
                boundary_shape(tensors, hidden_size), dtype=dtype, device=device
            )
            dist.recv(boundary.received, mesh.at(pp=index - 1), group=group)
        try:
            output = run(batch)
        except StageDone as done:
            dist.send(done.output.contiguous(), mesh.at(pp=index + 1), group=group)
        finally:
            boundary.received = None
    return broadcast_output(output, mesh.at(pp=last), group, device)


def broadcast_output(output: Any, source: int, group: Any, device: torch.device) -> Any:
    """A HuggingFace output object from one rank to its group: structure first, then tensors."""
    here = dist.get_rank() == source
    described = [_describe(output) if here else None]
    dist.broadcast_object_list(described, source, group=group, device=device)
    cls, items = described[0]  # pyright: ignore[reportGeneralTypeIssues]
    values = {}
    for name, spec in items.items():
        if isinstance(spec, torch.Size | tuple):
            shape, dtype = spec
            tensor = output[name].contiguous() if here else torch.empty(shape, dtype=dtype, device=device)  # fmt: skip
            dist.broadcast(tensor, source, group=group)
            values[name] = tensor
    return output if here else cls(**values)


def _describe(output: Any) -> tuple[type, dict[str, Any]]:
    """Class, and shape and dtype of each tensor; caches and tuples of layers stay where they are."""
    tensors = {k: v for k, v in output.items() if isinstance(v, Tensor)}
    return type(output), {k: (tuple(v.shape), v.dtype) for k, v in tensors.items()}
