"""Evaluation on held-out rows, and the record of the best evaluation so far."""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slapo_zoo.cli.training.contrastive import InBatchNegatives
from slapo_zoo.cli.training.options import TrainOptions
from slapo_zoo.parallel.losses.loss_means import count_targets


class Best:
    """Record of the best evaluation so far, and of the number of evaluations since.

    Args:
        metric: "loss", where less is better, or "accuracy"; between equal values the smaller loss wins.
    """

    def __init__(self, metric: str):
        self.metric = metric
        self.value: float | None = None
        self.loss = math.inf
        self.step = self.since = 0

    def judge(self, step: int, found: Mapping[str, float]) -> bool:
        """Return whether the evaluation `found` after `step` is the best so far, and record it if so."""
        value, loss = found[self.metric], found.get("loss", math.inf)
        sign = -1 if self.metric == "loss" else 1
        before = (-math.inf, 0.0) if self.value is None else (sign * self.value, -self.loss)
        if math.isfinite(value) and (sign * value, -loss) > before:
            self.value, self.loss, self.step, self.since = value, loss, step, 0
            return True
        self.since += 1
        return False

    def __str__(self) -> str:
        return f"step {self.step}, {self.metric} {self.value:.4g}, loss {self.loss:.4g}"

    def state(self) -> dict[str, Any]:
        """Return the record as data for a checkpoint."""
        loss = self.loss if math.isfinite(self.loss) else None  # as JSON
        return {"value": self.value, "loss": loss, "step": self.step, "since": self.since}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Restore the record from a result of `state`; None changes nothing."""
        if state is not None:
            self.value, self.step, self.since = state["value"], state["step"], state["since"]
            self.loss = math.inf if state.get("loss") is None else state["loss"]


def evaluate(model: Any, batches: Any, options: TrainOptions) -> dict[str, float]:
    """Return mean "loss" and "accuracy" over all labels of the held-out rows; {} without such rows.

    A collective call. The result is the same on every mesh, and random states of training do not change.

    Args:
        model: model that AutoScheduledModel loaded.
        batches: batches of the held-out rows, or None.
        options: options of the run.
    """
    if batches is None:
        return {}
    mesh, device = model.mesh, next(iter(model.parameters())).device
    sums = torch.zeros(3, dtype=torch.float64)  # of losses, targets, hits
    model.eval()
    try:
        for number in range(batches.in_order(options.eval_batches)):
            part = batches.part_in_order(number, mesh.coord("batch"), mesh.size("batch"))
            batch = {name: t.to(device) for name, t in part.items()}
            sums += _pairs(model, batch) if batches.task.couples else _judge(model, batch)
    finally:
        model.train()
    if (group := mesh.group("batch")) is not None:
        shared = sums.to(device)
        dist.all_reduce(shared, group=group)
        sums = shared.cpu()
    loss, targets, hits = sums.tolist()
    return {"loss": loss / targets, "accuracy": hits / targets}


@torch.no_grad()
def _judge(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return [sum of losses, number of labels, number of right predictions] for this dp rank's rows of a batch."""
    from slapo_zoo.model.step.runtime import takes_cache

    cache = {"use_cache": False} if takes_cache(model._slapo) else {}  # masks of documents need it
    output = model(**batch, **cache)
    targets = float(count_targets(model._slapo.head_name(model), batch)[0])
    if not targets:
        return torch.zeros(3, dtype=torch.float64)
    hits = _hits(output.logits, batch["labels"], model)
    return torch.tensor([float(output.loss) * targets, targets, hits], dtype=torch.float64)


@torch.no_grad()
def _pairs(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return [sum of losses, number of pairs, number of anchors nearest to their own positive] on this dp rank."""
    loss, hits = InBatchNegatives(model.mesh).judged(model(**batch), batch)
    count = len(batch["input_ids"]) // 2
    return torch.tensor([float(loss) * count, count, hits], dtype=torch.float64)


def _hits(logits: Tensor, labels: Tensor, model: Any) -> float:
    from slapo_zoo.parallel.losses.heads import head_of

    if head_of(model._slapo.head_name(model)).shifts:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return float(((logits.argmax(-1) == labels) & (labels != -100)).sum())
