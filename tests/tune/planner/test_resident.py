"""model.memory(): resident bytes by kind, against the planner's prediction."""

from dataclasses import replace

import pytest
import torch
from transformers import GPT2Config, LlamaConfig

from slapo_zoo import AutoScheduledModel
from slapo_zoo.tune.planner.hardware import HARDWARE
from slapo_zoo.tune.planner.layout import Layout
from slapo_zoo.tune.planner.layout_search import Planner
from slapo_zoo.tune.planner.profile import Recompute

TINY = {"n_layer": 6, "n_embd": 128, "n_head": 4, "vocab_size": 512, "n_positions": 64}
SMALL = {}  # GPT-2 124M
OURS = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "pad_token_id": 0}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "loss_type": "ForCausalLMLoss"}


def config_of(sizes):
    config = GPT2Config(**sizes, **OURS, **ENDS)
    config.architectures = ["GPT2LMHeadModel"]
    return config


def measured(sizes, layout, precision, tokens):
    model = AutoScheduledModel.from_config(
        config_of(sizes), tp=layout.tp, pp=layout.pp, dp=layout.dp, dp_shard=layout.dp_shard,
        zero_stage=layout.zero_stage, precision=precision, kernels="reference",
        checkpoint_ratio=layout.checkpoint_ratio, checkpoint_policy=layout.checkpoint_policy,
    ).train()  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    ids = torch.arange(layout.rows * layout.micro_batches * tokens).reshape(-1, tokens) % 500
    ids = (ids + model.mesh.coord("dp")) % 500
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    model.train_step(batch, layout.micro_batches)
    optimizer.step()
    at_rest, step = model.memory(optimizer), model._slapo.schedule.state.random.step
    found = model.memory(optimizer, batch, layout.micro_batches)
    assert model.memory(optimizer) == at_rest
    assert model._slapo.schedule.state.random.step == step
    return at_rest, found


def planned(sizes, layout, precision, tokens):
    hardware = replace(HARDWARE["cpu"], scratch=0.0, optimizer_copies=0.0)
    planner = Planner(config_of(sizes), hardware, tokens, precision)
    return planner.forecast(layout).ranks


SHARES = Layout(tp=2, pp=2, rows=16, micro_batches=4, checkpoint_ratio=1.0, checkpoint_policy="sharded")  # fmt: skip
SHARED = Layout(dp=2, dp_shard=2, rows=4, micro_batches=2)
LAYOUTS = [
    (Layout(rows=4), "fp32"), (SHARED, "bf16"), (Layout(pp=2, rows=4, micro_batches=4), "fp32"), (SHARES, "fp32"),
]  # fmt: skip
MORE = [
    (Layout(rows=4, micro_batches=2), "bf16"), (Layout(rows=4, micro_batches=2), "bf16-pure"),
    (SHARED, "fp32"), (replace(SHARED, zero_stage=2), "bf16"), (replace(SHARED, zero_stage=1), "bf16"),
]  # fmt: skip


def compare(threads, sizes, layout, precision, tokens):
    """Fail unless each exact kind agrees within 3 %, and the peak within 10 %."""
    world = layout.tp * layout.pp * layout.dp
    found = threads.run(measured, world, sizes, layout, precision, tokens, timeout=500)
    plans = planned(sizes, layout, precision, tokens)
    for rank, (at_rest, step) in enumerate(found):
        plan = plans[rank // (layout.tp * layout.dp)]
        assert at_rest.gradients * layout.dp_shard == pytest.approx(
            plan.gradients * (layout.dp_shard if layout.zero_stage > 1 else 1), rel=0.03
        )
        assert step.masters + step.states + (0 if step.masters else step.weights) == pytest.approx(
            plan.optimizer + (0 if step.masters else plan.weights), rel=0.03
        )
        assert step.total == pytest.approx(plan.total, rel=0.1)
        assert "bytes per parameter" in str(step)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("layout", "precision"), LAYOUTS, ids=str)
def test_memory_held_between_steps_equals_the_prediction_of_the_planner(layout, precision, threads):
    compare(threads, TINY, layout, precision, 64)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "precision"), MORE, ids=str)
def test_memory_held_between_steps_on_more_layouts_equals_the_prediction_of_the_planner(
    layout, precision, threads
):
    compare(threads, TINY, layout, precision, 64)


@pytest.mark.slow  # 124 million parameters
@pytest.mark.parametrize(("layout", "precision"), [(Layout(), "bf16"), (SHARED, "bf16")], ids=str)
def test_memory_held_between_steps_by_gpt2_equals_the_prediction_of_the_planner(
    layout, precision, threads
):
    compare(threads, SMALL, replace(layout, rows=1, micro_batches=1), precision, 128)


# docs/precision.md: bytes per parameter between steps, without dp_shard
TABLE = {"fp32": 16, "bf16": 16, "fp16": 16, "bf16-pure": 8}


def at_rest(sizes, shards, precision):
    model = AutoScheduledModel.from_config(
        config_of(sizes), dp_shard=shards, precision=precision, kernels="reference"
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    ids = torch.arange(16).reshape(1, -1) + model.mesh.rank
    model.train_step({"input_ids": ids, "labels": ids})
    optimizer.step()
    return model.memory(optimizer).per_parameter


@pytest.mark.parametrize(("precision", "shards"), [("fp32", 1), ("bf16-pure", 1), ("bf16", 2)])
def test_bytes_held_per_parameter_at_each_precision_equal_the_documented_numbers(
    precision, shards, ranks
):
    for found in ranks.run(at_rest, shards, TINY, shards, precision):
        assert found == pytest.approx(TABLE[precision] / shards, rel=0.03)


@pytest.mark.slow  # 124 million parameters on four ranks
def test_bytes_held_by_gpt2_on_four_ranks_equal_the_documented_numbers(ranks):
    for found in ranks.run(at_rest, 4, SMALL, 4, "bf16", timeout=500):
        assert found == pytest.approx(TABLE["bf16"] / 4, rel=0.03)
        assert found <= 18 / 4 + 0.5


# arXiv:2104.04473, table 1, and Llama-3-405B of 8,192 tokens a row: one row a micro-batch, 1F1B
LARGE = [
    (GPT2Config(n_layer=128, n_embd=25600, n_head=160, n_positions=2048, vocab_size=51200, **OURS, **ENDS),
     2048, Layout(8, 64, 6, 1, 512), 40),
    (LlamaConfig(num_hidden_layers=126, hidden_size=16384, intermediate_size=53248, num_attention_heads=128,
                 num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192),
     8192, Layout(8, 16, 8, 1, 384), 64),
]  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("config", "tokens", "layout", "most"), LARGE, ids=["1T", "405B"])
def test_planner_predicts_that_the_largest_published_runs_fit_in_memory(
    config, tokens, layout, most
):
    """Check the GiB of the fullest rank within a step, and of its buffers for sending and receiving."""
    config.architectures = [{"gpt2": "GPT2LMHeadModel"}.get(config.model_type, "LlamaForCausalLM")]
    planner = Planner(config, HARDWARE["a100"], tokens, "bf16")
    again = replace(layout, checkpoint_ratio=1.0, checkpoint_policy="sharded")
    ranks = planner.forecast(again).ranks
    within = [r.weights + r.gradients + r.optimizer + r.activations + r.working + r.buffers for r in ranks]  # fmt: skip
    assert max(within) <= most * 2**30
    assert max(r.buffers for r in ranks) <= 2**30
    whole = planner.forecast(replace(again, checkpoint_policy="")).ranks
    assert max(r.buffers for r in whole) > 4 * 2**30


def test_planner_memory_includes_the_input_of_the_first_recomputed_block():
    """The sum of the embeddings is computed before the first block, and no recomputation frees it."""
    profile = Planner(config_of(TINY), HARDWARE["cpu"], 64, "fp32").profile(1)
    pairs = zip(profile.units, profile.uses(4), strict=True)
    first, second, *_ = [(unit, use) for unit, use in pairs if unit.is_block]
    held = [Recompute(each={u.name: "recompute"}).held(u, use) for u, use in (first, second)]
    assert held[0] >= first[1].output + second[1].output == 2 * held[1]
