"""Registers, spills and shared memory of every launch of every Triton kernel at real sizes, compiled without a GPU.

`--only 90` takes one chip (compute capability 9.0). To use another Triton than the installed one: `pip install
--no-deps --target FOLDER triton==3.6.0`, then `PYTHONPATH=FOLDER python ci/bench.py launches`.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from benchmarks.recorded import CHIPS, SHARED, Launch, compiled, recording

ONLY = ""  # the chip that `--only` names
CHIPS_HELD = (80, 90, 100)
HIDDEN = (768, 1024, 2048, 4096, 8192, 12288)
INNER = (2816, 3072, 10922, 14336, 49152)  # columns of a feed-forward
VOCABULARY = (30522, 32128, 50257, 50304, 128256, 250112)
CHANNELS = (64, 512, 2048)
HEADS, TOKENS = (64, 128), (512, 2048)
ROWS = 16 * 2048
BF16, FP32, INT = torch.bfloat16, torch.float32, torch.int64
WORKERS = 2

Case = tuple[str, Callable[[], Any]]  # label, function that launches it


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Return a tensor on meta, which has no memory."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def norms(dtype: torch.dtype) -> Iterator[Case]:
    """Yield launches of the norms: layer_norm, rms_norm, bias_dropout_residual_layer_norm."""
    from slapo_zoo.kernels import norm_triton as triton_part
    from slapo_zoo.kernels.norm import fits_registers

    def run(N: int, rms: bool, add: bool, mask: str) -> None:
        x, w = meta(ROWS, N, dtype=dtype), meta(N, dtype=dtype)
        x_bias = w if add and fits_registers(N, True) else None
        b, extra, wide = None if rms else w, x if add else None, meta(ROWS, dtype=FP32)
        keep, seeds = (
            x if mask == "keep" else None,
            meta(16, dtype=INT) if mask == "seeds" else None,
        )
        triton_part.forward(x, w, b, x_bias, extra, keep, seeds, 0.1, 1e-5, rms)
        mean = meta(0 if rms else ROWS, dtype=FP32)
        triton_part.backward(x, extra, x, w, mean, wide, keep, seeds, 0.1, rms, x_bias is not None)

    for N in HIDDEN:
        for rms, add, mask in ((False, False, "none"), (True, False, "none"), (False, True, "seeds"), (False, True, "keep")):  # fmt: skip
            if fits_registers(N, False):
                kind = "rms" if rms else "sum" if add else "layer"
                yield f"{kind} norm {N} {mask}", partial(run, N, rms, add, mask)


def activations(dtype: torch.dtype) -> Iterator[Case]:
    """Yield launches of bias_gelu, bias_relu, geglu, swiglu and relu_dropout."""
    from slapo_zoo.kernels import activation_triton as triton_part

    def run(N: int, kind: str, bias: bool, up: bool, mask: str) -> None:
        x, b = meta(ROWS, N, dtype=dtype), meta(N, dtype=dtype) if bias else None
        u, keep = x if up else None, x if mask == "keep" else None
        seeds = meta(16, dtype=INT) if mask == "seeds" else None
        triton_part.forward(x, b, u, keep, seeds, 0.1, kind)
        triton_part.backward(x, x, b, u, keep, seeds, 0.1, kind)

    for N in INNER:
        for kind, bias, up, mask in (
            ("gelu", True, False, "none"), ("gelu_tanh", True, False, "none"), ("relu", True, False, "none"),
            ("gelu_tanh", False, True, "seeds"), ("gelu_tanh", False, True, "keep"),
            ("silu", False, True, "none"), ("relu", False, False, "seeds"), ("relu", False, False, "keep"),
        ):  # fmt: skip
            yield f"{kind} {N} {mask}", partial(run, N, kind, bias, up, mask)


def losses(dtype: torch.dtype) -> Iterator[Case]:
    """Yield launches of linear_cross_entropy and similar losses, on chunks of logits."""
    from slapo_zoo.kernels.loss import cross_entropy_triton as triton_part
    from slapo_zoo.kernels.loss.cross_entropy import padded_columns

    def run(V: int) -> None:
        logits, target = padded_columns(meta(8192, 1, dtype=dtype), 8192, V), meta(8192, dtype=INT)
        triton_part.statistics(logits, target)
        triton_part.gradient_(logits, target, meta(8192, dtype=FP32), meta(3, 8192, dtype=FP32))

    for V in VOCABULARY:
        yield f"vocabulary {V}", partial(run, V)


def attentions(dtype: torch.dtype) -> Iterator[Case]:
    """Yield launches of t5_attention, local_causal_attention, and attention with dropout of any model."""
    from slapo_zoo.kernels import attention_triton as triton_part
    from slapo_zoo.kernels.blocked_attention import Given

    def run(D: int, S: int, table: bool, causal: bool, window: int, mask: str, keys: bool) -> None:
        B, H = 4, 12
        q = meta(B, S, H, D, dtype=dtype)
        bias = (
            (meta(H, 32, dtype=dtype), meta(2 * S - 1, dtype=torch.int32))
            if table
            else (None, None)
        )
        given = Given(
            *bias, key_mask=meta(B, S, dtype=torch.bool) if keys else None,
            keep=meta(B, H, S, S, dtype=dtype) if mask == "keep" else None,
            seeds=meta(B * H, dtype=INT) if mask == "seeds" else None, p=0.1,
            scale=1.0 if table else 0.125, causal=causal, window=window,
        )  # fmt: skip
        out, log_sum = triton_part.forward(q, q, q, given)
        triton_part.backward(q, out, log_sum, q, q, q, given)

    for D in HEADS:
        for S in TOKENS:
            for table, causal, window, mask, keys in (
                (False, True, 256, "none", False), (False, True, 0, "none", True), (False, True, 256, "keep", False),
                (False, True, 0, "seeds", False), (False, False, 0, "seeds", True),
                (True, False, 0, "none", False), (True, False, 0, "seeds", True),
                (True, True, 0, "seeds", True), (True, True, 0, "keep", True),
            ):  # fmt: skip
                kind = "table" if table else f"window {window}" if window else "plain"
                yield f"attention {kind} {D} x {S} {mask}", partial(run, D, S, table, causal, window, mask, keys)  # fmt: skip


def batch_norms(dtype: torch.dtype) -> Iterator[Case]:
    """Yield launches of batch_norm_relu_add."""
    from slapo_zoo.kernels import batch_norm_triton as triton_part

    def run(C: int) -> None:
        x, w, wide = meta(64 * 28 * 28, C, dtype=dtype), meta(C, dtype=dtype), meta(C, dtype=FP32)
        triton_part.forward(x, w, w, x, None, None, 1e-5)
        triton_part.backward(x, x, w, x, wide, wide, True, True)

    for C in CHANNELS:
        yield f"batch norm {C}", partial(run, C)


def dropouts(dtype: torch.dtype) -> Iterator[Case]:
    """Yield launches of dropout, with one seed per batch row and one per token."""
    from slapo_zoo.kernels import dropout_triton as triton_part

    for N in (HIDDEN[0], HIDDEN[-1]):
        x, seeds = meta(ROWS, N, dtype=dtype), meta(16, dtype=INT)
        yield f"dropout {N} seeds", partial(triton_part.dropped, x, seeds, 0.1)
        yield f"dropout {N} by token", partial(triton_part.dropped, x, meta(ROWS, dtype=INT), 0.1)


FAMILIES = (dropouts, norms, activations, losses, attentions, batch_norms)


def launches(dtypes: tuple[torch.dtype, ...] = (BF16, FP32)) -> dict[Launch, str]:
    """Return {launch: label of the first case that needs it} for every distinct binary of the kernels at real sizes."""
    found: dict[tuple, tuple[Launch, str]] = {}
    with recording() as recorded:
        for family in FAMILIES:
            for dtype in dtypes:
                for label, launch in family(dtype):
                    recorded.clear()
                    launch()
                    for each in recorded:
                        found.setdefault(each.binary, (each, f"{label} {str(dtype)[6:]}"))
    return dict(found.values())


def judged(chip: int, launch: Launch, label: str) -> dict[str, Any]:
    """Compile a launch for a chip; return the table row, in which "beyond" names the values beyond their limit."""
    found = compiled(launch, chip)
    row = {"what": label, "kernel": str(launch), "chip": CHIPS[chip], **found}
    beyond = ["error"] if "error" in found else []
    beyond += ["spilled"] if found.get("spilled") else []
    beyond += ["shared_kib"] if found.get("shared_kib", 0) > SHARED[chip] else []
    return row | ({"beyond": beyond} if beyond else {})


def run(quick: bool) -> dict[str, list[dict[str, Any]]]:
    """Return one table per chip; a compile error, a spilled register or too much shared memory is beyond the limit."""
    import triton

    chips = [int(ONLY)] if ONLY else [90] if quick else list(CHIPS_HELD)
    held = launches((BF16,) if quick else (BF16, FP32))
    tables: dict[str, list[dict[str, Any]]] = {}
    with ProcessPoolExecutor(WORKERS, get_context("spawn")) as pool:
        for chip in chips:
            jobs = [pool.submit(judged, chip, launch, label) for launch, label in held.items()]
            title = f"{len(jobs)} launches for {CHIPS[chip]}, Triton {triton.__version__}"
            tables[title] = [job.result() for job in jobs]
    return tables
