"""Loss of a retrieval model: a pair's texts are near, and far from those of all other pairs."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from slapo_zoo.parallel.collectives import all_gather
from slapo_zoo.parallel.mesh import Mesh

SCALE = 20.0  # of cosines, the usual 1 / 0.05


class InBatchNegatives:
    """Compare each anchor with the positives of the step, on all dp ranks (arXiv:1705.00652).

    rewrite:  anchor, positive, anchor, ... [2n, t, d] --> cross entropy of n * dp classes

    Args:
        mesh: of the model.
    """

    def __init__(self, mesh: Mesh):
        self.rank = mesh.coord("batch")
        self.group = mesh.group("batch")

    def __call__(self, output: Any, batch: dict[str, Any]) -> Tensor:
        """Return the mean loss over this dp rank's anchors."""
        return self.judged(output, batch)[0]

    def judged(self, output: Any, batch: dict[str, Any]) -> tuple[Tensor, int]:
        """Return the mean loss, and how many anchors are nearest to their own positive."""
        x = mean_pooled(output.last_hidden_state, batch["attention_mask"])
        anchors, own = x[0::2], x[1::2]
        positives = all_gather(own.contiguous(), 0, self.group)
        cosines = anchors @ positives.T
        wanted = torch.arange(len(own), device=x.device) + self.rank * len(own)
        loss = functional.cross_entropy(SCALE * cosines, wanted)
        return loss, int((cosines.argmax(-1) == wanted).sum())


def mean_pooled(hidden: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of the real tokens' states, scaled to length 1."""
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    mean = (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)
    return functional.normalize(mean.float(), dim=-1)
