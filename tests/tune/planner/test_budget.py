"""activation_memory=: the cheapest policy per block that fits, or the nearest that does."""

import itertools
from dataclasses import replace

import pytest
import torch
from transformers import GPT2Config

from slapo_zoo import AutoScheduledModel
from slapo_zoo.errors import MeshError, SlapoError
from slapo_zoo.tune.planner.hardware import HARDWARE
from slapo_zoo.tune.planner.layout import Layout
from slapo_zoo.tune.planner.layout_search import Planner
from slapo_zoo.tune.planner.mixtures import CHOICES, choose

pytestmark = pytest.mark.usefixtures("shared_dry_runs")

SIZES = {"n_layer": 4, "n_embd": 32, "n_head": 4, "vocab_size": 64, "n_positions": 32}
CONFIG = GPT2Config(**SIZES, bos_token_id=1, eos_token_id=2, loss_type="ForCausalLMLoss")
CONFIG.architectures = ["GPT2LMHeadModel"]


def test_activation_budget_chooses_the_fastest_mix_of_recompute_policies():
    """Compare with all 256 mixes, on a device with a slow link to the host."""
    planner = Planner(CONFIG, replace(HARDWARE["h100"], host=1e9), 32, "bf16")
    layout = Layout(rows=4, micro_batches=2)
    plain = planner.forecast(layout)

    def judged(policies):
        found = planner.forecast(replace(layout, checkpoint_policy=policies))
        moving = 2 * (plain.ranks[0].activations - head) / 4 * ("offload" in policies)
        return found.ranks[0].activations + moving, found.step.seconds

    head = (
        planner.forecast(replace(layout, checkpoint_policy=("offload",) * 4)).ranks[0].activations
    )
    every = {p: judged(p) for p in itertools.product(CHOICES[:4], repeat=4)}
    for share in (0.95, 0.8, 0.6, 0.4, 0.3):
        budget = share * plain.ranks[0].activations
        chosen, least = choose(planner, layout, budget)
        fitting = [seconds for size, seconds in every.values() if size <= budget * 1.0001]
        assert (chosen is None) == (not fitting) == (budget < least)
        if chosen:
            assert every[chosen][0] <= budget * 1.0001
            assert every[chosen][1] <= min(fitting) * 1.0001
    assert choose(planner, layout, plain.ranks[0].activations + 1)[0] == ("keep",) * 4


def test_recompute_policies_shard_saved_inputs_over_tp_only_when_the_budget_needs_it():
    """Sharding the saved inputs over tp is chosen last, and keeps within the budget."""
    planner, layout = Planner(CONFIG, HARDWARE["cpu"], 32, "fp32"), Layout(tp=2, rows=4)
    recomputed = replace(layout, checkpoint_ratio=1.0)
    budget = planner.forecast(recomputed).ranks[0].activations * 0.9
    chosen, least = choose(planner, layout, budget)
    assert "sharded" in chosen
    found = planner.forecast(replace(layout, checkpoint_policy=chosen)).ranks[0].activations
    assert least <= found <= budget
    assert "sharded" not in choose(planner, layout, budget * 2)[0]


def load(budget, **more):
    given = {"activation_memory": budget, "micro_batch_shape": (4, 32), **more}
    return AutoScheduledModel.from_config(CONFIG, **given)


def test_activation_memory_argument_recomputes_more_blocks_when_the_budget_is_smaller():
    batch = {"input_ids": torch.arange(128).reshape(4, 32) % 64}
    batch["labels"] = batch["input_ids"]
    counted = []
    for budget in ("1GB", "1200KB", "700KB"):
        model = load(budget).train()
        counted.append(
            (len(model.schedule.state.checkpointed), model.memory(batch=batch).activations)
        )
    blocks, activations = zip(*counted, strict=True)
    assert blocks[0] == 0 < blocks[1] < blocks[2] <= 4
    assert activations[0] > activations[1] > activations[2]


def test_activation_memory_argument_too_small_for_any_policy_is_refused():
    with pytest.raises(MeshError, match=r"pass activation_memory=\"\d+KB\", the least"):
        load(1000)
    with pytest.raises(SlapoError, match=r"micro_batch_shape=\(4, 1024\)"):
        load("1GB", micro_batch_shape=None)
    with pytest.raises(SlapoError, match="pass only one of the two"):
        load("1GB", checkpoint_ratio=0.5)
    with pytest.raises(SlapoError, match=r"8GB"):
        load("much")
    with pytest.raises(SlapoError, match="one policy per block"):
        AutoScheduledModel.from_config(CONFIG, checkpoint_policy=["keep"])


def test_activation_memory_argument_below_the_bytes_of_one_token_is_refused_at_load():
    config = GPT2Config(architectures=["GPT2LMHeadModel"])
    with pytest.raises(SlapoError, match="activation_memory='1KiB': a block keeps 3072 bytes"):
        AutoScheduledModel.from_config(config, activation_memory="1KiB")
