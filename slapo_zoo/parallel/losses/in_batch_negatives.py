"""Contrastive loss of a retrieval model: texts of one pair get similar embeddings, texts of other pairs do not."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from slapo_zoo.parallel.collectives import all_gather
from slapo_zoo.parallel.mesh import Mesh

SCALE = 20.0  # factor of the cosines, the usual 1 / 0.05


class InBatchNegatives:
    """Contrastive loss (arXiv:1705.00652): cross entropy of choosing an anchor's own positive among the positives of
    all pairs of the step.

    rewrite:  anchor, positive, anchor, ... [2n, t, d] --> cross entropy of n * dp classes

    Args:
        mesh: mesh of the model; positives are gathered from all dp ranks.
    """

    def __init__(self, mesh: Mesh):
        self.rank = mesh.coord("batch")
        self.group = mesh.group("batch")

    def __call__(self, output: Any, batch: dict[str, Any]) -> Tensor:
        """Return the mean loss over this dp rank's anchors, rows 0, 2, ... of `batch`; `output` is the model's."""
        return self.judged(output, batch)[0]

    def judged(self, output: Any, batch: dict[str, Any]) -> tuple[Tensor, int]:
        """Return (mean loss, number of anchors whose nearest positive is their own) for the pairs of this dp rank.

        `output`, with `last_hidden_state`, is the model's for `batch`, whose rows are anchor, positive, anchor, ...
        """
        x = mean_pooled(output.last_hidden_state, batch["attention_mask"])
        anchors, own = x[0::2], x[1::2]
        positives = all_gather(own.contiguous(), 0, self.group)
        cosines = anchors @ positives.T
        wanted = torch.arange(len(own), device=x.device) + self.rank * len(own)
        loss = functional.cross_entropy(SCALE * cosines, wanted)
        return loss, int((cosines.argmax(-1) == wanted).sum())


def mean_pooled(hidden: Tensor, mask: Tensor) -> Tensor:
    """Return [rows, d]: the mean of `hidden` [rows, t, d] over the tokens with a 1 in `mask` [rows, t], scaled to length 1."""
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    mean = (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)
    return functional.normalize(mean.float(), dim=-1)
