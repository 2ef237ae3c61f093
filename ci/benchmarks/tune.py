"""Quality of the tuner's searches on a space whose configurations have all been measured on this CPU.

The space is threads, rows, recomputation, attention and a kernel for a small GPT-2: 96 configurations. Their times
are stored in ci/benchmarks/tune_cpu.json, which is measured anew if it is missing. Searches read the times instead of
measuring, so strategies can be compared on equal terms.
"""

import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

from slapo_zoo.tune.grid import Grid
from slapo_zoo.tune.outcome import OK, Outcome
from slapo_zoo.tune.strategies import find_strategy
from slapo_zoo.tune.tuner import Limits, Tuner

DATA = Path(__file__).with_name("tune_cpu.json")
SYMBOLS: dict[str, list[Any]] = {
    "threads": [1, 2], "batch_size": [1, 2, 4, 8], "checkpoint_ratio": [0.0, 0.5, 1.0],
    "attention": ["sdpa", "eager"], "kernels": ["", "layer_norm"],
}  # fmt: skip
CHANGES = {
    "n_layer": 4, "n_embd": 256, "n_head": 4, "vocab_size": 4000, "n_positions": 64, "bos_token_id": 1,
    "eos_token_id": 2, "loss_type": "ForCausalLMLoss", "attn_pdrop": 0.0,
}  # fmt: skip
SEQ_LEN, STEPS, ROUNDS = 64, 4, 3
SHARE, NEAR = 0.15, 0.97


def measure() -> dict[str, Any]:
    """Measure every configuration in several rounds, and return the content of tune_cpu.json; the fastest round
    counts.
    """
    from bench import machine

    rounds = [one_round() for _ in range(1 + ROUNDS)][1:]  # the first round runs on a cold machine
    rows = [max(same, key=lambda row: row["rows_per_s"]) for same in zip(*rounds, strict=True)]
    return {"machine": machine(), "seq_len": SEQ_LEN, "config": CHANGES, "points": rows}


def one_round() -> list[dict[str, Any]]:
    """Measure every configuration once; return a dict per configuration, with its "rows_per_s"."""
    import torch

    from slapo_zoo.tune.trial import Job, _batch, build, timed_steps

    rows = []
    others = [name for name in SYMBOLS if name not in ("threads", "batch_size")]
    for values in itertools.product(*(SYMBOLS[name] for name in others)):
        point = dict(zip(others, values, strict=True))
        job = Job("gpt2", point, STEPS, SEQ_LEN, CHANGES, device="cpu")
        model = build(job)
        for threads, count in itertools.product(SYMBOLS["threads"], SYMBOLS["batch_size"]):
            torch.set_num_threads(threads)
            batch = _batch(model, count, SEQ_LEN, torch.device("cpu"))
            seconds = min(timed_steps(model, batch, job))
            rows.append(
                {"threads": threads, "batch_size": count, **point, "rows_per_s": count / seconds}
            )
    return rows


def search(points: list[dict[str, Any]], name: str, start: int, seed: int) -> tuple[float, int]:
    """Run the strategy `name` for SHARE of the configurations, from configuration `start`; return what it reaches.

    Returns:
        (share of the best throughput, number of evaluations)
    """
    grid = Grid([{n: point[n] for n in SYMBOLS} for point in points])
    rates = [point["rows_per_s"] for point in points]

    def known(point: dict[str, Any], steps: int) -> Outcome:
        number = grid.find(point)
        assert number is not None  # noqa: S101 - the grid is made of them
        return Outcome(OK, rates[number])

    limits = Limits(int(SHARE * len(points)))
    found = Tuner(
        grid, known, find_strategy(name)(grid, start=start, seed=seed), limits=limits
    ).run()
    assert found.best is not None  # noqa: S101 - every point runs
    return found.best.outcome.throughput / max(rates), len(found.trials)


def run(quick: bool) -> dict[str, list[dict[str, Any]]]:
    """Run each strategy from many starts on the stored measurements; return the table."""
    if not DATA.exists():
        begin = time.perf_counter()
        found = measure()
        found["seconds"] = round(time.perf_counter() - begin, 1)
        DATA.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    points = json.loads(DATA.read_text(encoding="utf-8"))["points"]
    starts = range(0, len(points), 24 if quick else 4)
    rows = []
    for name in ("model", "random"):
        results = [search(points, name, start, start) for start in starts]
        shares = [share for share, _ in results]
        worst = min(shares)
        rows.append({
            "what": name, "points": len(points), "evaluations": max(n for _, n in results),
            "starts": len(shares), "worst": round(worst, 4), "median": round(statistics.median(shares), 4),
            "within 3 %": f"{sum(s >= NEAR for s in shares)}/{len(shares)}",
            "beyond": ["worst"] if name == "model" and worst < NEAR else [],
        })  # fmt: skip
    return {f"share of the best within {SHARE:.0%} of {len(points)} evaluations": rows}
