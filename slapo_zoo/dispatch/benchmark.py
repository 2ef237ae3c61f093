"""Every kernel beside what it replaces: eager, torch.compile, and Liger on a GPU; forward and backward.

All alternatives of a row run in turn in one process, so ratios hold on a busy machine too. It
writes `hub_cards/bench/<device>.json`, from which the dispatch table is read.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from slapo_zoo.dispatch.registry import KERNELS, MEASURED, UNMEASURED, bucket, force, load_kernels, slug

KEPT = (
    0.98  # a kernel becomes the default where its p50 is at least so good as the best alternative
)
GAIN = 1.02  # and it must beat what transformers runs: a kernel that changes nothing is no default
REPEATS, SECONDS = 15, 1.5
FLUSH = 256 << 20  # bytes written between two runs on a GPU, more than its L2
# kernel -> test shapes of its `inputs`, as in the models that it serves; the first is the quick one
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
SAME_ON_CPU = ("bias_relu", "layer_norm", "embedding_layer_norm")  # torch's own operations there
NO_LIGER = "Liger has none"


def _gelu(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    """gelu_new is eight operations in transformers 5.23, the exact one a single one."""
    if approximate == "none":
        return functional.gelu(x + bias)
    return KERNELS["bias_gelu"].reference(x, bias, approximate)  # pyright: ignore[reportOptionalCall]


def _embed(
    ids,
    position_ids,
    kinds,
    word,
    position,
    kind,
    weight,
    bias,
    eps=1e-12,
    padding_idx=-1,
    p=0.0,
    **_,
):
    z = functional.embedding(ids, word, padding_idx) + functional.embedding(kinds, kind)
    z = z + functional.embedding(position_ids, position)
    return functional.dropout(functional.layer_norm(z, z.shape[-1:], weight, bias, eps), p)


def _parallel(logits: Tensor, target: Tensor, vocab_size: int, **options: Any) -> Tensor:
    from slapo_zoo.parallel.vocab_parallel import vocab_parallel_cross_entropy

    logits = logits.float()  # as the losses of transformers do
    return vocab_parallel_cross_entropy(logits, target, vocab_size, None, **options)


def _linear(x, weight, target, bias=None, label_smoothing=0.0, num_items: Any = 1, **_) -> Tensor:
    logits = functional.linear(x, weight, bias).float()
    options = {"label_smoothing": label_smoothing, "reduction": "sum"}
    return functional.cross_entropy(logits, target, **options) / num_items


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    return out.transpose(1, 2)


def _batch_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.relu(functional.batch_norm(x, None, None, weight, bias, True) + residual)


# What transformers (or this package, for the divided loss) runs today; other kernels: their reference.
PLAIN: dict[str, Callable[..., Any]] = {
    "bias_gelu": _gelu,
    "bias_relu": lambda x, bias: functional.relu(x + bias),
    "relu_dropout": lambda x, p=0.0, **_: functional.dropout(functional.relu(x), p),
    "swiglu": lambda gate, up: functional.silu(gate) * up,
    "layer_norm": lambda x, weight, bias: functional.layer_norm(x, x.shape[-1:], weight, bias),
    "bias_dropout_residual_layer_norm": lambda x, residual, weight, bias, x_bias, p=0.0, **_: (
        functional.layer_norm(
            functional.dropout(x + x_bias, p) + residual, x.shape[-1:], weight, bias
        )
    ),
    "embedding_layer_norm": _embed,
    "linear_cross_entropy": _linear,
    "vocab_parallel_cross_entropy": _parallel,
    "vocab_parallel_linear_cross_entropy": lambda x, weight, target, vocab_size, bias=None, **options: (
        _parallel(functional.linear(x, weight, bias), target, vocab_size, **options)
    ),
    "linear": functional.linear,
    "short_attention": _sdpa,
    "batch_norm_relu_add": _batch_norm,
}


def liger() -> dict[str, Callable[..., Any]]:
    """What Liger has for the same arguments; it runs on a GPU only."""
    from liger_kernel.transformers import functional as lf

    def norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
        return lf.liger_layer_norm(x, weight, bias, eps)

    def rms(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
        return lf.liger_rms_norm(x, weight, eps)

    def linear(x, weight, target, bias=None, label_smoothing=0.0, num_items=1, **_) -> Tensor:
        options = {"label_smoothing": label_smoothing, "reduction": "sum"}
        total: Any = lf.liger_fused_linear_cross_entropy(x, weight, target, bias, **options)
        return total / num_items

    return {
        "layer_norm": norm,
        "rms_norm": rms,
        "swiglu": lf.liger_swiglu,
        "linear_cross_entropy": linear,
    }


def arguments(name: str, shape: tuple, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Random arguments; floating ones require gradients."""
    torch.manual_seed(0)
    given = KERNELS[name].inputs(*shape, device=device)  # pyright: ignore[reportOptionalCall]
    given.pop("chunk_bytes", None)  # made small for tests
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
    """Forward and backward with a gradient that is there already."""
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
    """Milliseconds of each, sorted; they run in turn."""
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
        # one thread: its own time, which work beside it does not lengthen
        clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        begin = clock()
        run()
        return 1e3 * (clock() - begin)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    waste.zero_()  # no operand is in the cache
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def alternatives(name: str, given: dict[str, Any], device: str, compile: bool) -> dict[str, Any]:
    """Name -> step, or the reason why there is none."""
    kernel: Any = KERNELS[name]
    found: dict[str, Any] = {
        "eager": step(PLAIN.get(name, kernel.reference), given),
        "ours": step(kernel.entry, given),
    }
    if compile:
        torch._dynamo.reset()
        found["compile"] = step(
            torch.compile(PLAIN.get(name, kernel.reference), dynamic=False), given
        )
    else:
        found["compile"] = UNMEASURED
    if device != "cuda":
        found["liger"] = UNMEASURED
    else:
        function: Any = liger().get(name)
        found["liger"] = NO_LIGER if function is None else step(function, given)
    return found


def measure(
    name: str, shape: tuple, dtype: torch.dtype, device: str, compile: bool
) -> dict[str, Any]:
    """One row: p20/p50/p80 of ours, and how many times as long the others take."""
    given = arguments(name, shape, dtype, device)
    with force("triton"):
        found = alternatives(name, given, device, compile)
        steps: Any = {k: v for k, v in found.items() if callable(v)}
        times = timed(steps, device)
    ours = times["ours"]
    p20, p50, p80 = (ours[int(q * (len(ours) - 1))] for q in (0.2, 0.5, 0.8))
    row: dict[str, Any] = {"what": name, "shape": "x".join(map(str, shape)), "dtype": str(dtype)[6:],
                           "p20 ms": p20, "p50 ms": p50, "p80 ms": p80}  # fmt: skip
    for other in ("eager", "compile", "liger"):
        middle = times[other][(len(times[other]) - 1) // 2] if other in times else None
        row[f"{other} / ours"] = found[other] if middle is None else middle / p50
    first = next(t for t in given.values() if isinstance(t, Tensor) and t.is_floating_point())
    return row | {"bucket": bucket(name, first)}


def dispatch(rows: list[dict[str, Any]], path: str) -> tuple[dict[str, str], dict[str, float]]:
    """Bucket -> `path` or "torch", and the least ratio of its rows.

    A kernel is taken where nothing that could run in its place was faster in any row (eager; Liger), and
    something was gained in one: what only does as `transformers` does anyway is left out. A compiled
    operation is no such thing, since the model around it is not compiled; its ratio stands in the rows.
    """
    ratios: dict[str, list[float]] = {}
    for row in rows:
        found = [row[f"{other} / ours"] for other in ("eager", "liger")]
        found = [ratio for ratio in found if isinstance(ratio, float)]
        ratios.setdefault(row["bucket"], []).extend(found)
    least = {key: round(min(found), 3) for key, found in ratios.items() if found}
    good = {
        key for key, found in ratios.items() if found and min(found) >= KEPT and max(found) >= GAIN
    }
    return {key: path if key in good else "torch" for key in ratios}, least


def write(device: str, rows: list[dict[str, Any]]) -> Path:
    """The file of a device: figures, and the table that follows from them."""
    file = MEASURED / f"{slug(device)}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    versions = {"torch": torch.__version__, "command": "slapo-zoo bench kernels"}
    kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}  # whole steps too
    new = {(row["what"], row["shape"], row["dtype"]) for row in rows}
    older = (r for r in kept.get("rows", []) if (r["what"], r["shape"], r["dtype"]) not in new)
    rows = sorted([*older, *rows], key=lambda row: (row["what"], row["dtype"], row["shape"]))
    table, least = dispatch(rows, "ours" if device == "cpu" else "triton")
    content = kept | {"device": device, **versions, "rows": rows}
    for title, found in (("dispatch", table), ("ratios", least)):  # whole steps weigh kernels too
        content[title] = _of_steps(kept.get(title, {}), rows) | found
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return file


def _of_steps(table: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The entries of kernels that are no row."""
    measured = {row["what"] for row in rows}
    return {key: value for key, value in table.items() if key.partition(":")[0] not in measured}


def _middle(shapes: list[tuple]) -> list[tuple]:
    """A CPU is given the middle sizes."""
    return shapes[1::2]


def run(quick: bool, only: str = "") -> dict[str, list[dict[str, Any]]]:
    """All kernels in fp32 and bf16, on the GPU if there is one; `only`: beginnings of names."""
    load_kernels()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for name, shapes in SHAPES.items():
        if not name.startswith(tuple(only.split(","))) or (device == "cpu" and name in SAME_ON_CPU):
            continue
        for shape in shapes[:1] if quick else shapes[1:] if device == "cuda" else _middle(shapes):
            for dtype in (torch.float32, torch.bfloat16):
                rows.append(measure(name, shape, dtype, device, compile=not quick))
        if not quick:  # a run that is cut short keeps what it has
            write(torch.cuda.get_device_name() if device == "cuda" else "cpu", rows)
    for row in rows:
        row["beyond"] = []
    return {f"kernels on {device}: time of the others, in times of ours": rows}
