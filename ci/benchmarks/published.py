"""Published training runs beside the planner's simulated times; nothing is measured here.

First come the runs of `benchmarks.runs`, whose models and layouts are known, with errors per source. Then come the
multi-node figures of Slapo: samples/s of three systems on 16, 32 and 64 V100 (awslabs/slapo,
benchmark/plot/multi_node.py), published without a model. Assumed here, from the plot of the same figure and the run
scripts of the authors' fork (chhzh123/slapo): a GPT of 10B parameters, rows of 1024 tokens, 256 rows per step and 4
per micro-batch, float16, tp=8, pp=2, 1F1B. The devices are those of EC2 p3dn.24xlarge by its data sheet. No constant
is fitted to the figures.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import aceso
from benchmarks.runs import SOURCES, Run, planner_of

ONLY = ""  # one of the sources
GIB = 2**30
PICTURE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "published.png"
PUBLISHED = {  # devices: samples per second
    16: {"Megatron-LM": 9.21, "DeepSpeed": 9.75, "Slapo": 11.29},
    32: {"Megatron-LM": 16.69, "DeepSpeed": 19.14, "Slapo": 22.01},
    64: {"Megatron-LM": 28.16, "DeepSpeed": 23.90, "Slapo": 30.53},
}
SIZE: dict[str, Any] = {
    "n_layer": 48,
    "n_embd": 4096,
    "n_head": 32,
}  # 9.9B parameters; only "10B" is published
SEQ_LEN, ROWS = 1024, 256
SCRIPT = {"tp": 8, "pp": 2, "rows": 4, "stages_per_rank": 1, "sequence_parallel": False}
AS_SCRIPT, FASTEST = "simulated, tp=8 pp=2", "simulated, fastest"


def make_planner(size: dict[str, Any]) -> Any:
    """Return the planner of a GPT on p3dn.24xlarge nodes; `size` has the config fields for blocks, width and heads."""
    from transformers import GPT2Config

    from slapo_zoo.tune.planner.hardware import GIB, data_sheet
    from slapo_zoo.tune.planner.layout_search import Planner

    config: Any = GPT2Config(
        **size, n_positions=SEQ_LEN, vocab_size=50264, activation_function="gelu",
        bos_token_id=1, eos_token_id=2, architectures=["GPT2LMHeadModel"],
    )  # fmt: skip
    config.loss_type = "ForCausalLMLoss"
    # 32 GiB a device; 100 Gb/s a node, shared by its eight devices
    p3dn = data_sheet("V100, p3dn.24xlarge", 125e12, 0.9e12, 150e9, 12.5e9 / 8, 32 * GIB, 16e9, 80)
    return Planner(config, p3dn, SEQ_LEN, "fp16", "megatron")


def simulate(planner: Any, gpus: int, quick: bool = False) -> dict[str, tuple[float, str]]:
    """Return {"simulated, tp=8 pp=2" and "simulated, fastest": (samples/s, layout)} of the fastest layout that fits.

    The first is the fastest among layouts like the authors', the second among all; one without such a layout is
    absent. `quick` leaves out layouts with sequence parallelism.
    """
    fits = planner.search(gpus, ROWS, divided=not quick).feasible
    theirs = [f for f in fits if SCRIPT.items() <= vars(f.layout).items()]
    return {
        name: (ROWS / found[0].step.seconds, str(found[0].layout))
        for name, found in ((AS_SCRIPT, theirs), (FASTEST, fits))
        if found
    }


def run(quick: bool) -> dict[str, list[dict[str, Any]]]:
    """Return tables: errors per source, samples/s and their growth over 16 devices, simulated layouts, and Aceso's
    runs.
    """
    planner = make_planner({"n_layer": 2, "n_embd": 256, "n_head": 8} if quick else SIZE)
    found = {gpus: simulate(planner, gpus, quick) for gpus in PUBLISHED}
    rates: dict[str, dict[int, float]] = {
        name: {gpus: PUBLISHED[gpus][name] for gpus in PUBLISHED} for name in PUBLISHED[16]
    }
    for name in (AS_SCRIPT, FASTEST):
        rates[name] = {gpus: found[gpus][name][0] for gpus in found if name in found[gpus]}
    speed = [{"what": name} | {f"{n} GPUs": r[n] for n in r} for name, r in rates.items()]
    growth = [{"what": name, "32 / 16": r[32] / r[16], "64 / 16": r[64] / r[16],
               "efficiency at 64": r[64] / r[16] / 4} for name, r in rates.items()]  # fmt: skip
    layouts = [{"what": name, "GPUs": gpus, "layout": layout}
               for gpus, of in found.items() for name, (_, layout) in of.items()]  # fmt: skip
    return judged(quick) | {
        "samples/s: published, and simulated (not measured)": speed,
        "growth: published, and simulated (not measured)": growth,
        "simulated layouts": layouts,
        "Aceso's and Megatron-LM's plans on V100: measured by Aceso, and simulated (not measured)": aceso.table(
            quick
        ),
    }


def judge(runs: list[Run]) -> list[dict[str, Any]]:
    """Return, for each run, sorted by model: the run, simulated "seconds" and "memory" (GiB), and whether it was
    "refused".
    """
    found = []
    for run in sorted(runs, key=lambda r: (r.size, r.layout.tp)):
        planner = planner_of(run.size, run.node_network)
        step = planner.forecast(run.layout)
        limit = planner.hardware.memory - planner.hardware.reserved
        parts = step.ranks[step.fullest]
        held = (parts.weights + parts.gradients + parts.optimizer + parts.activations) / GIB
        found.append({
            "run": run, "seconds": step.step.seconds, "memory": held,
            "refused": run.same_memory and bool(run.seconds) and step.memory > limit,
        })  # fmt: skip
    return found


def scores(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the table row with the errors of one source, relative to the measured values; `found` is a result of
    `judge`.
    """
    timed = [f for f in found if f["run"].seconds]
    off = [f["seconds"] / f["run"].seconds - 1 for f in timed]
    sized = [abs(f["memory"] / f["run"].memory - 1) for f in found if f["run"].memory]
    return {
        "rows": len(timed), "mean error": statistics.mean(map(abs, off)), "worst": max(off, key=abs),
        "rank correlation": rank_correlation([f["seconds"] for f in timed], [f["run"].seconds for f in timed]),
        "memory, mean error": statistics.mean(sized) if sized else None,
        "ran, but refused": sum(f["refused"] for f in timed),
    }  # fmt: skip


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Spearman's rank correlation of two sequences; 1.0 for a single value."""
    ranks = [[sorted(x).index(v) for v in x] for x in (a, b)]
    return statistics.correlation(*ranks) if len(a) > 1 else 1.0


def regrets(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each model with over two measured layouts: how much slower the planner's choice is than the
    fastest.
    """
    groups: dict[Any, list[dict[str, Any]]] = {}
    for f in found:
        rows = f["run"].layout.dp * f["run"].layout.rows * f["run"].layout.micro_batches
        groups.setdefault((f["run"].source, f["run"].size, f["run"].gpus, rows), []).append(f)
    several = {key: group for key, group in groups.items() if len(group) > 2}
    rows = []
    for (source, size, gpus, _), group in several.items():
        pick = min(group, key=lambda f: f["seconds"])["run"]
        best = min(f["run"].seconds for f in group)
        ranks = rank_correlation([f["seconds"] for f in group], [f["run"].seconds for f in group])
        rows.append({
            "what": f"{source}: {size.blocks} x {size.width}, {gpus} GPUs", "layouts": len(group),
            "rank correlation": ranks, "our pick": str(pick.layout), "it took s": pick.seconds,
            "fastest s": best, "regret": pick.seconds / best - 1,
        })  # fmt: skip
    return rows


def draw(found: list[dict[str, Any]]) -> None:
    """Draw simulated over measured seconds, one point per run, into docs/benchmarks/published.png."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 5))
    for source in dict.fromkeys(f["run"].source for f in found):
        mine = [f for f in found if f["run"].source == source and f["run"].seconds]
        axes.loglog([f["run"].seconds for f in mine], [f["seconds"] for f in mine], ".", ms=4,
                    label=f"{source} ({len(mine)})")  # fmt: skip
    ends = axes.get_xlim()
    axes.plot(ends, ends, "k-", lw=0.7)
    axes.set(xlabel="measured and published, seconds of a step", ylabel="simulated",
             title="A training step: simulated, and as others measured it")  # fmt: skip
    axes.legend()
    figure.savefig(PICTURE, dpi=120, bbox_inches="tight")
    plt.close(figure)


def judged(quick: bool) -> dict[str, list[dict[str, Any]]]:
    """Return the table of errors per source and, if vTrain's multi-node runs were simulated, that of `regrets`."""
    names = [ONLY] if ONLY else ["korthikanti"] if quick else list(SOURCES)
    found = {name: judge([*SOURCES[name]()][: 2 if quick else None]) for name in names}
    rows = [{"what": f[0]["run"].source} | scores(f) for f in found.values()]
    if set(found) == set(SOURCES):
        draw([f for one in found.values() for f in one])
    picks = regrets(found.get("multi", []))
    return {
        "simulated beside what others measured; constants fitted to single-node rows alone": rows,
    } | ({"our pick among the layouts that were measured": picks} if picks else {})
