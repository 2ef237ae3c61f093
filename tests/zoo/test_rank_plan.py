"""The plan of a rank: one entry per tensor, equal on every rank; its golden text is in test_golden.py."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slapo_zoo import Mesh
from slapo_zoo.parallel.rank_plan import DATA, PARTIAL, REPLICAS, TIED, Sum
from slapo_zoo.zoo.outline import Outline

_spec = importlib.util.spec_from_file_location("golden", Path(__file__).parent / "test_golden.py")
golden = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(golden)
MESHES = ((1, 1, 1), (2, 1, 1), (2, 2, 1), (4, 1, 2), (1, 3, 1))


def outline_of(family, tp, pp, dp=1, rank=0, **options):
    config, mesh = golden.config_of(family), Mesh(tp, pp, dp, rank)
    return Outline(config, golden.main_class(family), mesh, torch.float32, **options)


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5", "bert"])
@pytest.mark.parametrize("tp,pp,dp", MESHES)
def test_sharding_plan_is_equal_on_all_ranks_and_has_the_local_parameter_shapes(family, tp, pp, dp):
    digests = set()
    for rank in range(tp * pp * dp):
        outline = outline_of(family, tp, pp, dp, rank)
        digests.add(outline.plan.digest())
        shapes = {n: tuple(p.shape) for n, p in outline.model.named_parameters()}
        assert shapes == {n: outline.plan.of(n).held_shape(outline.mesh) for n in shapes}
    assert len(digests) == 1


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5", "albert"])
@pytest.mark.parametrize("tp,pp,dp", MESHES)
def test_groups_of_each_planned_gradient_all_reduce_are_disjoint_and_cover_their_ranks(
    family, tp, pp, dp
):
    plan = outline_of(family, tp, pp, dp, sequence_parallel=tp > 1).plan
    for one in {one for row in plan.tensors.values() for one in row.sum_over}:
        of = {rank: one.ranks(replace(plan.mesh, rank=rank)) for rank in range(tp * pp * dp)}
        assert all(
            rank in ranks and of[other] == ranks for rank, ranks in of.items() for other in ranks
        )
    assert all(len(ranks) > 1 for ranks in plan.groups())


def test_sharding_plan_lists_the_gradient_all_reduces_of_tied_and_replicated_parameters():
    gpt2 = outline_of("gpt2", 2, 2, 2, sequence_parallel=True).plan
    wte, norm = gpt2.of("transformer.wte.weight"), gpt2.of("transformer.ln_f.weight")
    assert [one.why for one in wte.sum_over] == [TIED, DATA]
    assert wte.stages == (0, 1)
    assert gpt2.of("lm_head.weight").tied_to == "transformer.wte.weight"
    assert norm.sums(tokens_sharded=False) == [Sum("dp", DATA)]
    ln = gpt2.of("transformer.h.0.ln_1.weight")
    assert [one.why for one in ln.sums(True)] == [PARTIAL, DATA]
    assert [one.why for one in ln.sums(False)] == [DATA]
    llama = outline_of("llama", 4, 1).plan
    (shared,) = llama.of("model.layers.0.self_attn.k_proj.weight").sum_over
    assert (shared.why, shared.parts) == (REPLICAS, ((0, 1), (2, 3)))
    assert llama.groups() == [(0, 1), (2, 3)]


@pytest.mark.parametrize(
    ("family", "tp", "pp"), [("gpt2", 2, 2), ("llama", 4, 2), ("t5", 2, 3), ("albert", 2, 3)]
)
def test_ranks_of_a_gradient_all_reduce_plan_the_same_tensors_in_the_same_order(family, tp, pp):
    """Ranks with another order of all-reduces would deadlock."""
    took = {}
    for rank in range(tp * pp):
        plan = outline_of(family, tp, pp, 1, rank, sequence_parallel=tp > 1).plan
        sums = plan.sums_of([row.name for row in plan.mine()], TIED, REPLICAS, PARTIAL)
        took[rank] = [(one.ranks(plan.mesh), [plan.saved_as(n) for n in names])
                      for one, names in sums.items()]  # fmt: skip
    assert any(took.values())
    for rank, sums in took.items():
        for other, theirs in took.items():
            shared = [one for one in sums if other in one[0]]
            assert shared == [one for one in theirs if rank in one[0]]


def test_sharding_plan_digest_changes_with_shape_stage_tie_or_sharding_of_a_parameter():
    plan = outline_of("gpt2", 2, 1).plan
    row = plan.of("transformer.ln_f.weight")
    for change in ({"shape": (31,)}, {"stages": (1,)}, {"tied_to": "x"}, {"row_shards": 2}):
        assert plan.having([replace(row, **change)]).digest() != plan.digest()
    assert replace(plan, mesh=replace(plan.mesh, rank=1)).digest() == plan.digest()
