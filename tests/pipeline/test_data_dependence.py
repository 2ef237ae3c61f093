"""Pipelines of data-dependent forwards: cut where all micro-batches take one path, refused elsewhere."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten

from slapo_zoo.errors import ScheduleError
from slapo_zoo.pipeline.dataflow import Call, Shape
from slapo_zoo.pipeline.dry_run import dry_run
from slapo_zoo.pipeline.pipeline_runtime import Pipeline
from slapo_zoo.pipeline.stages import keep_stages


class Chooser(nn.Module):
    """Block that selects rows by computed values."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        return y.index_put(((y.sum(-1) > 0).nonzero()[:, 0],), torch.ones(()))


class Looker(nn.Module):
    """Model of two blocks, of which the second gets only the rows that an input marks."""

    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList([Chooser(), Chooser()])

    def forward(self, x, mask):
        x = self.h[0](x)
        if mask.sum().item() > 1:
            x = x[mask]
        return self.h[1](x)


class Sized(Looker):
    """Model whose second block gets as many rows as an input marks, counted with a constant of two elements."""

    def forward(self, x, mask):
        x = self.h[0](x)
        return self.h[1](x[: (mask.sum() * torch.tensor([1, 1])).tolist()[1]])


def found_for(mask, cls=Looker):
    mode = FakeTensorMode()
    with mode:
        model = cls()
    own = model.h[0].forward
    found = dry_run(model, ["h.0", "h.1"], mode, {"x": torch.ones(3, 4), "mask": mask})
    assert model.h[0].forward == own
    return found


def calls_of(mask):
    return found_for(mask)[0]


def test_dry_run_is_reused_for_another_batch_only_if_the_forward_reads_equal_values():
    _, reads = found_for(torch.tensor([True, True, False]))
    assert reads
    assert len(reads.operations) == 3, "sum, item and the number of marked rows; not all operators"
    for mask, same in [((0, 1, 1), True), ((1, 1, 1), False), ((0, 0, 1), False)]:
        assert reads.hold({"x": torch.zeros(3, 4), "mask": torch.tensor(mask).bool()}) == same


def test_dry_run_knows_numbers_that_follow_from_inputs_and_constants():
    calls, reads = found_for(torch.tensor([True, True, False]), Sized)
    assert [call.leaves[0].shape for call in calls] == [(3, 4), (2, 4)]
    for mask, same in [((0, 1, 1), True), ((1, 1, 1), False)]:
        assert reads.hold({"x": torch.zeros(3, 4), "mask": torch.tensor(mask).bool()}) == same


def test_dry_run_of_a_data_dependent_forward_marks_block_output_shapes_as_assumed():
    calls = calls_of(torch.tensor([True, True, False]))
    assert [call.leaves[0].shape for call in calls] == [(3, 4), (2, 4)]
    assert all(call.guessed and call.leaves[0].requires_grad for call in calls)
    assert [call.leaves[0].shape for call in calls_of(torch.tensor([True, False, False]))] == [
        (3, 4)
    ] * 2


def test_block_output_whose_shape_differs_from_the_assumed_shape_raises():
    leaves, spec = tree_flatten(torch.zeros(2, 3))
    call = Call("h.0", spec, (Shape((2, 3), torch.float32, True),), frozenset(), guessed=True)
    call.check(leaves[0])
    for other in (torch.zeros(2, 4), (torch.zeros(2, 3),)):
        with pytest.raises(ScheduleError, match="the shapes depend on data"):
            call.check(other)


def test_micro_batches_that_need_different_tensors_between_stages_are_refused():
    looking = SimpleNamespace(depends_on_data=True, plans=lambda part: part["n"])
    assert Pipeline.plans_of_all(looking, [{"n": 1}, {"n": 1}]) == 1
    with pytest.raises(ScheduleError, match="differ between micro-batches"):
        Pipeline.plans_of_all(looking, [{"n": 1}, {"n": 2}])


def test_computation_with_a_weight_of_another_pipeline_stage_raises():
    """torch adds a real tensor and one without data without an error, so the wrong result would be silent."""
    with torch.device("meta"):
        unit = Chooser().half()
        unit.register_buffer("rows", torch.arange(3), persistent=False)
    root = nn.ModuleDict({"a": unit, "b": nn.Linear(2, 2)})
    keep_stages(root, {"a": (0,), "b": (1,)}, [1])
    weight = root["a"].linear.weight
    assert (weight.shape, weight.dtype) == ((4, 4), torch.float16)
    weight.copy_(torch.ones(4, 4))  # lost, as nobody reads it here
    assert (weight.t() / 2).unit == "a.linear.weight"
    with pytest.raises(ScheduleError, match=r"a.linear.weight: pipeline: found a computation with"):
        torch.ones(4, 4).add_(weight.t())
    with pytest.raises(ScheduleError, match=r"a.linear: pipeline: found a call of this module"):
        root["a"].linear(torch.ones(4))
    assert "a.rows" in dict(root.named_buffers())  # computed on every stage


class Router(nn.Module):
    """Model that converts a layer in its forward, as the routers of mixtures of experts do."""

    def __init__(self):
        super().__init__()
        self.classifier = nn.Linear(4, 4)

    def forward(self, x):
        self.classifier = self.classifier.to(torch.float64)
        return self.classifier(x.double())


def test_dry_run_follows_a_forward_that_converts_its_own_weights_and_restores_them():
    mode = FakeTensorMode()
    with mode:
        model = Router()
    before = model.classifier.weight
    calls, _ = dry_run(model, ["classifier"], mode, {"x": torch.ones(2, 4)})
    assert [call.leaves[0].dtype for call in calls] == [torch.float64]
    assert model.classifier.weight is before
    assert "_apply" not in vars(model.classifier)
