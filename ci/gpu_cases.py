"""Run one case of `gpu-day` in this process: `gpu_cases.py STAGE[:what...] OUT [--fake]` prints one JSON line.

`gpu_cases.py list . [--fake]` prints the names of all cases, the most important first.
"""

import fcntl
import importlib.metadata
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gpu_ranks
import gpu_training
import torch
from gpu_models import FAMILIES, batch_of, config_of, device

# Packages that a bare GPU machine lacks; a fake run must do without them too.
MISSING = (
    "liger_kernel",
    "deepspeed",
    "megatron",
    "jsonschema",
    "xformers",
    "flash_attn",
)
TIMED = ("kernels", "steps", "load", "compiled")
ON_CPU = ("short_attention", "linear")  # kernels without Triton code
FIRST = (
    "t5_attention", "local_causal_attention", "linear_cross_entropy", "sparse_mlm_head_loss",
    "bias_dropout_residual_layer_norm", "geglu", "rms_norm", "swiglu",
)  # fmt: skip


def fake_kernels() -> list[str]:
    """Return the kernels that a fake run measures; they are few, since Triton's interpreter is slow."""
    return ["rms_norm", "geglu"]


def names(fake: bool) -> list[str]:
    """Return the names of all cases in the order in which they run; `fake`: of a run without a GPU."""
    from slapo_zoo.dispatch.benchmark import SHAPES
    from slapo_zoo.dispatch.kernel_registry import load_kernels

    kernels = fake_kernels() if fake else [*FIRST, *(n for n in SHAPES if n not in FIRST)]
    families = [*FAMILIES][:2] if fake else [*FAMILIES]
    found = ["env:device", *(f"compile:{chip}" for chip in ([] if fake else [_chip()]))]
    found += [
        f"correct:{name}" for name in kernels if name not in ON_CPU and load_kernels()[name].inputs
    ]
    found += [case for case in gpu_ranks.CASES if case.startswith(("masks", "ranks"))]
    found += gpu_training.names(fake)
    drops = [f"{family}:{drop}" for family in families for drop in ("default", "0")]
    timed = [f"kernels:{name}" for name in kernels] + [
        f"steps:{what}" for what in (drops[:1] if fake else drops)
    ]
    found += [] if fake else [f"warm:{case}" for case in timed]
    compiled = [] if fake else [f"compiled:{family}" for family in families]
    return [*found, *timed, "load:files", *compiled, "pictures:all"]


def _chip() -> str:
    if not torch.cuda.is_available():
        return "90"
    return "{}{}".format(*torch.cuda.get_device_capability())


def wait() -> None:
    """Wait until the device has finished its work."""
    if device() == "cuda":
        torch.cuda.synchronize()


def median_seconds(run: Callable[[], Any], times: int) -> float:
    """Run a function once to warm up, then `times` times; return the median seconds of a run."""
    run()
    found = []
    for _ in range(times):
        wait()
        begin = time.perf_counter()
        run()
        wait()
        found.append(time.perf_counter() - begin)
    return sorted(found)[len(found) // 2]


def env(what: str, out: Path, fake: bool) -> dict[str, Any]:
    """Return versions, the device, and the rates of a copy and of a bf16 matrix product; the first argument is
    unused.
    """
    import transformers

    side, numbers = (64, 1 << 16) if fake else (8192, 1 << 30)
    x, m = (
        torch.empty(numbers, dtype=torch.int8, device=device()),
        torch.empty(side, side, device=device()),
    )
    m = m.to(torch.bfloat16).fill_(1.0)
    y = torch.empty_like(x)
    copy, product = median_seconds(lambda: y.copy_(x), 5), median_seconds(lambda: m @ m, 5)
    found: dict[str, Any] = {
        "torch": torch.__version__, "transformers": transformers.__version__, "python": sys.version.split()[0],
        "device": "cpu", "copy GB/s": 2 * numbers / copy / 1e9, "bf16 TFLOP/s": 2 * side**3 / product / 1e12,
    }  # fmt: skip
    if device() == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"device": properties.name, "multiprocessors": properties.multi_processor_count,
                  "bytes": properties.total_memory, "capability": _chip()}  # fmt: skip
    return found


def compile_(chip: str, out: Path, fake: bool) -> dict[str, Any]:
    """Compile all launches at real sizes for a chip ("90"), and return their number; RuntimeError if one is beyond a
    limit.
    """
    sys.path.insert(0, str(Path(__file__).parent))
    from benchmarks import launches  # pyright: ignore[reportMissingImports]

    launches.ONLY = chip
    rows = [row for table in launches.run(False).values() for row in table]
    beyond = [row for row in rows if row.get("beyond")]
    if beyond:
        raise RuntimeError(
            f"{len(beyond)} of {len(rows)} launches are beyond their limits: {beyond[:3]}"
        )
    return {"launches": len(rows)}


def correct(name: str, out: Path, fake: bool) -> dict[str, Any]:
    """Compare output and gradients of a kernel with its reference in fp64; return {dtype: largest relative error}.

    RuntimeError is raised for a larger error than allowed, or if a second run gives other bits.
    """
    from slapo_zoo.dispatch.choose_kernel import force
    from slapo_zoo.dispatch.kernel_registry import load_kernels

    kernel: Any = load_kernels()[name]
    worst, wrong = {}, []
    for dtype in ("float32",) if fake else ("bfloat16", "float16", "float32"):
        worst[dtype] = 0.0
        for shape in kernel.shapes[:1] if fake else kernel.shapes:
            torch.manual_seed(0)
            given = {k: v.to(getattr(torch, dtype)) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
                     for k, v in kernel.inputs(*shape, device=device()).items()}  # fmt: skip
            wanted = _with_gradients(kernel.reference, given, torch.float64)
            with force("triton"):
                found = _with_gradients(kernel.entry, given, getattr(torch, dtype))
                again = _with_gradients(kernel.entry, given, getattr(torch, dtype))
            for ours, same, truth in zip(found, again, wanted, strict=True):
                if not torch.equal(ours, same):
                    wrong.append(f"{shape} {dtype}: two runs differ")
                error = float((ours.double() - truth).norm() / truth.norm().clamp(min=1e-9))
                worst[dtype] = max(worst[dtype], error)
                if not error <= (2e-3 if dtype == "float32" else 2e-2):
                    wrong.append(f"{shape} {dtype}: error {error:.2e}")
    if wrong:
        raise RuntimeError(f"{name}: {wrong}")
    return worst


def _with_gradients(function: Any, given: dict[str, Any], dtype: torch.dtype) -> list[torch.Tensor]:
    cast = {k: v.detach().to(dtype).requires_grad_() if isinstance(v, torch.Tensor) and v.is_floating_point()
            else v for k, v in given.items()}  # fmt: skip
    out = function(**cast)
    out = out[0] if isinstance(out, tuple) else out
    leaves = [v for v in cast.values() if isinstance(v, torch.Tensor) and v.requires_grad]
    gradients = torch.autograd.grad(
        out.double().sum(), leaves, materialize_grads=True, allow_unused=True
    )
    return [out.detach(), *gradients]


def kernels(what: str, out: Path, fake: bool) -> dict[str, Any]:
    """Measure the kernel named `what` at all its shapes; write the rows to the table below `out`, and return them.

    Rows that fail are returned as {"errors": {row: error}} beside {"rows": [...]}; RuntimeError if all of them fail.
    """
    from slapo_zoo.dispatch import benchmark
    from slapo_zoo.dispatch.kernel_registry import load_kernels

    load_kernels()
    shapes = (
        [KERNEL_TINY[what]] if fake else benchmark.SHAPES[what][1:] + benchmark.WIDE.get(what, [])
    )
    if fake:
        benchmark.REPEATS, benchmark.SECONDS = 3, 0.1
    rows, errors = [], {}
    for shape in shapes:
        for dtype in (torch.float32,) if fake else (torch.bfloat16, torch.float32):
            try:
                rows.append(benchmark.measure(what, shape, dtype, device(), compile=False))
            except Exception as error:
                errors[f"{shape} {dtype}"] = f"{type(error).__name__}: {str(error)[-500:]}"
    if not rows:
        raise RuntimeError(f"{what}: {errors}")
    on = torch.cuda.get_device_name() if device() == "cuda" else "fake" if fake else "cpu"
    benchmark.write(on, rows, out / "cache" / "kernels")
    return {"rows": rows, "errors": errors}


def warm(what: str, out: Path, fake: bool) -> dict[str, Any]:
    """Compile what the timed case `what` compiles, so that it finds all in Triton's cache; keep no timings."""
    from slapo_zoo.dispatch import benchmark

    benchmark.REPEATS = 1
    stage, _, rest = what.partition(":")
    with tempfile.TemporaryDirectory() as scratch:
        RUN[stage](rest, Path(scratch), fake)
    return {"warm": 1}


KERNEL_TINY: dict[str, tuple] = {"rms_norm": (4, 16), "geglu": (1, 4, 16)}


def steps(what: str, out: Path, fake: bool) -> dict[str, Any]:
    """Measure whole steps with AdamW in bf16: plain transformers, ours without kernels, ours; `what` is "CLASS:DROPOUT".

    Return milliseconds and peak bytes of each.
    """
    family, dropout = what.split(":")
    tokens = 8 if fake else 512
    config = config_of(family, fake, dropout)
    batch = batch_of(config, 2 if fake else 16, tokens, padded="Bert" in family)
    found: dict[str, Any] = {}
    for kind in ("plain", "ours") if fake else ("plain", "reference", "ours"):
        seconds, memory = _step(kind, family, config, batch, 1 if fake else 10)
        found |= {f"{kind} ms": 1e3 * seconds, f"{kind} bytes": memory}
    return found


def _step(
    kind: str, family: str, config: Any, batch: dict[str, Any], times: int
) -> tuple[float, int]:
    import transformers

    from slapo_zoo import AutoScheduledModel

    torch.manual_seed(0)
    is_ours = kind in ("ours", "reference")
    if is_ours:
        kernels = "auto" if kind == "ours" else "reference"
        model: Any = AutoScheduledModel.from_config(
            config, seed=0, dtype=torch.bfloat16, device=device(), kernels=kernels
        )
    else:
        model = getattr(transformers, family)(config).to(device(), torch.bfloat16)
    model.train()
    called = torch.compile(model) if kind == "compiled" else model
    fused = device() == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)

    def run() -> None:
        model.train_step(batch) if is_ours else called(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    if fused:
        torch.cuda.reset_peak_memory_stats()
    seconds = median_seconds(run, times)
    memory = torch.cuda.max_memory_allocated() if fused else 0
    return seconds, memory


def compiled(family: str, out: Path, fake: bool) -> dict[str, Any]:
    """Measure whole steps of plain transformers under torch.compile, without dropout; return milliseconds and peak bytes."""
    config = config_of(family, fake, "0")
    seconds, memory = _step(
        "compiled", family, config, batch_of(config, 16, 512, padded="Bert" in family), 10
    )
    return {"compiled ms": 1e3 * seconds, "compiled bytes": memory}


def pictures(what: str, out: Path, fake: bool) -> dict[str, Any]:
    """Draw bars of eager time over kernel time, from the results in `out`; return {"pictures": 0} without matplotlib."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return {"pictures": 0, "why": "no matplotlib"}
    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [json.loads(line) for line in (out / "results.jsonl").read_text("utf-8").splitlines()]
    rows = {
        f"{row['what']} {row['shape']} {row['dtype']}": row["eager / ours"]
        for line in lines
        for row in line.get("rows", [])
        if isinstance(row.get("eager / ours"), float)
    }
    if not rows:
        return {"pictures": 0, "why": "no kernel was measured"}
    figure, axis = pyplot.subplots(figsize=(9, 1 + 0.25 * len(rows)))
    axis.barh([*rows], [*rows.values()])
    axis.axvline(1.0, color="black")
    axis.set_xlabel("time of what transformers runs, in times of the kernel")
    figure.tight_layout()
    figure.savefig(out / "kernels.png", dpi=100)
    return {"pictures": 1}


RUN: dict[str, Callable[[str, Path, bool], dict[str, Any]]] = {
    "env": env, "compile": compile_, "correct": correct, "kernels": kernels,
    "steps": steps, "masks": gpu_ranks.masks, "ranks": gpu_ranks.ranks, "load": gpu_ranks.load,
    "families": gpu_training.families, "loops": gpu_training.loops, "compiled": compiled, "warm": warm, "pictures": pictures,
}  # fmt: skip


def hide() -> None:
    """Make packages that a bare GPU machine lacks fail to import; slapo-zoo itself looks not installed, as in a
    checkout.
    """
    for name in MISSING:
        sys.modules[name] = None  # pyright: ignore[reportArgumentType]
    installed = importlib.metadata.distribution

    def distribution(name: str) -> importlib.metadata.Distribution:
        if name == "slapo-zoo":
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    importlib.metadata.distribution = distribution


def end_with_driver() -> None:
    """Start a thread that kills this process and its children when the driver, ci/gpu_day.py, ends."""
    if lifeline := os.environ.pop("GPU_DAY_LIFELINE", ""):

        def watch() -> None:
            os.read(int(lifeline), 1)
            os.killpg(0, signal.SIGKILL)

        threading.Thread(target=watch, daemon=True).start()


@contextmanager
def turn_of(case: str, out: Path) -> Iterator[None]:
    """Context in which a timed case has the device for itself: it imports what it needs, then waits for its turn."""
    if case.partition(":")[0] not in TIMED:
        yield
        return
    import transformers  # noqa: F401

    import slapo_zoo.model.load.auto  # noqa: F401

    with (out / "device.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Run the case that the command line names, or list all cases; return the exit status."""
    end_with_driver()
    case, out, fake = sys.argv[1], Path(sys.argv[2]), "--fake" in sys.argv
    if fake:
        hide()
    if case == "list":
        print(json.dumps({"cases": names(fake)}))
        return 0
    stage, _, what = case.partition(":")
    with turn_of(case, out):
        print(json.dumps(RUN[stage](what, out, fake)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
