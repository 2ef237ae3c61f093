"""Evaluation of a model on held-out rows, with the same result on every mesh."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slapo_zoo.data.batches import Batches
from slapo_zoo.hf.example_inputs import accepts
from slapo_zoo.parallel.losses.heads import head_of
from slapo_zoo.parallel.losses.in_batch_negatives import InBatchNegatives
from slapo_zoo.parallel.losses.loss_means import count_targets
from slapo_zoo.parallel.ranks.emulation import on_each_rank


@on_each_rank
def evaluate(model: Any, batches: Batches, most: int | None = None) -> dict[str, float]:
    """Return {"loss": mean over the labels of held-out rows, "accuracy": share of labels that have the largest logit}.

    For pairs of texts accuracy is the share of anchors to which their own positive is the nearest. A collective call of
    all ranks; the result is the same on every mesh. Random states do not change; the model is put in training mode.

    Args:
        model: a scheduled model.
        batches: the held-out rows, and the task (causal language model, ...) that makes batches of them.
        most: maximum number of batches to evaluate; None evaluates all held-out rows.
    """
    mesh, device = model.mesh, next(iter(model.parameters())).device
    sums = torch.zeros(3, dtype=torch.float64)  # of losses, targets, hits
    model.eval()
    try:
        for number in range(batches.evaluation_batches(most)):
            part = batches.evaluation_part(number, mesh.coord("batch"), mesh.size("batch"))
            batch = {name: t.to(device) for name, t in part.items()}
            sums += (_evaluate_pairs if batches.task.couples else _evaluate)(model, batch)
    finally:
        model.train()
    if (group := mesh.group("batch")) is not None:
        shared = sums.to(device)
        dist.all_reduce(shared, group=group)
        sums = shared.cpu()
    loss, targets, hits = sums.tolist()
    return {"loss": loss / targets, "accuracy": hits / targets}


@torch.no_grad()
def _evaluate(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Evaluate this dp rank's rows; return tensor [sum of losses, number of labels, labels with the largest logit]."""
    cache = {"use_cache": False} if accepts(model.unscheduled_class, "use_cache") else {}
    output = model(**batch, **cache)
    targets = float(count_targets(model._slapo.head_name(model), batch)[0])
    if not targets:
        return torch.zeros(3, dtype=torch.float64)
    hits = _hits(output.logits, batch["labels"], model)
    return torch.tensor([float(output.loss) * targets, targets, hits], dtype=torch.float64)


@torch.no_grad()
def _evaluate_pairs(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Evaluate this dp rank's pairs (anchor, positive) of texts; return a tensor [3]: sum of losses, number of pairs,
    number of anchors to which their own positive is the nearest of all positives.
    """
    loss, hits = InBatchNegatives(model.mesh).judged(model(**batch), batch)
    count = len(batch["input_ids"]) // 2
    return torch.tensor([float(loss) * count, count, hits], dtype=torch.float64)


def _hits(logits: Tensor, labels: Tensor, model: Any) -> float:
    if head_of(model._slapo.head_name(model)).shifts:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return float(((logits.argmax(-1) == labels) & (labels != -100)).sum())
