"""CPU time of `slapo-zoo plan --gpus` for GPT configs from 100M to 1T parameters, in one process.

CPU time, since other work on the machine adds to wall time. Ratios are to the smallest model: the time may grow no
faster than blocks x configurations.
"""

import time
from typing import Any

MOST_RATIO = 1.25  # most growth of the time, relative to blocks x configurations
FAMILY = {  # parameters: blocks, hidden size, heads, devices, rows of a step
    "125M": (12, 768, 12, 8, 512),
    "1.3B": (24, 2048, 16, 64, 1024),
    "13B": (40, 5120, 40, 256, 2048),
    "175B": (96, 12288, 96, 1024, 2048),
    "1T": (128, 25600, 160, 10000, 10000),
}


def config_of(blocks: int, width: int, heads: int) -> Any:
    """Return the config of a GPT-2 with that many blocks, hidden size (`width`) and heads."""
    from transformers import GPT2Config

    config: Any = GPT2Config(
        n_layer=blocks, n_embd=width, n_head=heads, n_positions=2048, vocab_size=51200,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    config.architectures, config.loss_type = ["GPT2LMHeadModel"], "ForCausalLMLoss"
    return config


def run(quick: bool) -> dict[str, list[dict[str, Any]]]:
    """Search the layouts of each model of FAMILY (with `quick` the smallest); return one table row for each."""
    from slapo_zoo.tune.planner.hardware import HARDWARE
    from slapo_zoo.tune.planner.layout_search import Planner

    rows: list[dict[str, Any]] = []
    names = ["125M"] if quick else list(FAMILY)
    Planner(config_of(2, 64, 2), HARDWARE["a100"], 64).search(1, 1)  # imports
    for name in names:
        blocks, width, heads, gpus, batch = FAMILY[name]
        begin, wall = time.process_time(), time.perf_counter()
        planner = Planner(config_of(blocks, width, heads), HARDWARE["a100"], 2048)
        found = planner.search(gpus, batch)
        seconds = time.process_time() - begin
        best = found.feasible[0].layout if found.feasible else "nothing fits"
        work = blocks * found.looked_at
        first = rows[0] if rows else None
        growth = seconds / first["cpu s"] if first else 1.0
        allowed = MOST_RATIO * work / first["work"] if first else 1.0
        rows.append({
            "model": name, "gpus": gpus, "parameters": found.parameters, "work": work,
            "configurations": found.looked_at, "fit": len(found.feasible), "cpu s": round(seconds, 2),
            "wall s": round(time.perf_counter() - wall, 2), "growth": round(growth, 2),
            "growth of work": round(work / (first["work"] if first else work), 2),
            "best": str(best), "beyond": ["growth"] if growth > max(allowed, 1.0) else [],
        })  # fmt: skip
    return {
        "a search over a whole cluster: CPU time grows no faster than blocks x configurations": rows
    }
