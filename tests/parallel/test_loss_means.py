"""Mean losses over micro-batches: their targets are those that were counted."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from slapo_zoo import MeshError
from slapo_zoo.parallel.losses.loss_means import GlobalMeans


@pytest.mark.parametrize("real", [3, 2])
def test_loss_that_ignores_more_labels_than_were_counted_is_refused(real):
    """BioGPT's token classification, for example, ignores labels at padding, whatever they are."""
    labels, logits = torch.tensor([0, 1, 1]), torch.zeros(3, 2)
    means = GlobalMeans([6.0], {"labels": labels.repeat(2)})
    targets = labels.where(torch.arange(3) < real, -100)
    words = r"compares 2 targets .* labels have 3 other than -100"
    refused = pytest.raises(MeshError, match=words) if real < 3 else nullcontext()
    with refused, means.over(SimpleNamespace(), {"labels": labels}, [torch.tensor(3)]):
        loss = functional.cross_entropy(logits, targets)
        assert loss.item() == pytest.approx(math.log(2) / 2)


@pytest.mark.parametrize("added", [False, True])
def test_model_loss_with_a_term_that_is_no_mean_over_labels_is_refused(added):
    """Routers of experts, for example, add a load-balancing loss to that of the tokens."""
    labels, logits = torch.tensor([0, 1, 1]), torch.zeros(3, 2, requires_grad=True)
    means = GlobalMeans([6.0], {"labels": labels.repeat(2)})
    with means.over(SimpleNamespace(), {"labels": labels}):
        loss = functional.cross_entropy(logits, labels)
        loss = loss + logits.exp().mean() if added else (loss + loss.to(loss)) / 2
    refused = pytest.raises(MeshError, match="adds a term that is no mean over targets")
    with refused if added else nullcontext():
        means.require_sum(loss)
