"""Benchmark each kernel, forward and backward, against eager torch, torch.compile and (on a GPU) Liger-Kernel.

A kernel and its alternatives run in turn in one process, so that ratios of times hold on a busy machine too. Results
go to `<device>.json` in the user's cache folder; this file later decides which kernels run.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slapo_zoo.dispatch.baselines import EXPERT, PLAIN, liger
from slapo_zoo.dispatch.choose_kernel import KEPT, force
from slapo_zoo.dispatch.kernel_registry import KERNELS, bucket, load_kernels
from slapo_zoo.dispatch.tables import (
    UNMEASURED,
    Table,
    capability,
    forget,
    own_table,
    slug,
    user_folder,
)

GAIN = 1.02  # least speed-up in some row for a kernel to become a default
REPEATS, SECONDS = 15, 1.5
FLUSH = 256 << 20  # bytes written between two runs on a GPU, more than its L2
AHEAD = 40  # such writes before a run: the host has launched the run before the GPU begins with it
# kernel -> shapes for its `inputs`, as in the models it serves; the first is for quick runs
SHAPES: dict[str, list[tuple]] = {
    "bias_gelu": [(512, 1024), (2048, 3072, "tanh"), (8192, 4096, "tanh"), (2048, 3072), (8192, 4096)],
    "bias_relu": [(512, 1024), (2048, 3072), (8192, 4096)],
    "relu_dropout": [(4, 128, 1024), (4, 512, 2048), (16, 512, 4096)],
    "geglu": [(4, 128, 1024), (4, 512, 2048), (16, 512, 2816)],
    "swiglu": [(512, 1024), (4096, 2048), (8192, 2816)],
    "layer_norm": [(512, 768), (4096, 768), (8192, 1024)],
    "rms_norm": [(512, 768), (4096, 768), (8192, 1024)],
    "bias_dropout_residual_layer_norm": [(4, 128, 768), (8, 512, 768), (16, 512, 1024)],
    "embedding_layer_norm": [(4, 128, 768), (8, 512, 768), (16, 512, 1024)],
    "linear_cross_entropy": [(256, 256, 8000), (1024, 768, 50257), (8192, 768, 50257)],
    "vocab_parallel_cross_entropy": [(256, 8000), (1024, 12576), (8192, 12576)],
    "vocab_parallel_linear_cross_entropy": [(256, 256, 8000), (1024, 768, 12576), (8192, 768, 12576)],
    "sparse_mlm_head_loss": [(4, 128, 256, 8000), (4, 512, 768, 30522), (16, 512, 768, 30522)],
    "local_causal_attention": [(1, 4, 512, 64, 128), (1, 12, 1024, 64, 256), (4, 16, 2048, 128, 256)],
    "t5_attention": [(1, 4, 256, 256, 64, False), (4, 12, 512, 512, 64, False), (16, 16, 512, 512, 64, False)],
    "linear": [(256, 256, 256), (1024, 768, 3072), (8192, 1024, 1024), (1024, 3072, 768), (8192, 1024, 4096), (256, 768, 768)],
    "short_attention": [(1, 4, 128, 64, False), (4, 12, 197, 64, False), (16, 12, 197, 64, False), (4, 12, 512, 64, True), (16, 12, 512, 64, True), (2, 12, 512, 64, False)],
    "batch_norm_relu_add": [(2, 64, 16, 16), (8, 256, 28, 28), (64, 256, 56, 56)],
}  # fmt: skip
# further shapes on a GPU: widths of models of billions of parameters
WIDE: dict[str, list[tuple]] = {
    "bias_gelu": [(8192, 16384, "tanh")], "geglu": [(8, 1024, 10240)], "swiglu": [(8192, 11008)],
    "layer_norm": [(8192, 4096)], "rms_norm": [(8192, 4096)], "bias_dropout_residual_layer_norm": [(8, 1024, 4096)],
}  # fmt: skip
SAME_ON_CPU = ("bias_relu", "layer_norm", "embedding_layer_norm")  # torch's own operations there
NO_LIGER = "no such kernel in Liger, or no Liger"
OTHERS = ("eager", "expert", "compile", "liger")


def arguments(name: str, shape: tuple, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Return random keyword arguments for the kernel `name` at `shape` (see SHAPES); float tensors need gradients."""
    torch.manual_seed(0)
    given = KERNELS[name].inputs(*shape, device=device)  # pyright: ignore[reportOptionalCall]
    given.pop("chunk_bytes", None)  # small, for tests
    if device == "cpu":  # a CPU draws its masks with torch's generator, not with ours
        given = {k: v for k, v in given.items() if k not in ("seeds", "p")}
    if "labels" in given:  # 15 % of the tokens, as BERT masks them
        masked = torch.rand(given["labels"].shape, device=device) < 0.15
        ids = torch.randint(shape[-1], masked.shape, device=device)
        given["labels"] = torch.where(masked, ids, -100)
    if name == "linear_cross_entropy":  # every token has a label, and the head no bias
        given |= {"target": torch.randint(shape[-1], (shape[0],), device=device), "bias": None,
                  "label_smoothing": 0.0}  # fmt: skip
    return {
        k: v.to(dtype).requires_grad_() if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in given.items()
    }


def step(function: Any, given: dict[str, Any]) -> Callable[[], None]:
    """Return a function that runs forward and backward of `function(**given)`, always with the same output gradient."""
    out = function(**given)
    out = out[0] if isinstance(out, tuple) else out
    gradient = torch.ones_like(out) if out.ndim else None
    leaves = [t for t in given.values() if isinstance(t, Tensor) and t.requires_grad]

    def run() -> None:
        found = function(**given)
        found = found[0] if isinstance(found, tuple) else found
        torch.autograd.grad(found, leaves, gradient, allow_unused=True)

    return run


def timed(steps: dict[str, Callable[[], None]], device: str) -> dict[str, list[float]]:
    """Time the functions in `steps` (name --> function) in turn, several times each; return {name: sorted milliseconds}."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    waste = torch.empty(FLUSH if device == "cuda" else 0, dtype=torch.uint8, device=device)
    begin = time.perf_counter()
    for repeat in range(REPEATS):
        if repeat >= (5 if device == "cuda" else 3) and time.perf_counter() - begin > SECONDS * len(
            steps
        ):
            break
        for name, run in steps.items():
            found[name].append(_once(run, waste))
    return {name: sorted(times) for name, times in found.items()}


def _once(run: Callable[[], None], waste: Tensor) -> float:
    if not waste.is_cuda:
        # one thread: its CPU time, which other processes do not change
        clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        begin = clock()
        run()
        return 1e3 * (clock() - begin)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(AHEAD):
        waste.zero_()  # and no operand is in the cache
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def host_time(run: Callable[[], None]) -> float:
    """Return the median milliseconds that the host takes to launch `run` on an idle GPU."""
    found = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        found.append(1e3 * (time.perf_counter() - begin))
    torch.cuda.synchronize()
    return sorted(found)[len(found) // 2]


def alternatives(name: str, given: dict[str, Any], device: str, compile: bool) -> dict[str, Any]:
    """Return {alternative: function that runs forward and backward with arguments `given`, or text why it cannot run}.
    Alternatives are "ours" (the kernel `name`), "eager" (usual torch operations), "expert" (faster torch operations
    that an expert would use, from baselines.EXPERT), "compile" (torch.compile, if `compile`), "liger" (Liger Kernel).
    """
    kernel: Any = KERNELS[name]
    plain = PLAIN.get(name, kernel.reference)
    found: dict[str, Any] = {"eager": step(plain, given), "ours": step(kernel.entry, given)}
    found["expert"] = step(EXPERT[name], given) if name in EXPERT else "what eager is"
    found["compile"] = UNMEASURED
    if compile:
        torch._dynamo.reset()
        try:
            found["compile"] = step(torch.compile(plain, dynamic=False), given)
        except Exception as error:  # this alternative is left out, the row is kept
            found["compile"] = f"{type(error).__name__}: {str(error)[:200]}"
    function: Any = liger().get(name) if device == "cuda" else None
    liger_has_none = NO_LIGER if device == "cuda" else UNMEASURED
    found["liger"] = liger_has_none if function is None else step(function, given)
    return found


def measure(
    name: str, shape: tuple, dtype: torch.dtype, device: str, compile: bool
) -> dict[str, Any]:
    """Time forward and backward of the kernel `name` and of its alternatives (torch.compile only if `compile`) on
    `device`, "cpu" or "cuda", with random arguments of the sizes `shape`, those of the kernel's function
    `inputs(*shape)`.

    Return a dict: "p20 ms", "p50 ms", "p80 ms" --> milliseconds of the kernel; "<alternative> / ours" --> ratio of
    median times, or why the alternative cannot run; "what" (kernel), "shape", "dtype", "bucket" (kernel:dtype:width).
    On a GPU times are of the device; "host ours ms" and "host eager ms" --> milliseconds that launches take the host.
    """
    given = arguments(name, shape, dtype, device)
    with force("triton"):
        found = alternatives(name, given, device, compile)
        steps: Any = {k: v for k, v in found.items() if callable(v)}
        times = timed(steps, device)
        host = {k: host_time(steps[k]) for k in ("ours", "eager")} if device == "cuda" else {}
    ours = times["ours"]
    p20, p50, p80 = (ours[int(q * (len(ours) - 1))] for q in (0.2, 0.5, 0.8))
    row: dict[str, Any] = {"what": name, "shape": "x".join(map(str, shape)), "dtype": str(dtype)[6:],
                           "p20 ms": p20, "p50 ms": p50, "p80 ms": p80}  # fmt: skip
    for other in OTHERS:
        middle = times[other][(len(times[other]) - 1) // 2] if other in times else None
        row[f"{other} / ours"] = found[other] if middle is None else middle / p50
    row |= {f"host {name} ms": taken for name, taken in host.items()}
    first = next(t for t in given.values() if isinstance(t, Tensor) and t.is_floating_point())
    return row | {"bucket": bucket(name, first)}


def dispatch(rows: list[dict[str, Any]], path: str) -> tuple[dict[str, str], dict[str, float]]:
    """Return ({bucket: `path` or "torch"}, {bucket: smallest ratio of an alternative's time to the kernel's}).

    `rows` are results of `measure`. A bucket is kernel:dtype:last axis, rounded up to a power of two; `path`, "ours" or
    "triton", means that the kernel runs. It does if all alternatives (eager, expert torch code, Liger) took at least 98
    % of the kernel's time in each measurement, and one took at least 102 % in one; but not if launching the kernel
    takes the host longer than launching the eager code, and longer than the GPU computes. torch.compile does not count.
    """
    ratios: dict[str, list[float]] = {}
    late = {row["bucket"] for row in rows if _host_is_late(row)}
    for row in rows:
        found = [row.get(f"{other} / ours") for other in ("eager", "expert", "liger")]
        found = [ratio for ratio in found if isinstance(ratio, float)]
        ratios.setdefault(row["bucket"], []).extend(found)
    least = {key: round(min(found), 3) for key, found in ratios.items() if found}
    good = {
        key for key, found in ratios.items()
        if found and min(found) >= KEPT and max(found) >= GAIN and key not in late
    }  # fmt: skip
    return {key: path if key in good else "torch" for key in ratios}, least


def _host_is_late(row: dict[str, Any]) -> bool:
    host = row.get("host ours ms")
    return host is not None and host > max(row["p50 ms"], row["host eager ms"] / KEPT)


def write(device: str, rows: list[dict[str, Any]], folder: Path | None = None) -> Path:
    """Write `rows`, results of `measure`, to the JSON file of `device` ("cpu", or the name of the GPU), with the table
    that says which kernels run; return the file's path. Results for other shapes in the file are kept. `folder` None
    takes the user's cache folder, never the installed package.
    """
    file = (folder or user_folder()) / f"{slug(device)}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    about = {"torch": torch.__version__, "command": "slapo-zoo bench kernels"}
    kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}  # and whole steps
    new = {(row["what"], row["shape"], row["dtype"]) for row in rows}
    older = (r for r in kept.get("rows", []) if (r["what"], r["shape"], r["dtype"]) not in new)
    rows = sorted([*older, *rows], key=lambda row: (row["what"], row["dtype"], row["shape"]))
    table, least = dispatch(rows, "ours" if device == "cpu" else "triton")
    content = kept | {"device": device, "capability": capability(device), **about, "rows": rows}
    for title, found in (("dispatch", table), ("ratios", least)):  # kept: results of whole steps
        content[title] = _of_other_kernels(kept.get(title, {}), rows) | found
    whole = file.with_suffix(f".{os.getpid()}")  # atomic: an interrupted run changes nothing
    whole.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    whole.replace(file)
    forget()
    return file


def _of_other_kernels(table: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the entries of `table` (kernel:dtype:size --> value) of kernels that `rows`, results of `measure`, lack."""
    measured = {row["what"] for row in rows}
    return {key: value for key, value in table.items() if key.partition(":")[0] not in measured}


def cases(quick: bool, only: str, device: str) -> list[tuple[str, tuple, torch.dtype]]:
    """Return a list of (kernel name, shape, dtype) that a benchmark on `device` ("cpu" or "cuda") measures. `quick` takes
    only each kernel's first shape; `only` is a comma-separated list of beginnings of kernel names ("": all kernels).
    """
    found: list[tuple[str, tuple, torch.dtype]] = []
    for name, shapes in SHAPES.items():
        if not name.startswith(tuple(only.split(","))) or (device == "cpu" and name in SAME_ON_CPU):
            continue
        asked = shapes[1::2] if device == "cpu" else shapes[1:] + WIDE.get(name, [])
        for shape in shapes[:1] if quick else asked:
            found += [(name, shape, dtype) for dtype in (torch.float32, torch.bfloat16)]
    return found


def run(
    quick: bool, only: str = "", folder: Path | None = None, again: bool = True
) -> dict[str, list[dict[str, Any]]]:
    """Benchmark all kernels in fp32 and bf16, on a GPU if there is one; return {title for a printed table: results}.

    Each result is the dict that `measure` returns for one kernel, shape and dtype. Unless `quick`, it is written to the
    device's JSON file at once. A measurement that fails is logged and left out.

    Args:
        quick: measure only the first shape of each kernel, and write nothing.
        only: comma-separated beginnings of kernel names; "" measures all kernels.
        folder: folder of the JSON file; None takes the user's cache folder.
        again: also measure what the file has already; without effect if `quick`.
    """
    load_kernels()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    known = set() if quick or again else _measured_rows(name, folder)
    rows = []
    for what, shape, dtype in cases(quick, only, device):
        if (what, "x".join(map(str, shape)), str(dtype)[6:]) in known:
            continue
        row = _row(what, shape, dtype, device, compile=not quick)
        if row is None:
            continue
        rows.append(row)
        if not quick:  # an interrupted run keeps its rows
            write(name, [row], folder)
    for row in rows:
        row["beyond"] = []
    return {f"kernels on {device}: slowdown of the others against ours": rows}


def quick_table(names: Sequence[str], device: str) -> Table:
    """Measure those kernels of `names` (if they have a benchmark) that the device's JSON file of timings lacks, at one
    shape each, and write the results to the file; return the table of all timings of `device`, "cpu" or a GPU's name.
    """
    kind = "cpu" if device == "cpu" else "cuda"
    known = {row[0] for row in _measured_rows(device, None)}
    for name, shape, dtype in cases(False, "", kind):
        if name in names and name not in known and shape == SHAPES[name][1]:
            row = _row(name, shape, dtype, kind, compile=False)
            if row:
                write(device, [row])
    return own_table(device) or Table(device)


def _row(
    what: str, shape: tuple, dtype: torch.dtype, device: str, compile: bool
) -> dict[str, Any] | None:
    """Return the timings of kernel `what` at one shape, as `measure` does; if that fails, log why and return None."""
    try:
        return measure(what, shape, dtype, device, compile)
    except Exception as error:
        logging.getLogger("slapo_zoo").warning("%s %s %s: %s", what, shape, dtype, error)
        return None


def _measured_rows(device: str, folder: Path | None) -> set[tuple[str, str, str]]:
    """Return {(kernel, shape, dtype)} of the measurements in a device's JSON file (`folder` None: user's cache)."""
    file = (folder or user_folder()) / f"{slug(device)}.json"
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return {(row["what"], row["shape"], row["dtype"]) for row in found.get("rows", [])}
