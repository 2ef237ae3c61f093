"""Display of a training run: a progress bar, a line per step, the ledgers."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from rich import progress
from rich.console import Console

from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.weights.ledger import Ledger, as_table

PAUSE_S = 30.0  # a person who reads a log sees that it goes on
OnStep = Callable[[int, Mapping[str, float]], None]  # step, and what was measured of it


@contextmanager
def progress_bar(
    title: str, steps: int, every: int | None = None, console: Console | None = None
) -> Iterator[OnStep]:
    """A bar with loss and gradient norm; without a terminal a line every so many steps instead.

    Args:
        title: of the lines.
        steps: of the whole training.
        every: steps between two lines; None: ten lines in all and one every PAUSE_S, 0: none.
        console: where it goes; None: standard output.
    """
    console = console or Console(highlight=False, soft_wrap=True)
    pause = PAUSE_S if every is None and not console.is_terminal else math.inf
    every = max(1, steps // 10) if every is None else every
    every = every if every and not console.is_terminal else steps + 1
    bar = _bar(console)
    task = bar.add_task(title, total=steps, loss=float("nan"), norm=float("nan"))
    said = time.monotonic()

    def on_step(step: int, record: Mapping[str, float]) -> None:
        nonlocal said
        loss, norm = float(record["loss"]), float(record["grad_norm"])
        bar.update(task, completed=step + 1, loss=loss, norm=norm)
        if (step + 1) % every == 0 or time.monotonic() - said >= pause:
            said = time.monotonic()
            console.print(f"{title}: step {step + 1}/{steps}  loss {loss:.4f}  norm {norm:.3f}")
        if judged := [f"{k[5:]} {v:.4f}" for k, v in record.items() if k.startswith("eval_")]:
            console.print(f"evaluation: step {step + 1}/{steps}  {'  '.join(judged)}")

    with bar:
        yield on_step


def _bar(console: Console) -> progress.Progress:
    said = progress.TextColumn("loss {task.fields[loss]:.4f}  norm {task.fields[norm]:.3f}")
    return progress.Progress(
        progress.TextColumn("[bold]{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn(), said,
        progress.TimeElapsedColumn(), progress.TimeRemainingColumn(), console=console, disable=not console.is_terminal,
    )  # fmt: skip


@contextmanager
def silence() -> Iterator[OnStep]:
    """Display of the ranks other than the first: nothing."""
    yield lambda step, record: None


def ledger_table(mesh: Mesh, ledgers: Sequence[Ledger]) -> str:
    """One row per rank: where it stands in the mesh, and what its load did."""
    rows = []
    for rank, ledger in enumerate(ledgers):
        place = replace(mesh, rank=rank)
        coords = [place.coord(name) for name in ("pp", "dp", "tp")]
        sizes = [f"{size / 1e6:.1f} MB" for size in (ledger.bytes_read, ledger.shard_bytes)]
        memory = f"+{ledger.peak_anonymous / 1e6:.1f} MB"
        counts = [ledger.tensors, *sizes, ledger.files_opened, f"{ledger.seconds:.2f}", memory]
        rows.append((rank, *coords, *counts))
    names = ("rank", "pp", "dp", "tp", "tensors", "read", "its share", "files", "s", "memory")
    return as_table("what each rank read", names, rows)
