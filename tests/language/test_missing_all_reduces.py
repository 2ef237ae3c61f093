"""Missing all-reduces over tp are reported before training."""

import warnings

import pytest
import torch
import transformers

from heads import HEADS
from parity import tiny_config
from slapo_zoo import AutoScheduledModel, Mesh, Schedule, emulate
from slapo_zoo.errors import ScheduleError
from slapo_zoo.model.missing_sums import ScheduleWarning, missing_sums
from slapo_zoo.zoo.outline import Outline

CONFIG = transformers.GPT2Config(
    n_embd=8, n_head=2, n_layer=2, vocab_size=11, n_positions=8, bos_token_id=0, eos_token_id=0,
    architectures=["GPT2LMHeadModel"],
)  # fmt: skip


def gpt2(tp=2):
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(CONFIG)
    return Schedule(model, Mesh(tp=tp))


def whole(sch):
    """Shard a feed-forward with both all-reduces."""
    sch["**.mlp"].sync("bwd_post", "all_reduce")
    sch["**.mlp.c_fc"].shard("weight", 1).shard("bias", 0)
    sch["**.mlp.c_proj"].shard("weight", 0).sync("fwd_post", "all_reduce")


def without_forward(sch):
    sch["**.mlp"].sync("bwd_post", "all_reduce")
    sch["**.mlp.c_fc"].shard("weight", 1).shard("bias", 0)
    sch["**.mlp.c_proj"].shard("weight", 0)


def without_backward(sch):
    sch["**.mlp.c_fc"].shard("weight", 1).shard("bias", 0)
    sch["**.mlp.c_proj"].shard("weight", 0).sync("fwd_post", "all_reduce")


def summed_around(sch):
    sch["**.mlp"].sync("both", "all_reduce")
    sch["**.mlp.c_fc"].shard("weight", 1).shard("bias", 0)
    sch["**.mlp.c_proj"].shard("weight", 0)


def normed(sch):
    sch["**.ln_2"].shard("weight", 0).shard("bias", 0)


def summed_by_a_function(sch):
    whole_without = sch["**.mlp.c_proj"].shard("weight", 0)
    whole_without.sync("fwd_post", lambda module, args, y: y)


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (whole, []),
        (
            summed_around,
            ["transformer.h.0.mlp.c_proj (and 1 more): the bias is added on each tp rank"],
        ),
        (
            normed,
            [
                "transformer.h.0.ln_2 (and 1 more): the mean and variance are of this tp rank's columns"
            ],
        ),
        (summed_by_a_function, []),
        (without_forward, ["transformer.h.0.mlp.c_proj (and 1 more): the output is a partial sum"]),
        (without_backward, ["transformer.h.0.mlp.c_fc (and 1 more): the gradient of the input"]),
    ],
)
def test_check_for_missing_all_reduces_names_the_first_module_of_each_problem(write, said):
    sch = gpt2()
    write(sch)
    found = missing_sums(sch)
    assert len(found) == len(said)
    assert all(a.startswith(b) for a, b in zip(found, said, strict=True)), found
    alone = gpt2(tp=1)
    write(alone)
    assert not missing_sums(alone)


def test_schedule_of_every_model_family_has_no_missing_all_reduce():
    for family, cases in HEADS.items():
        config, cls = tiny_config(cases[0])
        found = missing_sums(Outline(config, cls, Mesh(tp=2), torch.float32).schedule)
        assert not found, family


def built(write):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ScheduleWarning)
        AutoScheduledModel.from_config(CONFIG, tp=2, schedule=write)
    return [str(each.message) for each in caught if each.category is ScheduleWarning]


def test_build_warns_of_a_missing_all_reduce_and_names_the_module(ranks):
    for found in ranks.run(built, 2, without_forward):
        (text,) = found
        assert "transformer.h.0.mlp.c_proj" in text
        assert 'sync("fwd_post", "all_reduce")' in text
    assert ranks.run(built, 2, whole) == [[], []]


def of_inputs(sch):
    sch["**.mlp.c_fc"].shard("weight", 0)


def of_outputs(sch):
    sch["**.mlp.c_fc"].shard("weight", 1).shard("bias", 0)
    sch["**.mlp.c_proj"].shard("weight", 1).shard("bias", 0)


def own_features(module, args):
    return (args[0].chunk(2, -1)[module.rank_of_test], *args[1:])


def given_a_part(sch):
    """Shard with matching shapes but without an all-reduce: it warns and runs."""
    sch["**.mlp.c_fc"].shard("weight", 0).sync("fwd_pre", own_features)


def run_two(write):
    model = AutoScheduledModel.from_config(CONFIG, tp=2, schedule=write)
    for module in model.modules():
        module.rank_of_test = model.mesh.rank
    return model(input_ids=torch.arange(8)[None]).logits.shape[-1]


@pytest.mark.filterwarnings("ignore::slapo_zoo.model.missing_sums.ScheduleWarning")
@pytest.mark.parametrize(
    ("write", "path", "said"),
    [
        (of_inputs, "transformer.h.0.mlp.c_fc", "the input has 8 features"),
        (of_outputs, "transformer.h.0.mlp.c_proj", "the input has 16 features"),
    ],
)
def test_forward_with_a_weight_sharded_on_the_wrong_axis_raises_and_names_the_input_size(
    write, path, said
):
    with pytest.raises(ScheduleError) as caught:
        emulate(run_two, write, mesh=(2, 1, 1))
    assert caught.value.where == path
    assert said in caught.value.problem
    assert "[inputs, outputs]" in caught.value.hint


@pytest.mark.filterwarnings("ignore::slapo_zoo.model.missing_sums.ScheduleWarning")
def test_forward_with_sharded_weight_and_sharded_input_raises_no_error():
    assert emulate(run_two, given_a_part, mesh=(2, 1, 1)) == [11, 11]
