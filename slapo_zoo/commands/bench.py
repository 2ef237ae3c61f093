"""`slapo-zoo bench`: how long training steps take, and a trace of one."""

from pathlib import Path
from typing import Annotated, Any

import typer

Model = Annotated[
    str, typer.Argument(help='A checkpoint folder, a model id of the Hub, or "kernels".')
]
Order = Annotated[str, typer.Option(help="Of the pipeline: a name, or a .csv file.")]
Trace = Annotated[
    Path | None, typer.Option(help="Write trace.json (Chrome) and trace.png of one step here.")
]


def bench(
    model: Model,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline ranks.")] = 1,
    dp: Annotated[int | None, typer.Option(min=1, help="Copies of the model.")] = None,
    pipeline_order: Order = "1f1b",
    micro_batches: Annotated[int | None, typer.Option(min=1, help="Per step and copy.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows per step and copy.")] = 8,
    seq_len: Annotated[int, typer.Option(min=2, help="Tokens per row.")] = 128,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps, after two to warm up.")] = 5,
    pipeline_trace: Trace = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.", metavar="NAME")] = "auto",
    only: Annotated[str, typer.Option(help="Of kernels: those whose name begins so.")] = "",
    quick: Annotated[bool, typer.Option(help="Of kernels: small sizes, nothing is kept.")] = False,
) -> None:
    """Time training steps (forward and backward) of a checkpoint on random input.

    `slapo-zoo bench kernels` times every kernel beside what it replaces, and writes the table that
    kernels="auto" follows on this device.
    """
    if model == "kernels":
        _kernels(only, quick)
        return
    from slapo_zoo.errors import MeshError
    from slapo_zoo.trace_files import require_matplotlib
    from slapo_zoo.training import job, step_times

    if pipeline_trace is not None:
        require_matplotlib()
        if pp == 1:
            problem = "one stage has no pipeline to trace"
            raise MeshError("bench", "--pipeline-trace", problem, "use --pp 2 or more")
    options = step_times.BenchOptions(
        model=model, tp=tp, pp=pp, dp=job.data_parallel_size(tp, pp, dp), order=pipeline_order,
        micro_batches=micro_batches, batch_size=batch_size, seq_len=seq_len, steps=steps,
        trace=pipeline_trace is not None, device=job.device_named(device),
    )  # fmt: skip
    found = step_times.measure(options)
    if found is not None:
        _show(options, found, pipeline_trace)


def _kernels(only: str, quick: bool) -> None:
    from slapo_zoo.kernel_times import run

    for title, rows in run(quick, only).items():
        typer.echo(title)
        for row in rows:
            figures = ", ".join(
                f"{key} {_number(row[key])}" for key in row if key.endswith("/ ours")
            )
            typer.echo(
                f"  {row['what']} {row['shape']} {row['dtype']}: {row['p50 ms']:.3g} ms; {figures}"
            )


def _number(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _show(options: Any, found: Any, folder: Path | None) -> None:
    from slapo_zoo.timeline import bubble
    from slapo_zoo.trace_files import draw, write_chrome_trace

    rate = options.batch_size * options.dp / found.seconds
    typer.echo(
        f"{options.model}: tp={options.tp} pp={options.pp} dp={options.dp} on {found.device}: "
        f"{found.seconds * 1e3:.1f} ms per step (median of {options.steps}), {rate:.1f} rows/s"
    )
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        write_chrome_trace(found.spans, folder / "trace.json")
        draw(found.spans, folder / "trace.png", f"{options.order}, pp={options.pp},")
        typer.echo(
            f"bubble {bubble(found.spans):.1%}; {folder / 'trace.json'}, {folder / 'trace.png'}"
        )
