"""One training step on any mesh: micro-batches, the pipeline, and the sums of gradients."""

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slapo_zoo.model.data_parallel import DataParallel
from slapo_zoo.errors import MeshError, SlapoError
from slapo_zoo.model.input_errors import explained
from slapo_zoo.model.batch_check import check_batch
from slapo_zoo.parallel.loss_means import LABELS, GlobalMeans, count_targets
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.pipeline.runtime import ROWS, Pipeline, share_output, split_batch
from slapo_zoo.model.runtime import (
    Runtime,
    count_rows,
    real_tokens,
    refuse_divided,
    takes_cache,
    tokens_divide,
)
from slapo_zoo.parallel.vocab_parallel import VocabLogits


def train_step(
    model: Any, batch: Mapping[str, Any], micro_batches: int | None, return_logits: bool = False,
    targets: Sequence[float] | None = None,
) -> Any:  # fmt: skip
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
    _require_head(model.unscheduled_class, batch)
    count = _micro_batches(runtime, mesh, rows, micro_batches)
    refuse_divided(model, others, micro_batches=count, pp=mesh.pp, dp=mesh.dp)
    name = model.unscheduled_class.__name__
    counts = count_targets(name, tensors) if targets is None else targets
    totals = _over_dp(mesh, [*counts, float(rows)])
    is_part = count * mesh.dp > 1 or targets is not None
    runtime.schedule.state.tokens_divided = tokens_divide(model, {**tensors, **others})
    first = _first_row(mesh, rows)
    step, kept = stream.step + 1, LogitsKept() if return_logits else None
    check_batch(mesh, tensors, step, model.input_check_interval)
    tensors[ROWS] = torch.arange(first, first + rows, device=next(iter(tensors.values())).device)

    def run(part: Mapping[str, Any], part_rows: Tensor) -> Tensor:
        """The loss of one micro-batch, its means taken over the whole batch."""
        place = stream.at(step, int(part_rows[0]), len(part_rows))
        runtime.schedule.state.real_tokens = real_tokens(model, part)
        means = GlobalMeans(totals[:-1]) if is_part else nullcontext()
        with explained(model, part), place, means:
            output = runtime.data_parallel.run(model, dict(part))
        if kept is not None:
            kept.add(int(part_rows[0]), output)
        return _loss(output)

    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with runtime.data_parallel.new_gradients(list(parameters.values())):
        if runtime.pipeline is not None:
            loss = _pipelined(runtime, run, tensors, others, count)
        else:
            loss = _accumulate(runtime.data_parallel, run, tensors, others, count)
        _reduce(model, runtime, parameters)
    loss = _share(loss, mesh)
    stream.step = step  # a step that failed has drawn nothing
    return loss if kept is None else kept.output(loss, runtime.pipeline)


def _require_head(cls: Any, batch: Mapping[str, Any]) -> None:
    """A model without a head would swallow the labels among its **kwargs."""
    if "labels" in batch and "labels" not in inspect.signature(cls.forward).parameters:
        problem = f"{cls.__name__} has no head: its forward takes no labels, so there is no loss"
        hint = 'name a class that has one when loading, e.g. auto_class="AutoModelForCausalLM"'
        raise SlapoError("train_step", "labels", problem, hint)


class LogitsKept:
    """The logits of all micro-batches, on the rank of the last stage.

    rewrite:  logits of micro-batch 0, 1, ...  -->  logits of the batch, on every pp and tp rank
    """

    def __init__(self) -> None:
        self.cls: Any = None
        self.parts: dict[int, dict[str, Tensor]] = {}

    def add(self, first_row: int, output: Any) -> None:
        """Keep what a head returned for the rows from `first_row`."""
        self.cls = type(output)
        found = {k: v for k, v in output.items() if k.endswith("logits") and v is not None}
        whole = {k: v.gathered() if isinstance(v, VocabLogits) else v for k, v in found.items()}
        self.parts[first_row] = {k: v.detach() for k, v in whole.items()}

    def output(self, loss: Tensor, pipeline: Pipeline | None) -> Any:
        """The model's own output object with the loss and the logits of all rows."""
        parts = [self.parts[row] for row in sorted(self.parts)]
        names = parts[0] if parts else ()
        whole = {name: torch.cat([part[name] for part in parts]) for name in names}
        here = self.cls(loss=loss, **whole) if self.cls else None
        return here if pipeline is None else share_output(pipeline, here, loss.device)


def _micro_batches(runtime: Runtime, mesh: Mesh, rows: int, asked: int | None) -> int:
    """How many equal parts the rows are divided into: asked for, or the default."""
    count = runtime.micro_batches if asked is None else asked
    if count is None and runtime.batch_statistics and mesh.pp > 1:
        warnings.warn(
            "BatchNorm takes its statistics per micro-batch: one is used, as in one process, and the "
            f"{mesh.pp} stages take turns; pass micro_batches= to let them overlap",
            stacklevel=4,
        )
        count = 1
    count = _default_micro_batches(rows, runtime.pipeline) if count is None else count
    legal = [i for i in range(1, rows + 1) if rows % i == 0]
    if count not in legal:
        problem = f"{rows} rows cannot be divided into {count} equal micro-batches"
        raise MeshError("train_step", "micro_batches", problem, f"legal numbers: {legal}")
    return count


def _default_micro_batches(rows: int, pipeline: Pipeline | None) -> int:
    """One without a pipeline; else the first number that keeps all stages busy in its order."""
    if pipeline is None:
        return 1
    places = pipeline.places
    if places.custom is not None:
        return places.custom.micro_batches
    legal = [i for i in range(1, rows + 1) if rows % i == 0 and places.admits(i)]
    return next((i for i in legal if i >= 2 * places.pp), legal[-1] if legal else rows)


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


def _pipelined(runtime: Runtime, run: Callable, tensors: dict, others: dict, count: int) -> Tensor:
    if not any(name in tensors for name in LABELS):
        raise _no_loss(f"found no labels among {[name for name in tensors if name != ROWS]}")
    return runtime.data_parallel.pipeline_step(runtime.pipeline, run, tensors, others, count)


def _no_loss(problem: str) -> SlapoError:
    return SlapoError("train_step", "batch", f"no loss: {problem}", "put labels into the batch")


def _loss(output: Any) -> Tensor:
    loss = getattr(output, "loss", None)
    if loss is None:
        raise _no_loss("the model returned none")
    return loss.float()


def _accumulate(
    engine: DataParallel, run: Callable, tensors: dict[str, Tensor], others: dict, count: int
) -> Tensor:
    """Micro-batches one after the other, without a pipeline."""
    total: Any = 0.0
    for i in range(count):
        part = {k: v.tensor_split(count)[i] for k, v in tensors.items()}
        rows = part.pop(ROWS)
        with engine.micro_batch(is_last=i == count - 1):
            loss = run({**part, **others}, rows)
            engine.backward(loss)
        total = total + loss.detach()
    return total


def _reduce(model: Any, runtime: Runtime, parameters: dict[str, nn.Parameter]) -> None:
    """Sum gradients over tied stages, over tp where they are partial, and over dp."""
    engine = runtime.data_parallel
    for name, group in (*runtime.ties, *runtime.replicas):
        engine.sum_over_tp(parameters, [name], group)
    state = runtime.schedule.state
    names = state.partial_gradients | (state.sequence_gradients if state.tokens_divided else set())
    engine.sum_over_tp(parameters, sorted(names), model.mesh.group("tp"))
    engine.sum_over_dp(list(parameters.values()), model.mesh)


def _share(loss: Tensor, mesh: Mesh) -> Tensor:
    """The global loss on every rank: terms of all micro-batches were divided by global counts."""
    loss = loss.detach().clone()
    for mesh_dim in ("pp", "dp"):
        if mesh.size(mesh_dim) > 1:
            dist.all_reduce(loss, group=mesh.group(mesh_dim))
    return loss
