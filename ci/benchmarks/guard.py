"""Cost of the input check, which compares a hash of the batch over all ranks, relative to a training step on tp=2.

The check runs once in INTERVAL steps; its share is its own time divided by the time of INTERVAL steps. Both are
medians of one run in which they take turns, so that other work on the machine slows both.
"""

import statistics
import time
from typing import Any

from benchmarks.ranks import on_ranks

LIMIT = 0.005  # share of a training step
SIZES = {
    "gpt2, 4 x 128": {"n_embd": 768, "n_head": 12, "n_layer": 4, "vocab_size": 8192},
    "tiny, 4 x 128": {"n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 512},
}


def measure(fields: dict[str, Any], repeats: int) -> dict[str, float]:
    """Return median seconds on this rank: {"step": a step without the check, "check": the check}.

    `fields` are config fields of the GPT-2, `repeats` is the number of timed steps.
    """
    import torch
    from transformers import GPT2Config

    from slapo_zoo import AutoScheduledModel
    from slapo_zoo.model.gradients.batch_check import check_batch

    config = GPT2Config(**fields, n_positions=128, architectures=["GPT2LMHeadModel"])
    model = AutoScheduledModel.from_config(config, tp=2).train()
    model.input_check_interval = 0
    ids = torch.arange(4 * 128).reshape(4, 128) % fields["vocab_size"]
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    steps, checks = [], []
    for i in range(repeats + 2):
        begin = time.perf_counter()
        model.train_step(batch)
        middle = time.perf_counter()
        check_batch(model.mesh, batch, 1, 1)
        if i >= 2:  # the first ones warm up
            steps.append(middle - begin)
            checks.append(time.perf_counter() - middle)
    return {"step": statistics.median(steps), "check": statistics.median(checks)}


def run(quick: bool) -> dict[str, list[dict[str, Any]]]:
    """Return the table: the check's share of a step for each model of SIZES."""
    from slapo_zoo.model.gradients.batch_check import INTERVAL

    rows = []
    for name, fields in SIZES.items():
        if quick and not name.startswith("tiny"):
            continue
        found = on_ranks(measure, 2, fields, 5 if quick else 30)[0]
        share = found["check"] / INTERVAL / found["step"]
        row = {
            "model": name, "step ms": 1e3 * found["step"], "check ms": 1e3 * found["check"],
            "every": INTERVAL, "share of a step": share, "limit": LIMIT,
        }  # fmt: skip
        rows.append(row | ({"beyond": ["share of a step"]} if share > LIMIT else {}))
    return {"input guard": rows}
