"""Functions of the original Slapo's API, on plain modules."""

import logging
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slapo_zoo
from slapo_zoo.errors import ScheduleError
from slapo_zoo.parallel.mesh import Mesh


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(x)


def test_build_returns_a_model_with_the_outputs_of_the_original_module():
    torch.manual_seed(0)
    model, ids = Net(), torch.arange(6).view(2, 3)
    want = model(ids)
    sch = slapo_zoo.create_schedule(model)
    sch["blocks.*"].checkpoint()
    opt_model = slapo_zoo.build(sch)
    torch.testing.assert_close(opt_model(ids), want)
    assert slapo_zoo.ScheduleMetadata.of(sch).tie_weights == {"head.weight": "embed.weight"}
    assert slapo_zoo.ScheduleMetadata.of(sch).primitives == {"checkpoint": 1}


def test_create_schedule_with_the_path_of_a_submodule_is_refused():
    with pytest.raises(ScheduleError, match="starts at the root"):
        slapo_zoo.create_schedule(Net(), path="blocks.0")


@pytest.mark.filterwarnings("ignore::slapo_zoo.model.missing_sums.ScheduleWarning")  # never run
@pytest.mark.parametrize("include_buffers", [False, True])
def test_models_made_on_meta_are_initialized_with_the_same_weights_on_every_layout(include_buffers):
    def built(tp, rank):
        with slapo_zoo.init_empty_weights(include_buffers=include_buffers):
            model = Net()
        assert all(p.is_meta for p in model.parameters())
        if include_buffers:  # a parameter that is set twice is tied again, as in transformers
            model.head.weight = model.embed.weight
        sch = slapo_zoo.create_schedule(model, mesh=Mesh(tp=tp, rank=rank), seed=5)
        sch["blocks.0"].shard("weight", 0)
        return slapo_zoo.build(sch)

    whole, parts = built(1, 0), [built(2, r) for r in range(2)]
    both = torch.cat([p.blocks[0].weight for p in parts])
    assert torch.equal(both, whole.blocks[0].weight)
    assert whole.head.weight is whole.embed.weight
    assert all(torch.equal(p.blocks[1].weight, whole.blocks[1].weight) for p in parts)


def test_build_of_a_meta_model_whose_parameter_has_no_initializer_raises():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    with slapo_zoo.init_empty_weights():
        model = Bare()
    with pytest.raises(ScheduleError, match="nothing initialises 'scale'"):
        slapo_zoo.build(slapo_zoo.create_schedule(model))
    assert torch.equal(slapo_zoo.build(slapo_zoo.create_schedule(model), init_weights=_ones).scale,
                       torch.ones(3))  # fmt: skip


class Slow(nn.Linear):
    """Linear whose construction waits, so that other ranks begin and end theirs meanwhile."""

    def __init__(self):
        time.sleep(0.02 * (1 + dist.get_rank()))
        super().__init__(4, 4)
        time.sleep(0.02)


def parameters_on_meta():
    with slapo_zoo.init_empty_weights():
        return [p.is_meta for p in Slow().parameters()]


def test_threads_that_build_models_on_meta_at_the_same_time_restore_nn_module_afterwards():
    register = nn.Module.register_parameter
    assert slapo_zoo.emulate(parameters_on_meta, mesh=(3, 1, 1)) == [[True, True]] * 3
    assert nn.Module.register_parameter is register


@pytest.mark.parametrize("mesh", [2, (2, 1, 1)])
def test_create_schedule_refuses_a_root_that_is_no_module_and_a_mesh_that_is_no_mesh(mesh):
    for model, where in ((Net(), mesh), (mesh, None)):
        with pytest.raises(ScheduleError, match=r"pass an nn\.Module, and"):
            slapo_zoo.create_schedule(model, mesh=where)


def _ones(module):
    for parameter in module.parameters(recurse=False):
        parameter.fill_(1.0)


def test_analyze_tie_weights_lists_tied_names_and_is_module_list_detects_module_lists():
    model = Net()
    (names,) = slapo_zoo.analyze_tie_weights(model, False).values()
    assert names == {("embed.weight", 0), ("head.weight", 0)}
    (staged,) = slapo_zoo.analyze_tie_weights(model, True).values()
    assert staged == {("weight", 0), ("weight", 2)}
    assert slapo_zoo.is_module_list(model.blocks)
    assert not slapo_zoo.is_module_list(model)


def test_set_random_seed_gives_tp_ranks_a_shared_stream_and_streams_of_their_own():
    assert slapo_zoo.set_random_seed(1, dp_rank=0, pp_rank=1, tp_rank=0) == 101
    assert slapo_zoo.is_random_seed_set()
    first = torch.rand(2)
    with slapo_zoo.get_cuda_rng_tracker().fork():
        own = torch.rand(2)
    slapo_zoo.set_random_seed(1, dp_rank=0, pp_rank=1, tp_rank=1)
    assert torch.equal(torch.rand(2), first)  # alike on tp peers
    with slapo_zoo.get_cuda_rng_tracker().fork():
        assert not torch.equal(torch.rand(2), own)
    slapo_zoo.set_random_seed(1)
    with (
        pytest.raises(ScheduleError, match="set_random_seed"),
        slapo_zoo.get_cuda_rng_tracker().fork(),
    ):
        pass


def test_get_dialect_cls_refuses_unknown_engines_and_get_logger_sets_the_log_level():
    sch = slapo_zoo.create_schedule(Net())
    engine, optimizer = slapo_zoo.init_target_engine(sch, "torch", optimizer="mine")
    assert engine is sch.model
    assert optimizer == "mine"
    assert slapo_zoo.get_dialect_cls("runtime_engine", "nobody", allow_none=True) is None
    with pytest.raises(ScheduleError, match="no runtime_engine for this target"):
        slapo_zoo.get_dialect_cls("runtime_engine", "nobody")
    assert slapo_zoo.get_logger("slapo-test", logging.DEBUG).level == logging.DEBUG
