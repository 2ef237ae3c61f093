"""Loads of GPT-2 checkpoints on several layouts: bytes read, peak memory and time per rank."""

import functools
from pathlib import Path
from typing import Any

from benchmarks import checkpoints, ranks
from benchmarks.ranks import LAYOUTS, MIB

MOST_READ = 1.02  # limit of the bytes read, relative to the shard
MOST_MEMORY = 1.10  # limit of the peak: this times the shard, plus 64 MiB
REPEATS = 3


def load_one(folder: Path, tp: int, pp: int) -> dict[str, Any]:
    """Load a checkpoint REPEATS times on this rank; return its figures, and those of plain reads of as many bytes.

    Memory is that of the first load; times are the best, since other work on the machine only adds to them.
    """
    from slapo_zoo import AutoScheduledModel

    found: dict[str, Any] = {}
    ledger: Any = None
    for _ in range(REPEATS):
        load = functools.partial(AutoScheduledModel.from_pretrained, folder, tp=tp, pp=pp)
        model, cost = ranks.timed(load)
        ledger = model.ledger
        found.setdefault("growth", cost.growth)
        del model, load
        ranks.give_back()
        floor = functools.partial(ranks.readinto_floor, ledger.bytes_read, folder)
        _, least = ranks.timed(floor)
        ranks.give_back()
        ranks.best(found, wall=cost.wall, cpu=cost.cpu, fill=ledger.seconds)
        ranks.best(found, floor=least.wall, floor_cpu=least.cpu)
    return found | {
        "shard": ledger.shard_bytes,
        "read": ledger.bytes_read,
        "files": ledger.files_opened,
    }


def row(model: str, layout: str, found: list[dict[str, Any]], most: float) -> dict[str, Any]:
    """Return the table row of a layout: of each figure the worst rank in `found`, the results of `load_one` by rank.

    The peak of memory may be `most` times the bytes of the rank's shard, plus 64 MiB.
    """
    read = max(r["read"] / r["shard"] for r in found)
    limits = [(r["growth"], most * r["shard"] + 64 * MIB) for r in found]
    growth, limit = max(limits, key=lambda pair: pair[0] / pair[1])
    line: dict[str, Any] = {
        "model": model, "layout": layout,
        "shard MiB": round(max(r["shard"] for r in found) / MIB),
        "read/shard": round(read, 4),
        "peak anonymous MiB": round(growth / MIB), "limit MiB": round(limit / MIB),
        "files": max(r["files"] for r in found),
        "wall s": max(r["wall"] for r in found), "of it fill": max(r["fill"] for r in found),
        "readinto s": max(r["floor"] for r in found),
        "CPU s": max(r["cpu"] for r in found), "readinto CPU s": max(r["floor_cpu"] for r in found),
    }  # fmt: skip
    line["beyond"] = ["read/shard"] if read > MOST_READ else []
    line["beyond"] += ["peak anonymous MiB"] if growth > limit else []
    return line


def run(quick: bool) -> dict[str, list[dict[str, Any]]]:
    """Load both checkpoints on all layouts; return one table with a row for each."""
    rows = []
    sizes = ("5MB", "5MB") if quick else ("150MB", "450MB")
    configs = (checkpoints.gpt2(quick), checkpoints.gpt2_1b(quick))
    with checkpoints.scratch() as path:
        for i, (config, size) in enumerate(zip(configs, sizes, strict=True)):
            folder = path / str(i)
            checkpoints.write_checkpoint(folder, config, size)
            checkpoints.warm(folder)
            for name, (tp, pp, _) in LAYOUTS.items():
                found = ranks.on_ranks(load_one, tp * pp, folder, tp, pp)
                rows.append(row(checkpoints.describe(config), name, found, MOST_MEMORY))
    return {f"load: read <= {MOST_READ} x shard, peak <= {MOST_MEMORY} x shard + 64 MiB": rows}
