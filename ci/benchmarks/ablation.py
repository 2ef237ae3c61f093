"""Speed-up of each step of a schedule on one device: plain, scheduled, kernels, recomputation, more rows.

These are the steps of Slapo's ablation (ASPLOS'24, published without numbers) that one device can show. The lines of
a table take turns, each in a process of its own; the best median counts.
"""

import time
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from benchmarks import ranks
from benchmarks.step import CASES, Case, batch_of, config_of

ROUNDS, STEPS, MIB = 2, 5, 2**20
FAMILIES = ("bert", "gpt2")


@dataclass(frozen=True)
class Line:
    """One line of the ablation's table: a way to run the model.

    Args:
        name: what this line adds to the one before.
        knobs: arguments of `from_config`; None runs plain transformers.
        rows: factor by which the batch is larger than that of the first line.
    """

    name: str
    knobs: dict[str, Any] | None
    rows: int = 1


LINES = (
    Line("plain transformers", None),
    Line("scheduled", {"kernels": "reference"}),
    Line("+ kernels", {"kernels": "auto"}),
    Line("+ recomputation of half", {"kernels": "auto", "checkpoint_ratio": 0.5}),
    Line("+ twice the rows", {"kernels": "auto", "checkpoint_ratio": 0.5}, rows=2),
)


def measure(case: Case, line: Line, threads: int) -> tuple[float, int]:
    """Run a line of the ablation; return (rows per second of the median step, peak growth of anonymous memory in bytes).

    `threads` is the number of torch's threads.
    """
    import transformers

    from slapo_zoo import AutoScheduledModel
    from slapo_zoo.weights.ledger import AnonymousPeak

    torch.set_num_threads(threads)
    case = replace(case, rows=case.rows * line.rows)
    config = config_of(case)
    with AnonymousPeak() as peak:
        if line.knobs is None:
            model = getattr(transformers, case.cls)(config).train()
        else:
            model = AutoScheduledModel.from_config(config, seed=0, **line.knobs).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        batch, seconds = batch_of(case, config, torch.float32), []
        for _ in range(STEPS + 1):
            begin = time.perf_counter()
            if line.knobs is None:
                model(**batch).loss.backward()
            else:
                model.train_step(batch)
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - begin)
    return case.rows / median(seconds[1:]), peak.growth


def run(quick: bool) -> dict[str, list[dict[str, Any]]]:
    """Return one table per family; `quick` takes few tokens and one family."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for family in FAMILIES[: 1 if quick else None]:
        case = replace(CASES[family], tokens=16 if quick else 256)
        found: dict[str, list[tuple[float, int]]] = {line.name: [] for line in LINES}
        for _ in range(1 if quick else ROUNDS):
            for line in LINES:
                found[line.name] += ranks.on_ranks(measure, 1, case, line, torch.get_num_threads())
        first = max(rate for rate, _ in found[LINES[0].name])
        tables[f"{family}, 4 layers of base width, float32, {case.rows} x {case.tokens} tokens"] = [
            {
                "what": name, "rows/s": max(rate for rate, _ in runs),
                "of plain": round(max(rate for rate, _ in runs) / first, 3),
                "peak MiB": round(max(size for _, size in runs) / MIB), "beyond": [],
            }
            for name, runs in found.items()
        ]  # fmt: skip
    return tables
