"""Every pipeline order, on two and four stages' ranks, against plain transformers."""

import itertools

import pytest
import torch
from torch.torch_version import TorchVersion

from parity import Case, checkpoint, compare, references, scheduled
from slapo_zoo.errors import MeshError
from slapo_zoo.pipeline.orders import ORDERS, StageMap, balanced_cuts
from slapo_zoo.pipeline.stages import stages_of

GPT2 = Case("GPT2LMHeadModel", ("tokens",), (("n_layer", 8),))
T5 = Case("T5ForConditionalGeneration", ("tokens",), (("num_layers", 2), ("num_decoder_layers", 2)))  # fmt: skip
ALBERT = Case("AlbertForMaskedLM", ("tokens",), (("num_hidden_layers", 8),))
BERT = Case("BertForMaskedLM", ("tokens",), (("num_hidden_layers", 8),))
RUNS = [
    *((GPT2, order, (1, 2, 1)) for order in ORDERS),
    *((T5, order, (1, 2, 1)) for order in ("gpipe", "interleaved_1f1b", "zbv")),
    *((ALBERT, order, (1, 2, 1)) for order in ("interleaved_1f1b", "zbv")),
    (T5, "1f1b", (1, 4, 1)),
    (GPT2, "interleaved_1f1b", (1, 4, 1)),
    (BERT, "zbv", (1, 4, 1)),
    (BERT, "interleaved_zero_bubble", (2, 2, 1)),
    (GPT2, "looped_bfs", (1, 2, 2)),
]
# test_pipeline_grid.py has GPT-2 on two stages
ALWAYS = ((T5, "zbv", (1, 2, 1)), (GPT2, "interleaved_1f1b", (1, 4, 1)))


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("pipeline")


def run(case, folder, layout, order, micro_batches):
    return scheduled(case, folder, layout, micro_batches=micro_batches, pipeline_order=order)


@pytest.mark.parametrize(
    ("case", "order", "layout"),
    [pytest.param(*run, marks=() if run in ALWAYS else pytest.mark.slow) for run in RUNS],
    ids=lambda x: getattr(x, "cls", str(x)),
)
def test_pipeline_training_has_the_losses_and_gradients_of_plain_transformers(
    case, order, layout, root, threads
):
    folder = checkpoint(case, root)
    truth, plains = references(case, folder)
    count = 4 // layout[2]
    world = layout[0] * layout[1] * layout[2]
    results = threads.run(run, world, case, folder, layout, order, count)
    compare(results[0][0], plains, truth)


def test_parameter_outside_the_transformer_blocks_is_held_by_every_pipeline_stage():
    """CLIP reads `logit_scale` after both towers: on the first stage alone it would not be trained."""
    held = {"vision": (0,), "text": (1, 2)}
    assert stages_of("logit_scale", held) == (0, 1, 2)
    assert stages_of("text.norm.weight", held) == (1, 2)


def test_stage_map_lists_the_pipeline_stages_of_each_rank_for_each_order():
    assert [StageMap.make("zbv", 4, None).stages_of(r) for r in range(4)] == [
        [0, 7],
        [1, 6],
        [2, 5],
        [3, 4],
    ]
    assert StageMap.make("interleaved_1f1b", 2, 3).stages_of(1) == [1, 3, 5]
    assert StageMap.make("1f1b", 1, None).num_stages == 1


@pytest.mark.parametrize("order", [name for name, order in ORDERS.items() if order.splits])
def test_order_with_split_backwards_is_refused_with_a_torch_that_cannot_run_them(
    order, monkeypatch
):
    StageMap.make(order, 2, None)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.12.1+cpu"))
    with pytest.raises(MeshError, match=r"found torch 2\.12\.1.*\n.*install torch 2\.13"):
        StageMap.make(order, 2, None)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: StageMap.make("2f2b", 2, None), "no such order"),
        (lambda: StageMap.make("1f1b", 2, 2), "found 2, the order '1f1b' takes 1"),
        (lambda: StageMap.make("dualpipev", 2, None).check_micro_batches(3), "needs at least 4"),
        (lambda: StageMap.make("interleaved_1f1b", 4, None).check_micro_batches(9), "in 2 equal rounds"),
        (lambda: balanced_cuts([1, 1], [0, 1], 4), "only 2 blocks after which a stage may end"),
    ],
)  # fmt: skip
def test_invalid_numbers_of_pipeline_stages_or_micro_batches_are_refused(make, problem):
    with pytest.raises(MeshError, match=problem):
        make()


def test_expensive_head_moves_the_balanced_pipeline_cut_to_a_later_block():
    """A head as expensive as two blocks moves the cut to a later block."""
    assert balanced_cuts([0, 1, 1, 1, 1, 2], [1, 2, 3, 4], 2) == [3]
    assert balanced_cuts([1] * 12, range(11), 4) == [2, 5, 8]


def test_balanced_pipeline_cuts_minimize_the_largest_stage_cost_over_all_cuts():
    """Compare with all choices of cuts."""
    from itertools import combinations

    costs, may_cut = [3, 1, 4, 1, 5, 9, 2, 6], [1, 2, 3, 4, 5, 6]

    def worst(cuts):
        edges = [0, *(c + 1 for c in cuts), len(costs)]
        return max(sum(costs[a:b]) for a, b in itertools.pairwise(edges))

    for stages in (2, 3, 4):
        best = min(map(worst, combinations(may_cut, stages - 1)))
        assert worst(balanced_cuts(costs, may_cut, stages)) == best


DROPPED = Case("GPT2LMHeadModel", ("tokens",), (("n_layer", 4),), dropout=0.2)


def dropped(folder, order, micro_batches, pp):
    """Losses of some steps with dropout."""
    from parity import STEPS, batch_of
    from slapo_zoo import AutoScheduledModel

    model = AutoScheduledModel.from_pretrained(folder, pp=pp, seed=3, pipeline_order=order).train()
    return [float(model.train_step(batch_of(DROPPED, i), micro_batches)) for i in range(STEPS)]


def test_dropout_masks_are_the_same_in_every_pipeline_order(root, threads):
    folder = checkpoint(DROPPED, root)
    (one,) = threads.run(dropped, 1, folder, "1f1b", 1, 1)
    for order in ("gpipe", "zbv"):
        for losses in threads.run(dropped, 2, folder, order, 4, 2):
            assert losses == pytest.approx(one, rel=1e-5)
