"""Comparison with other libraries, on the widths of BERT-base, GPT-2 and a small Llama, with tp=2 on 2 cores.

TARGETS has the limits: a step of slapo_zoo against the best of the libraries that shard a model, and a schedule with
tp=1 against the plain model.
"""

import tempfile
from pathlib import Path
from typing import Any

from compare.run import side_by_side, write_report
from compare.shapes import Work, shape, write

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = ("bert", "gpt2", "llama")
PEERS = ("transformers tp", "DeepSpeed AutoTP")
TARGETS = {  # target: (limit, whether the value must be at least the limit)
    "step / ours, best of transformers tp and AutoTP": (1.5, True),
    "step / ours, DTensor": (1.15, True),
    "parameters of ours / theirs": (0.9, False),
    "first gradients, ours / theirs": (0.7, False),
    "tp=1 step / plain step": (1.01, False),
}


def run(quick: bool) -> dict[str, list[dict[str, Any]]]:
    """Compare the libraries on all families; return the tables, and write them to docs/benchmarks (`quick`: to
    runs/side).
    """
    results: dict[str, Any] = {}
    place = ROOT / "runs" / "side" if quick else ROOT / "docs" / "benchmarks"
    command = "ci/run.py bench side" + (" --quick" if quick else "")
    for name in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            write(shape(name, quick), Path(folder), seed=0)
            work = Work(folder, batch_size=2, seq_len=16 if quick else 128)
            label = f"{name}, tiny" if quick else f"{name}, 4 layers of base width"
            print(f"{label}: minutes of measurement ...", flush=True)
            results[label] = side_by_side(work, 2 if quick else 7)
        write_report(
            results, place, command
        )  # written now, so that a later family's failure loses nothing
    tables: dict[str, list[dict[str, Any]]] = {}
    for name, found in results.items():
        wrong = [] if found["green"] else ["verdict"]
        tables[f"{name}: parity"] = [row | {"beyond": wrong} for row in found["parity"]]
        tables[f"{name}: speed and memory"] = found["speed"]
        tables[f"{name}: targets"] = _targets(found["speed"], quick)
    return tables


def _targets(rows: list[dict[str, Any]], quick: bool) -> list[dict[str, Any]]:
    """Return a row for each of TARGETS with the measured value; None if the library to compare with did not run."""
    by_name = {row["contender"]: row for row in rows}
    peers = [by_name[name] for name in PEERS if name in by_name]
    divided = peers + [by_name[name] for name in ("DTensor",) if name in by_name]
    alone = by_name.get("slapo_zoo tp=1")
    found = dict.fromkeys(TARGETS)
    if peers:
        found["step / ours, best of transformers tp and AutoTP"] = min(
            r["time / ours"] for r in peers
        )
    if "DTensor" in by_name:
        found["step / ours, DTensor"] = by_name["DTensor"]["time / ours"]
    if divided:
        found["parameters of ours / theirs"] = max(r["ours / its bytes"] for r in peers or divided)
        found["first gradients, ours / theirs"] = max(r["ours / its first"] for r in divided)
    if alone:
        found["tp=1 step / plain step"] = round(
            alone["time / ours"] / by_name["transformers"]["time / ours"], 3
        )
    return [_target(what, value, quick) for what, value in found.items()]


def _target(what: str, value: float | None, quick: bool) -> dict[str, Any]:
    limit, least = TARGETS[what]
    missed = value is not None and (value < limit if least else value > limit)
    return {
        "what": what, "target": f"{'>=' if least else '<='} {limit}", "found": value,
        "beyond": ["found"] if missed and not quick else [],
    }  # fmt: skip
