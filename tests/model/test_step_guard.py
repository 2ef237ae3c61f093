"""Gradients scaled differently by ranks are refused before the optimizer steps; equal changes are accepted."""

import pytest
import torch

from parity import Case, batch_of, checkpoint
from slapo_zoo import AutoScheduledModel, emulate
from slapo_zoo.errors import MeshError
from slapo_zoo.model.gradients.step_guard import StepGuard
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.rank_plan import RankPlan

GPT2 = Case("GPT2LMHeadModel", ("tokens",))


def clip_all(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def clip_some(model):
    torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.ndim > 1], 1e-3)


def clip_each(model):
    for p in model.parameters():
        torch.nn.utils.clip_grad_norm_([p], 1e-3)


def clip_values(model):
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-4)


def halve_some(model):
    for name, p in model.named_parameters():
        if "mlp" in name:
            p.grad.mul_(0.5)


def clip_globally(model):
    model.clip_grad_norm_(1e-3)


def step(folder, change, layout):
    model = AutoScheduledModel.from_pretrained(folder, **layout).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train_step(batch_of(GPT2))
    change(model)
    try:
        optimizer.step()
    except MeshError as error:
        return str(error)
    return ""


LAYOUTS = [{"tp": 2}, {"pp": 2}, {"tp": 2, "precision": "bf16-pure"}]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("change", [clip_all, clip_some, clip_each])
def test_gradients_clipped_by_norms_of_local_shards_raise(change, layout, ranks, tmp_path):
    """With pp, clipping each parameter by its own norm is legitimate, so clipping a part of a stage raises nothing."""
    folder = checkpoint(GPT2, tmp_path)
    fine = layout.get("tp", 1) == 1 and change is not clip_all
    for said in ranks.run(step, 2, folder, change, layout):
        assert fine or "scaled their gradients" in said


def step_of_two(folder):
    """Train two models by one optimizer, and clip the second by this rank's shards."""
    models = [AutoScheduledModel.from_pretrained(folder, tp=2).train() for _ in range(2)]
    optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.1)
    for model in models:
        model.train_step(batch_of(GPT2))
    clip_all(models[1])
    try:
        optimizer.step()
    except MeshError as error:
        return str(error)
    return ""


def test_gradients_of_the_second_model_of_an_optimizer_are_checked_too(tmp_path):
    for said in emulate(step_of_two, checkpoint(GPT2, tmp_path), mesh=(2, 1, 1)):
        assert "scaled their gradients" in said


@pytest.mark.one_in(3)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("change", [clip_values, halve_some, clip_globally])
def test_gradients_changed_equally_on_all_ranks_before_the_optimizer_step_raise_nothing(
    change, layout, ranks, tmp_path
):
    folder = checkpoint(GPT2, tmp_path)
    assert ranks.run(step, 2, folder, change, layout) == ["", ""]


@pytest.mark.parametrize(("elements", "known"), [(1, False), (3, False), (64, True)])
def test_check_for_scaled_gradients_ignores_tensors_of_few_elements(elements, known):
    """A tensor of one element that was clipped by value looks as if it were scaled."""
    p = torch.nn.Parameter(torch.ones(elements))
    p.grad = torch.full((elements,), 2.0)
    guard = StepGuard(Mesh(tp=2))
    guard.interval = 0  # there is no other rank to compare with
    guard.complete({"p": p}, RankPlan(Mesh(tp=2), {}), averaged=False)
    torch.nn.utils.clip_grad_value_([p], 0.5)
    assert bool(guard._factors()[0, 1]) is known
