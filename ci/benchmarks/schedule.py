"""Seconds of create_schedule, 100 directives and build on a 175B GPT on meta, by number of layers."""

import time
from typing import Any

import torch
from torch import nn

import slapo_zoo
from slapo_zoo import Mesh, Schedule

LIMIT_S = 3.0  # seconds of the largest model
MOST_GROWTH = 1.5  # seconds per layer, largest against smallest; quadratic would be 4
ROUNDS = 3


def model_of(layers: int, quick: bool) -> nn.Module:
    """Return a GPT-2 on meta with the width of GPT-3 175B (arXiv:2005.14165, table 2.1), 12288; with `quick` a narrow
    one.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    width, heads = (64, 4) if quick else (12288, 96)
    config = GPT2Config(n_layer=layers, n_embd=width, n_head=heads, n_positions=2048)
    with torch.device("meta"):
        return GPT2LMHeadModel(config)


def direct(sch: Any, layers: int) -> None:
    """Apply 100 directives to a schedule: tensor parallelism of all blocks, recomputation, annotations, pipeline
    cuts.
    """
    sch["transformer.wte"].shard("weight", 0, pad=True).sync("fwd_post", "all_reduce")
    sch["lm_head"].shard("weight", 0, pad=True)
    sch["lm_head"].sync("bwd_post", "all_reduce").sync("fwd_post", "vocab_logits")
    for name, enter, leave in (("attn", "c_attn", "c_proj"), ("mlp", "c_fc", "c_proj")):
        block = f"transformer.h.*.{name}"
        sch[block].sync("bwd_post", "all_reduce")
        sch[f"{block}.{enter}"].shard("weight", 1, uneven=True).shard("bias", 0, uneven=True)
        sch[f"{block}.{leave}"].shard("weight", 0, uneven=True).sync("fwd_post", "all_reduce")
    sch["**:Dropout"].fork_rng()
    sch["transformer.h.*"].checkpoint()
    for i in range(layers // 12 - 1):
        sch[f"transformer.h.{12 * i + 11}"].cut_pipeline_stage()
    while len(sch.history) < 100:
        sch["transformer.h.*.ln_1"].annotate("weight", f"note_{len(sch.history)}", 1)


def seconds(layers: int, quick: bool) -> dict[str, Any]:
    """Return a table row: the least seconds of each step ("create", "directives", "build") in several rounds.

    The time to build the plain model on meta is not counted.
    """
    best = {"create": 1e9, "directives": 1e9, "build": 1e9}
    parameters = 0
    for _ in range(ROUNDS):
        model = model_of(layers, quick)
        parameters = sum(p.numel() for p in model.parameters())
        times = [time.perf_counter()]
        sch: Schedule = slapo_zoo.create_schedule(model, mesh=Mesh(tp=8, rank=3))
        times.append(time.perf_counter())
        direct(sch, layers)
        times.append(time.perf_counter())
        slapo_zoo.build(sch, init_weights=False)
        times.append(time.perf_counter())
        assert len(sch.history) == 100  # noqa: S101 - what the figure is about
        for name, begin, end in zip(best, times, times[1:], strict=False):
            best[name] = min(best[name], end - begin)
    what = {"layers": layers, "parameters": f"{parameters / 1e9:.1f}B"}
    return {**what, **best, "together": sum(best.values())}


def run(quick: bool) -> dict[str, list[dict[str, Any]]]:
    """Return the table for 24, 48 and 96 layers; the limits are on the sum of 96 layers, and on the growth per layer."""
    rows = [seconds(layers, quick) for layers in (24, 48, 96)]
    per_layer = [row["together"] / row["layers"] for row in rows]
    for row, own in zip(rows, per_layer, strict=True):
        row["per layer / that of 24"] = own / per_layer[0]
        over = {"together": row["together"] > LIMIT_S,
                "per layer / that of 24": own / per_layer[0] > MOST_GROWTH}  # fmt: skip
        row["beyond"] = [name for name, is_over in over.items() if is_over]
    return {f"100 directives on a GPT on meta, limit {LIMIT_S} s": rows}
