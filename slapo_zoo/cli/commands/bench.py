"""`slapo-zoo bench`: how long training steps take, and a trace of one."""

import json
from math import isnan
from pathlib import Path
from typing import Annotated, Any

import typer

from slapo_zoo.cli.arguments import AsJson, Device, DpOrAll, MicroBatches, Order, PipelineRanks, Tp
from slapo_zoo.cli.readable_errors import stdout_for_json
from slapo_zoo.errors import SlapoError

Model = Annotated[str, typer.Argument(help='A checkpoint folder, a model id of the Hub, or "kernels".')]  # fmt: skip
Trace = Annotated[Path | None, typer.Option(help="Write trace.json (Chrome) and trace.png of one step here.")]  # fmt: skip

Beside = Annotated[Path | None, typer.Option(hidden=True)]  # fmt: skip


def bench(
    model: Model,
    tp: Tp = 1,
    pp: PipelineRanks = 1,
    dp: DpOrAll = None,
    pipeline_order: Order = "1f1b",
    micro_batches: MicroBatches = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows per step and copy.")] = 8,
    seq_len: Annotated[int | None, typer.Option(min=2, help="Tokens per row; none: 128, or what the model takes.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps, after two to warm up.")] = 5,
    pipeline_trace: Trace = None,
    device: Device = "auto",
    beside: Beside = None,
    only: Annotated[str, typer.Option(help="Of kernels: those whose name begins so.")] = "",
    quick: Annotated[bool, typer.Option(help="Of kernels: small sizes, nothing is kept.")] = False,
    output: Annotated[Path | None, typer.Option(help="Of kernels: folder of the table; else the user's cache.")] = None,
    resume: Annotated[bool, typer.Option(help="Of kernels: only rows that it lacks.")] = False,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Time training steps (forward and backward) of a checkpoint on random input.

    Nothing is timed before the loss of the batch equals that of plain transformers.

    `slapo-zoo bench kernels` times every kernel beside what it replaces, and writes the table that
    kernels="auto" follows on this device into the user's cache folder, or to --output.

    Whole steps in turns with what else divides a model: `ci/run.py beside` in a checkout of the source.
    """
    if model == "kernels":
        _kernels(only, quick, as_json, output, resume)
        return
    if beside is not None:
        hint = f"in a checkout of the source: python3 ci/run.py beside {model} {beside} --tp {tp}"
        raise SlapoError("bench", "--beside", "the competitors are not part of the package", hint)
    with stdout_for_json(as_json):
        found = _alone(
            model, tp, pp, dp, pipeline_order, micro_batches, batch_size,
            seq_len or _fitting(model), steps, pipeline_trace, device, as_json,
        )  # fmt: skip
    if as_json and found is not None:
        typer.echo(json.dumps(found, indent=1))


def _fitting(model: str) -> int:
    from slapo_zoo.cli.training.checks import row_length
    from slapo_zoo.zoo.argument_values import checkpoint_config

    return row_length(None, checkpoint_config(model))


def _alone(
    model: str, tp: int, pp: int, dp: int | None, pipeline_order: str, micro_batches: int | None,
    batch_size: int, seq_len: int, steps: int, pipeline_trace: Path | None, device: str, quiet: bool,
) -> dict[str, Any] | None:  # fmt: skip
    from slapo_zoo.cli.training import checks, step_times
    from slapo_zoo.errors import MeshError
    from slapo_zoo.pipeline.trace_files import require_matplotlib

    if pipeline_trace is not None:
        require_matplotlib()
        if pp == 1:
            problem = "one stage has no pipeline to trace"
            raise MeshError("bench", "--pipeline-trace", problem, "use --pp 2 or more")
    options = step_times.BenchOptions(
        model=model, tp=tp, pp=pp, dp=checks.data_parallel_size(tp, pp, dp), order=pipeline_order,
        micro_batches=micro_batches, batch_size=batch_size, seq_len=seq_len, steps=steps,
        trace=pipeline_trace is not None, device=checks.device_named(device),
    )  # fmt: skip
    found = step_times.measure(options)
    if found is None:
        return None
    rate = options.batch_size * options.dp / found.seconds
    if not quiet:
        _show(options, found, rate, pipeline_trace)
    return {
        "model": model, "tp": tp, "pp": pp, "dp": options.dp, "device": found.device,
        "step_ms": found.seconds * 1e3, "rows_per_s": rate, "steps": steps,
        "loss": found.losses[0], "plain_loss": None if isnan(found.losses[1]) else found.losses[1],
    }  # fmt: skip


def _kernels(only: str, quick: bool, as_json: bool, output: Path | None, resume: bool) -> None:
    with stdout_for_json(as_json):
        from slapo_zoo.dispatch.benchmark import SHAPES, run

        if not any(name.startswith(tuple(only.split(","))) for name in SHAPES):
            hint = f"there are {', '.join(SHAPES)}"
            raise SlapoError("bench kernels", f"--only {only}", "no kernel's name begins so", hint)
        found = run(quick, only, output, again=not resume)
    if as_json:
        typer.echo(json.dumps([row for rows in found.values() for row in rows], indent=1))
        return
    for title, rows in found.items():
        typer.echo(title)
        for row in rows:
            figures = ", ".join(f"{key} {_number(row[key])}" for key in row if key.endswith("/ ours"))  # fmt: skip
            typer.echo(f"  {row['what']} {row['shape']} {row['dtype']}: {row['p50 ms']:.3g} ms; {figures}")  # fmt: skip


def _number(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _show(options: Any, found: Any, rate: float, folder: Path | None) -> None:
    from slapo_zoo.pipeline.timeline import bubble
    from slapo_zoo.pipeline.trace_files import draw, write_chrome_trace

    typer.echo(
        f"{options.model}: tp={options.tp} pp={options.pp} dp={options.dp} on {found.device}: "
        f"{found.seconds * 1e3:.1f} ms per step (median of {options.steps}), {rate:.1f} rows/s"
    )
    ours, plain = found.losses
    compared = "not compared, the plain model is too large for this machine"
    typer.echo(f"loss {ours:.6f}; plain transformers: {compared if isnan(plain) else f'{plain:.6f}'}")  # fmt: skip
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        write_chrome_trace(found.spans, folder / "trace.json")
        draw(found.spans, folder / "trace.png", f"{options.order}, pp={options.pp},")
        typer.echo(f"bubble {bubble(found.spans):.1%}; {folder / 'trace.json'}, {folder / 'trace.png'}")  # fmt: skip
