"""One training step on any mesh: micro-batches, the pipeline, and the sums of gradients."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slapo_zoo import gradients
from slapo_zoo.errors import MeshError, SlapoError
from slapo_zoo.losses import LABELS, GlobalMeans, count_targets
from slapo_zoo.mesh import Mesh
from slapo_zoo.pipeline import ROWS, Pipeline, pipeline_step, split_batch
from slapo_zoo.runtime import Runtime, count_rows, refuse_divided, takes_cache, tokens_divide


def train_step(model: Any, batch: Mapping[str, Any], micro_batches: int | None) -> Tensor:
    """Forward and backward of one batch: see `Scheduled.train_step`."""
    runtime: Runtime = model._slapo
    mesh, stream = model.mesh, runtime.schedule.state.random
    tensors, others = split_batch(batch)
    if takes_cache(runtime):
        others["use_cache"] = False
    rows = count_rows(tensors)
    if not rows:
        problem = f"found no tensor with rows among {list(batch)}"
        raise SlapoError("train_step", "batch", problem, "pass input_ids and labels")
    count = runtime.micro_batches if micro_batches is None else micro_batches
    if count is None and runtime.batch_statistics and mesh.pp > 1:
        problem = f"BatchNorm takes its statistics per micro-batch, and pp={mesh.pp} wants several"
        hint = "pass micro_batches=1 for those of the whole batch, or the number you want"
        raise MeshError("train_step", "micro_batches", problem, hint)
    count = _default_micro_batches(rows, mesh) if count is None else count
    legal = [i for i in range(1, rows + 1) if rows % i == 0]
    if count not in legal:
        problem = f"{rows} rows cannot be divided into {count} equal micro-batches"
        raise MeshError("train_step", "micro_batches", problem, f"legal numbers: {legal}")
    refuse_divided(model, others, micro_batches=count, pp=mesh.pp, dp=mesh.dp)
    totals = _over_dp(mesh, [*count_targets(type(model).__name__, tensors), float(rows)])
    runtime.schedule.state.tokens_divided = tokens_divide(model, {**tensors, **others})
    first = _first_row(mesh, rows)
    tensors[ROWS] = torch.arange(first, first + rows, device=next(iter(tensors.values())).device)
    stream.step += 1

    def run(part: Mapping[str, Any], part_rows: Tensor) -> Tensor:
        """The loss of one micro-batch, its means taken over the whole batch."""
        place = stream.at(stream.step, int(part_rows[0]), len(part_rows))
        with place, GlobalMeans(totals[:-1]) if count * mesh.dp > 1 else nullcontext():
            return _loss(runtime.own_forward(model, **part))

    parameters = list(model.parameters())
    with gradients.only_new(parameters):
        if runtime.pipeline is not None:
            loss = _pipelined(runtime.pipeline, run, tensors, others, count)
        else:
            loss = _accumulate(run, tensors, others, count)
        _reduce(model, runtime, parameters)
    return _share(loss, mesh)


def _default_micro_batches(rows: int, mesh: Mesh) -> int:
    """One without a pipeline; else the first divisor of the rows that keeps all stages busy."""
    if mesh.pp == 1:
        return 1
    return next((i for i in range(2 * mesh.pp, rows + 1) if rows % i == 0), rows)


def _over_dp(mesh: Mesh, counts: list[float]) -> list[float]:
    if mesh.dp == 1:
        return counts
    total = torch.tensor(counts, dtype=torch.float64)
    dist.all_reduce(total, group=mesh.group("dp"))
    return total.tolist()


def _first_row(mesh: Mesh, rows: int) -> int:
    """Global index of our first row: dp ranks may hold different numbers of rows."""
    if mesh.dp == 1:
        return 0
    each = [torch.zeros(1, dtype=torch.int64) for _ in range(mesh.dp)]
    dist.all_gather(each, torch.tensor([rows]), group=mesh.group("dp"))
    return int(sum(each[: mesh.coord("dp")]))


def _pipelined(
    pipeline: Pipeline, run: Callable, tensors: dict, others: dict, count: int
) -> Tensor:
    """The step of the stages; what a stage raises comes as it was, not as torch wraps it."""
    if not any(name in tensors for name in LABELS):
        raise _no_loss(f"found no labels among {[name for name in tensors if name != ROWS]}")
    try:
        return pipeline_step(pipeline, run, tensors, others, count)
    except RuntimeError as error:
        cause = error.__cause__ if "failed to run" in str(error).lower() else None
        if cause is None:
            raise
    raise cause


def _no_loss(problem: str) -> SlapoError:
    return SlapoError("train_step", "batch", f"no loss: {problem}", "put labels into the batch")


def _loss(output: Any) -> Tensor:
    loss = getattr(output, "loss", None)
    if loss is None:
        raise _no_loss("the model returned none")
    return loss.float()


def _accumulate(run: Callable, tensors: dict[str, Tensor], others: dict, count: int) -> Tensor:
    """Micro-batches one after the other, without a pipeline."""
    total: Any = 0.0
    for i in range(count):
        part = {k: v.tensor_split(count)[i] for k, v in tensors.items()}
        rows = part.pop(ROWS)
        loss = run({**part, **others}, rows)
        loss.backward()
        total = total + loss.detach()
    return total


def _reduce(model: Any, runtime: Runtime, parameters: list[nn.Parameter]) -> None:
    """Sum gradients over tied stages, over tp where they are partial, and over dp."""
    named = dict(model.named_parameters())
    for name, group in (*runtime.ties, *runtime.replicas):
        gradients.all_reduce_gradients([named[name]], group)
    state = runtime.schedule.state
    names = state.partial_gradients | (state.sequence_gradients if state.tokens_divided else set())
    partial = [named[n] for n in sorted(names) if n in named]
    gradients.all_reduce_gradients(partial, model.mesh.group("tp") if partial else None)
    gradients.all_reduce_gradients(parameters, model.mesh.group("dp"))


def _share(loss: Tensor, mesh: Mesh) -> Tensor:
    """The global loss on every rank: terms of all micro-batches were divided by global counts."""
    loss = loss.detach().clone()
    for mesh_dim in ("pp", "dp"):
        if mesh.size(mesh_dim) > 1:
            dist.all_reduce(loss, group=mesh.group(mesh_dim))
    return loss
