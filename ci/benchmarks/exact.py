"""A training step with `exact=` beside the same step without it: GPT-2 and BERT of full width, two CPU cores.

Six blocks of width 768, the whole vocabulary, dropout, 4 x 128 tokens, AdamW and clipping. Runs with and without
`exact` take turns, each in new processes; a time is the median of the steps of all turns, on the slowest rank.
`--only gpt2` or `--only bert` measures one of them.
"""

import os
import time
from statistics import median
from typing import Any

import torch

from benchmarks.ranks import barrier
from slapo_zoo.parallel.ranks.launch import run_local

ONLY = ""
CORES, TURNS, STEPS = 2, 2, 4
# Each row: processes (tp), and the virtual tp; then the largest ratio that is wanted.
MESHES = {(4, 4): 1.15, (2, 2): 1.15, (1, 2): 1.35, (1, 4): 1.35}
SIZES = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"loss_type": "ForCausalLMLoss"}, "n_layer", "n_embd"),
    "bert": ("BertConfig", "BertForMaskedLM", {}, "num_hidden_layers", "hidden_size"),
}  # fmt: skip


def config_of(name: str, quick: bool) -> Any:
    """A config with six blocks, or with one narrow block."""
    import transformers

    kind, cls, fields, layers, width = SIZES[name]
    small = {width: 48, "vocab_size": 512, "bos_token_id": 0, "eos_token_id": 0} if quick else {}
    fields = fields | {layers: 1 if quick else 6} | small
    return getattr(transformers, kind)(**fields, architectures=[cls])


def seconds(config: Any, tp: int, virtual: int, steps: int) -> list[float]:
    """Return the seconds of each step on this rank, after one that warms up; `virtual` 0: without `exact`."""
    from slapo_zoo import AutoScheduledModel

    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    exact = {"tp": virtual} if virtual else False
    model: Any = AutoScheduledModel.from_config(config, tp=tp, seed=0, exact=exact).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(3, config.vocab_size, (4, 128), generator=torch.Generator().manual_seed(0))
    found = []
    for _ in range(1 + steps):
        barrier()
        begin = time.perf_counter()
        model.train_step({"input_ids": ids, "labels": ids})
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(time.perf_counter() - begin)
    if virtual:
        model.close()
    return found[1:]


def on_processes(config: Any, tp: int, virtual: int, steps: int) -> list[float]:
    """Return the seconds of each step on the slowest of `tp` new processes, which share the cores."""
    threads = max(1, CORES // tp)
    found = run_local(seconds, tp, (config, tp, virtual, steps), 500, "spawn", threads, "cpu")
    return [max(of_ranks) for of_ranks in zip(*found, strict=True)]


def rows_of(name: str, quick: bool) -> list[dict[str, Any]]:
    """One row per mesh."""
    config, steps = config_of(name, quick), 1 if quick else STEPS
    found: dict[tuple[int, int], list[float]] = {}
    for _ in range(1 if quick else TURNS):
        for tp in (4, 2, 1):
            for virtual in (0, *(v for real, v in MESHES if real == tp)):
                found.setdefault((tp, virtual), []).extend(on_processes(config, tp, virtual, steps))
    rows = []
    for (tp, virtual), most in MESHES.items():
        plain, exact = median(found[tp, 0]), median(found[tp, virtual])
        rows.append({
            "model": name, "processes (tp)": tp, "virtual tp": virtual, "plain, ms": 1e3 * plain,
            "exact, ms": 1e3 * exact, "ratio": exact / plain, "wanted": most, "steps": len(found[tp, 0]),
            "beyond": ["ratio"] if exact > most * plain and not quick else [],
        })  # fmt: skip
    return rows


def run(quick: bool) -> dict[str, list[dict[str, Any]]]:
    """One table."""
    rows = [row for name in SIZES if ONLY in ("", name) for row in rows_of(name, quick)]
    return {"a training step with exact= and without it": rows}
