"""Command `slapo-zoo bench`: times training steps or kernels, and traces a pipeline step."""

from math import isnan
from pathlib import Path
from typing import Annotated, Any

import typer

from slapo_zoo.cli.arguments import (
    Device,
    Order,
    Pp,
    Tp,
    command,
    data_parallel_size,
    device_named,
    on_ranks,
)
from slapo_zoo.errors import MeshError, SlapoError
from slapo_zoo.parallel.ranks.slurm import is_first

Model = Annotated[str, typer.Argument(help='A checkpoint folder, a model id of the Hub, or "kernels".')]  # fmt: skip
Trace = Annotated[Path | None, typer.Option(help="Write trace.json (Chrome) and trace.png of one step here.")]  # fmt: skip

Beside = Annotated[Path | None, typer.Option(hidden=True)]  # fmt: skip


@command
def bench(
    model: Model,
    tp: Tp = 1,
    pp: Pp = 1,
    dp: Annotated[int | None, typer.Option(min=1, help="Data-parallel replicas.")] = None,
    pipeline_order: Order = "1f1b",
    micro_batches: Annotated[int | None, typer.Option(min=1, help="Micro-batches per step and replica.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows per step and replica.")] = 8,
    seq_len: Annotated[int | None, typer.Option(min=2, help="Tokens per row; default: 128, or what the model takes.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps, after two to warm up.")] = 5,
    pipeline_trace: Trace = None,
    device: Device = "auto",
    beside: Beside = None,
    only: Annotated[str, typer.Option(help="bench kernels: only kernels whose name begins with this.")] = "",
    quick: Annotated[bool, typer.Option(help="bench kernels: small sizes only, and write no table.")] = False,
    output: Annotated[Path | None, typer.Option(help="bench kernels: folder of the table; default: the user's cache.")] = None,
    resume: Annotated[bool, typer.Option(help="bench kernels: measure only what the table lacks.")] = False,
) -> Any:  # fmt: skip
    """Time training steps (forward and backward) of a checkpoint on random input.

    Before timing, the loss must agree with that of plain transformers: within 1e-3 (fp32; else 3e-2) of max(1, loss).

    With the word "kernels" in place of a checkpoint, time each kernel and the operations that it replaces, and write a
    table to the user's cache folder, or to --output; kernels="auto" chooses kernels on this device by that table.

    To compare steps with other libraries, run `ci/run.py beside` in a source checkout; the error of --beside names it.
    """
    if model == "kernels":
        return _kernels(only, quick, output, resume)
    if beside is not None:
        hint = f"in a checkout of the source: python3 ci/run.py beside {model} {beside} --tp {tp}"
        problem = "the comparison with other libraries is not part of the package"
        raise SlapoError("bench", "--beside", problem, hint)
    from slapo_zoo.cli.training import step_times
    from slapo_zoo.cli.training.checks import row_length
    from slapo_zoo.pipeline.trace_files import require_matplotlib
    from slapo_zoo.zoo.argument_values import checkpoint_config

    if pipeline_trace is not None:
        require_matplotlib()
        if pp == 1:
            problem = "with --pp 1 there is no pipeline to trace"
            raise MeshError("bench", "--pipeline-trace", problem, "use --pp 2 or more")
        pipeline_trace.mkdir(parents=True, exist_ok=True)
    dp, tokens = data_parallel_size(tp, pp, dp), row_length(seq_len, checkpoint_config(model))
    load = {"name_or_path": model, "tp": tp, "pp": pp, "dp": dp, "pipeline_order": pipeline_order,
            "micro_batches": micro_batches, "device": device_named(device)}  # fmt: skip
    given = (load, batch_size, tokens, steps, pipeline_trace is not None)
    found = on_ranks(step_times.time_steps, tp * pp * dp, given, load["device"], "bench")
    if not is_first():
        return None
    rate, (ours, plain) = batch_size * dp / found.seconds, found.losses
    data = {
        "model": model, "tp": tp, "pp": pp, "dp": dp, "device": found.device,
        "step_ms": found.seconds * 1e3, "rows_per_s": rate, "steps": steps,
        "loss": ours, "plain_loss": None if isnan(plain) else plain,
    }  # fmt: skip
    compared = "not compared, the plain model is too large for this machine"
    text = (
        f"{model}: tp={tp} pp={pp} dp={dp} on {found.device}: "
        f"{found.seconds * 1e3:.1f} ms per step (median of {steps}), {rate:.1f} rows/s\n"
        f"loss {ours:.6f}; plain transformers: {compared if isnan(plain) else f'{plain:.6f}'}"
    )
    return data, text + _traced(found.spans, pipeline_trace, f"{pipeline_order}, pp={pp},")


def _traced(spans: Any, folder: Path | None, title: str) -> str:
    """Write `spans`, the timed forwards and backwards of a pipeline step, as trace.json and trace.png (with `title`)
    into `folder`; return a line with the share of idle time and both paths, or "" if `folder` is None.
    """
    if folder is None:
        return ""
    from slapo_zoo.pipeline.timeline import bubble
    from slapo_zoo.pipeline.trace_files import draw, write_chrome_trace

    write_chrome_trace(spans, folder / "trace.json")
    draw(spans, folder / "trace.png", title)
    return f"\nbubble {bubble(spans):.1%}; {folder / 'trace.json'}, {folder / 'trace.png'}"


def _kernels(only: str, quick: bool, output: Path | None, resume: bool) -> Any:
    from slapo_zoo.dispatch.benchmark import SHAPES, run

    if not any(name.startswith(tuple(only.split(","))) for name in SHAPES):
        hint = f"choose among {', '.join(SHAPES)}"
        problem = "found no kernel whose name begins with this"
        raise SlapoError("bench kernels", f"--only {only}", problem, hint)
    found, lines = run(quick, only, output, again=not resume), []
    for title, rows in found.items():
        lines.append(title)
        for row in rows:
            figures = ", ".join(f"{key} {_number(row[key])}" for key in row if key.endswith("/ ours"))  # fmt: skip
            lines.append(f"  {row['what']} {row['shape']} {row['dtype']}: {row['p50 ms']:.3g} ms; {figures}")  # fmt: skip
    return [row for rows in found.values() for row in rows], "\n".join(lines)


def _number(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
