"""Load and save of a 1B Llama, against transformers' own tensor parallelism; a load forecast for 1024 ranks.

Floors: `readinto` of as many bytes into fresh memory on as many processes; one sequential write of the same bytes
with fsync. All free memory is written to once before. Times are the best of all repeats, since other work only adds
to them; on a busy machine the ratios of CPU time are more reliable than those of wall time.
"""

import functools
import importlib.util
import os
import resource
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import checkpoints, ranks
from benchmarks.ranks import LAYOUTS, MIB

ROUNDS, REPEATS = (
    3,
    2,
)  # rounds of new processes, which alternate with the other library's; loads in each
READ, MEMORY, FLOOR, PEER = 1.02, 1.05, 1.3, 0.6  # limits of a load
WRITE, PEER_SAVE = 1.5, 3.0  # limits of a save
PLAN_SECONDS, PLAN_BYTES = 5.0, 2**30
CHUNK = 16 << 20


def ours(folder: Path, tp: int, pp: int, map_weights: bool = True) -> Any:
    """Load this rank's part of the model with slapo_zoo."""
    from slapo_zoo import AutoScheduledModel

    return AutoScheduledModel.from_pretrained(folder, tp=tp, pp=pp, map_weights=map_weights)


def theirs(folder: Path, tp: int, pp: int) -> Any:
    """Load this rank's part of the model with transformers' tensor parallelism."""
    from transformers import AutoModelForCausalLM, logging
    from transformers.distributed.configuration_utils import DistributedConfig

    logging.disable_progress_bar()
    config = DistributedConfig(tp_plan="auto", tp_size=tp)
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", distributed_config=config)


def measure_load(kind: str, folder: Path, tp: int, pp: int) -> dict[str, Any]:
    """Load a model with slapo_zoo (`kind` "ours") or transformers ("theirs") REPEATS times; return this rank's
    figures.

    These are the memory growth of the first load, the best times, and the time of a plain read of as many bytes. Both
    libraries may map weights from the file and read them later, so a second time includes a write to every weight.
    """
    found: dict[str, Any] = {}
    load = functools.partial(ours if kind == "ours" else theirs, folder, tp, pp)
    for _ in range(REPEATS):
        model, cost = ranks.timed(load)
        found.setdefault("growth", cost.growth)
        _, writing = ranks.timed(functools.partial(write_once, model))
        ranks.best(found, wall=cost.wall, cpu=cost.cpu, written=cost.wall + writing.wall)
        if kind == "ours":
            ledger = model.ledger
            found |= {"read": ledger.bytes_read, "shard": ledger.shard_bytes}
        del model
        ranks.give_back()
        if kind == "ours":
            model, cost = ranks.timed(functools.partial(ours, folder, tp, pp, map_weights=False))
            _, writing = ranks.timed(functools.partial(write_once, model))
            ranks.best(found, at_once=cost.wall, at_once_written=cost.wall + writing.wall)
            del model
            ranks.give_back()
        if kind == "ours":
            floor = functools.partial(ranks.readinto_floor, found["read"], folder)
            _, least = ranks.timed(floor)
            ranks.best(found, floor=least.wall, floor_cpu=least.cpu)
            ranks.give_back()
    return found


def best_of(rounds: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return, for each rank, the least of every time and the most memory over all `rounds` of results."""
    found = [{key: min(r[rank][key] for r in rounds) for key in rounds[0][rank]}
             for rank in range(len(rounds[0]) if rounds else 0)]  # fmt: skip
    for rank, figures in enumerate(found):
        figures["growth"] = max(r[rank]["growth"] for r in rounds)
    return found


def write_once(model: Any) -> None:
    """Write each memory-mapped weight once, so that its pages become memory of this process."""
    model.train()
    for p in model.parameters():
        getattr(p, "_local_tensor", p).detach().add_(0)


def load_row(name: str, mine: list[dict[str, Any]], peer: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the table row of a layout, from results by rank of slapo_zoo (`mine`) and transformers (`peer`, may be
    []).

    Every figure is that of the worst rank.
    """

    def worst(key: str, ranks: list[dict[str, Any]] = mine) -> Any:
        return max(r[key] for r in ranks)

    read = max(r["read"] / r["shard"] for r in mine)
    row: dict[str, Any] = {
        "layout": name, "shard MiB": round(worst("shard") / MIB), "read/ shard": round(read, 4),
        "peak MiB": round(worst("growth") / MIB),
        "most MiB": round(MEMORY * worst("shard") / MIB + 64),
        "wall s": worst("wall"), "readinto s": worst("floor"),
        "wall/ readinto": worst("wall") / worst("floor"),
        "CPU/ readinto": worst("cpu") / worst("floor_cpu"), "written s": worst("written"),
        "at once s": worst("at_once"), "at once, written s": worst("at_once_written"),
    }  # fmt: skip
    if peer:
        row["their wall s"], row["their peak MiB"] = (
            worst("wall", peer),
            round(worst("growth", peer) / MIB),
        )
        row["wall/ theirs"] = row["wall s"] / row["their wall s"]
        row["CPU/ theirs"] = worst("cpu") / worst("cpu", peer)
        row["their written s"] = worst("written", peer)
    row["beyond"] = [name for name, bad in (
        ("read/ shard", read > READ), ("wall/ readinto", row["wall/ readinto"] > FLOOR),
        ("peak MiB", any(r["growth"] > MEMORY * r["shard"] + 64 * MIB for r in mine)),
        ("wall/ theirs", row.get("wall/ theirs", 0) > PEER),
    ) if bad]  # fmt: skip
    return row


def measure_save(kind: str, folder: Path, out: Path, tp: int, pp: int) -> dict[str, Any]:
    """Save a model loaded with slapo_zoo (`kind` "ours") or transformers ("theirs") ROUNDS times to new folders in
    `out`.

    Return this rank's memory growth and best seconds.
    """
    model = (ours if kind == "ours" else theirs)(folder, tp, pp)
    write_once(model)
    found: dict[str, Any] = {}
    for i in range(ROUNDS):
        target = out / f"{kind}-{i}"
        save = functools.partial(model.save_pretrained, target, max_shard_size="450MB")
        _, cost = ranks.timed(save)
        found["growth"] = max(found.get("growth", 0), cost.growth)
        ranks.best(found, seconds=cost.wall)
        ranks.barrier()
        if os.environ.get("RANK", "0") == "0":
            shutil.rmtree(target)
    return found


def write_floor(out: Path, size: int) -> float:
    """Return the least seconds to write `size` bytes sequentially to a file in the folder `out`, with fsync."""
    block, best = os.urandom(CHUNK), float("inf")
    for _ in range(ROUNDS):
        begin, left = time.perf_counter(), size
        with (out / "floor").open("wb", buffering=0) as file:
            while left > 0:
                left -= file.write(block[:left])
            os.fsync(file.fileno())
        best = min(best, time.perf_counter() - begin)
        (out / "floor").unlink()
    return best


def save_row(folder: Path, out: Path, size: int, largest: int) -> dict[str, Any]:
    """Return the table row of saving from tp=2 x pp=2, against a plain write and against transformers from tp=2.

    `size` is the bytes of the checkpoint, `largest` those of its largest tensor, which limit the peak of memory.
    """
    mine = ranks.on_ranks(measure_save, 4, "ours", folder, out, 2, 2)
    floor = write_floor(out, size)
    peer = ranks.on_ranks(measure_save, 2, "theirs", folder, out, 2, 1)
    seconds, growth = (max(r[key] for r in mine) for key in ("seconds", "growth"))
    row: dict[str, Any] = {
        "what": "ours tp=2 pp=2, theirs tp=2", "MiB": round(size / MIB),
        "peak over model MiB": round(growth / MIB), "most MiB": round(largest / MIB) + 64,
        "wall s": seconds, "write+fsync s": floor, "wall/write": seconds / floor,
        "their wall s": max(r["seconds"] for r in peer),
        "their peak MiB": round(max(r["growth"] for r in peer) / MIB),
    }  # fmt: skip
    row["theirs/ours"] = row["their wall s"] / seconds
    row["beyond"] = [name for name, bad in (
        ("peak over model MiB", growth > largest + 64 * MIB), ("wall/write", seconds > WRITE * floor),
        ("theirs/ours", row["theirs/ours"] < PEER_SAVE),
    ) if bad]  # fmt: skip
    return row


def plan_rows(folder: Path) -> list[dict[str, Any]]:
    """Write a sparse 70B checkpoint to a folder; return a row for each mesh: seconds and memory of its load forecast."""
    from slapo_zoo.zoo.load_forecast import plan_weights

    config, rows = checkpoints.llama_70b(), []
    size = checkpoints.write_checkpoint(folder, config, "5GB", sparse=True)
    for tp, pp, dp in ((8, 1, 1), (8, 8, 1), (8, 8, 16)):
        begin = time.perf_counter()
        plan = plan_weights(folder, tp, pp, dp)
        seconds = time.perf_counter() - begin
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        row: dict[str, Any] = {
            "what": f"tp={tp} pp={pp} dp={dp}", "ranks": plan.mesh.world_size,
            "model GB": plan.model_bytes / 1e9, "unassigned bytes": size - plan.assigned_bytes,
            "unaccounted": size - plan.model_bytes, "s": seconds, "process peak MiB": round(peak / MIB),
        }  # fmt: skip
        bad = {"s": seconds > PLAN_SECONDS, "process peak MiB": peak > PLAN_BYTES}
        bad |= {
            "unassigned bytes": row["unassigned bytes"] != 0,
            "unaccounted": row["unaccounted"] != 0,
        }
        rows.append({**row, "beyond": [name for name, is_bad in bad.items() if is_bad]})
    return rows


def run(quick: bool) -> dict[str, list[dict[str, Any]]]:
    """Return the tables of loads, saves and load forecasts."""
    if importlib.util.find_spec("accelerate") is None:
        sys.exit('transformers divides models only beside accelerate: pip install -e ".[trainer]"')
    config = checkpoints.llama_1b(quick)
    largest = max(_bytes(spec) for spec in checkpoints.specs_of(config))
    rows = []
    ranks.touch_memory()
    with checkpoints.scratch() as path:
        folder = path / "model"
        size = checkpoints.write_checkpoint(folder, config, "20MB" if quick else "450MB")
        checkpoints.warm(folder)
        for name, (tp, pp, _) in LAYOUTS.items():
            mine, peer = [], []
            for _ in range(ROUNDS):
                mine.append(ranks.on_ranks(measure_load, tp * pp, "ours", folder, tp, pp))
                if pp == 1:
                    peer.append(ranks.on_ranks(measure_load, tp, "theirs", folder, tp, 1))
            rows.append(load_row(name, best_of(mine), best_of(peer)))
        saved = [save_row(folder, path, size, largest)]
        plans = ranks.on_ranks(plan_rows, 1, path / "sparse")[0]
    return {f"load: {checkpoints.describe(config)}": rows, "save": saved, "plan: Llama 70B": plans}


def _bytes(spec: Any) -> int:
    from slapo_zoo.weights.file_layout import tensor_bytes

    return tensor_bytes(spec)
