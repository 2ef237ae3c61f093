"""The planner's search against an exhaustive one, in small spaces."""

from collections.abc import Iterator
from functools import cache

import pytest
import transformers

from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.pipeline.orders import ORDERS
from slapo_zoo.tune.planner.hardware import GIB, find_hardware, with_memory
from slapo_zoo.tune.planner.layout import Layout, divisors, orders_for
from slapo_zoo.tune.planner.layout_search import Planner
from slapo_zoo.zoo.outline import Outline

SPACES = [  # devices, rows of a step, device, GiB of one; the wider models fit in some of them barely
    (4, 8, "v100", 16), (4, 32, "a100", 10), (8, 16, "h100", 12), (8, 32, "v100", 32),
]  # fmt: skip
SIZES = {
    "gpt2": {"n_layer": 4, "n_embd": 512, "n_head": 8},
    "gpt2 wide": {"n_layer": 6, "n_embd": 2048, "n_head": 16},
    "gpt2 wider": {"n_layer": 6, "n_embd": 5120, "n_head": 40},
    "bert": {"num_hidden_layers": 6},
    "llama": {"num_hidden_layers": 4, "hidden_size": 2048, "intermediate_size": 5632,
              "num_attention_heads": 16, "vocab_size": 32000},
}  # fmt: skip
HEADS = {"gpt2": "GPT2LMHeadModel", "bert": "BertForMaskedLM", "llama": "LlamaForCausalLM"}
slow = pytest.mark.slow


@cache
def planner_of(name: str) -> Planner:
    family = name.split()[0]
    config = transformers.AutoConfig.for_model(family, **SIZES[name], architectures=[HEADS[family]])
    return Planner(config, find_hardware("a100"), 512)


def everything(planner: Planner, gpus: int, batch: int) -> Iterator[Layout]:
    """Yield every layout: mesh, order, ZeRO stage and recomputation."""
    blocks = len(planner.family.blocks)
    again = [(0.0, "")]
    again += [(k / blocks, kept) for k in range(1, blocks + 1) for kept in ("", "save_matmuls")]
    for tp in divisors(gpus):
        for apart in (False, True)[: 1 + (tp > 1)]:
            for pp in (n for n in divisors(gpus // tp) if n <= blocks):
                dp = gpus // tp // pp
                shards = [(1, 3)] + [(n, stage) for n in divisors(dp)[1:] for stage in (1, 2, 3)]
                for rows in divisors(batch // dp) if batch % dp == 0 else ():
                    count = batch // dp // rows
                    for order, virtual in orders_for(pp, count, blocks, tuple(ORDERS)):
                        for ratio, kept in again:
                            for one in shards:
                                yield Layout(tp, pp, dp, rows, count, order, virtual, ratio, kept, apart, *one)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "space"),
    [pytest.param(name, space, marks=[slow] * ((name, i) != ("gpt2", 0)))
     for name in SIZES for i, space in enumerate(SPACES)],
)  # fmt: skip
def test_planner_search_is_within_1_percent_of_the_fastest_of_all_layouts(name, space):
    """The search is within 1 % of the fastest layout that fits, and finds none where none fits."""
    gpus, batch, device, gib = space
    planner = planner_of(name).on(with_memory(find_hardware(device), gib * GIB))
    limit = planner.hardware.memory - planner.hardware.reserved
    all_of_it = map(planner.forecast, everything(planner, gpus, batch))
    times = [f.step.seconds for f in all_of_it if f.memory <= limit]
    picks = planner.search(gpus, batch).feasible
    assert bool(picks) == bool(times)
    if picks:
        assert picks[0].step.seconds <= 1.01 * min(times), picks[0].layout


@pytest.mark.slow
def test_planner_gives_blocks_different_recompute_policies_when_memory_is_short():
    """Early stages hold more micro-batches and recompute more; one policy for all blocks is slower."""
    config = transformers.GPT2Config(n_layer=16, n_embd=4096, n_head=32)
    config.architectures = ["GPT2LMHeadModel"]
    hardware = with_memory(find_hardware("v100"), 6 * GIB)
    planner = Planner(config, hardware, 1024, "fp16", "kernels")
    best, *others = planner.search(32, 128).feasible
    policies = best.layout.checkpoint_policy
    assert not isinstance(policies, str)
    assert len(set(policies)) > 1
    assert best.memory <= hardware.memory - hardware.reserved
    uniform = [f for f in others if isinstance(f.layout.checkpoint_policy, str)]
    assert best.step.seconds < 0.99 * uniform[0].step.seconds
    at, mesh = best.layout, Mesh(best.layout.tp, best.layout.pp, best.layout.dp)
    outline = Outline(config, planner.family.cls, mesh, planner.dtype, checkpoint_policy=policies,
                      pipeline_order=at.pipeline_order, stages_per_rank=at.stages_per_rank,
                      sequence_parallel=at.sequence_parallel)  # fmt: skip
    assert outline.schedule.state.checkpointed  # the options of the plan enable recomputation
