"""What a person sees of a training run: a progress bar, a line per step, the ledgers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.weights.ledger import Ledger

OnStep = Callable[[int, float, float], None]  # step, loss, gradient norm


@contextmanager
def progress_bar(
    title: str, steps: int, lines: int = 10, console: Console | None = None
) -> Iterator[OnStep]:
    """A bar with loss and gradient norm; without a terminal about `lines` plain lines instead."""
    console = console or Console(highlight=False)
    every = max(1, steps // lines) if lines and not console.is_terminal else steps + 1
    bar = _bar(console)
    task = bar.add_task(title, total=steps, loss=float("nan"), norm=float("nan"))

    def on_step(step: int, loss: float, norm: float) -> None:
        bar.update(task, completed=step + 1, loss=loss, norm=norm)
        if (step + 1) % every == 0:
            console.print(f"{title}: step {step + 1}/{steps}  loss {loss:.4f}  norm {norm:.3f}")

    with bar:
        yield on_step


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}  norm {task.fields[norm]:.3f}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


@contextmanager
def silence() -> Iterator[OnStep]:
    """What the ranks other than the first show."""
    yield lambda step, loss, norm: None


def ledger_table(mesh: Mesh, ledgers: Sequence[Ledger]) -> Table:
    """One row per rank: where it stands in the mesh, and what its load did."""
    table = Table(title="what each rank read", title_justify="left", box=box.SIMPLE)
    for name in ("rank", "pp", "dp", "tp", "tensors", "read", "its share", "files", "s", "memory"):
        table.add_column(name, justify="right")
    for rank, ledger in enumerate(ledgers):
        place = Mesh(mesh.tp, mesh.pp, mesh.dp, rank)
        coords = [str(place.coord(name)) for name in ("pp", "dp", "tp")]
        sizes = [f"{size / 1e6:.1f} MB" for size in (ledger.bytes_read, ledger.shard_bytes)]
        memory, seconds = f"+{ledger.peak_anonymous / 1e6:.1f} MB", f"{ledger.seconds:.2f}"
        counts = [str(ledger.tensors), *sizes, str(ledger.files_opened), seconds, memory]
        table.add_row(str(rank), *coords, *counts)
    return table
