"""Command `slapo-zoo tune`: measures configurations to find the fastest, and keeps every result."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from slapo_zoo.cli.arguments import command
from slapo_zoo.errors import SlapoError

SYMBOL = "NAME=V,V,... : values to try; may be given many times."
Symbols = Annotated[list[str] | None, typer.Option("--symbol", help=SYMBOL)]


@command
def tune(
    model: Annotated[str, typer.Argument(help="A family, a folder, a Hub id.")],
    symbol: Symbols = None,
    change: Annotated[list[str] | None, typer.Option(help="FIELD=VALUE of the model's config.")] = None,
    search: Annotated[str, typer.Option(help="model, random or exhaustive.")] = "model",
    evaluations: Annotated[int, typer.Option(min=1, help="Maximum number of configurations to measure.")] = 40,
    patience: Annotated[int, typer.Option(min=0, help="Stop after this many configurations without gain; 0: never.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of a measurement.")] = 5,
    quick_steps: Annotated[int, typer.Option(min=0, help="Steps of a first measurement, which excludes slow configurations.")] = 0,
    gpus: Annotated[int, typer.Option(min=1, help="Number of ranks, tp * pp * dp * cp, of every configuration.")] = 1,
    seq_len: Annotated[int, typer.Option("--seq-len", "--seq", min=2, help="Tokens per row.")] = 128,
    dtype: Annotated[str, typer.Option(help="Dtype of the parameters.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.", metavar="NAME")] = "cpu",
    memory: Annotated[str | None, typer.Option(help="Memory that a rank may take, e.g. 2GiB.")] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Maximum seconds of a measurement.")] = 600.0,
    db: Annotated[Path | None, typer.Option(help="File of results (JSON lines), from which a killed search resumes.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for trials.csv and pictures.")] = None,
    card: Annotated[Path | None, typer.Option(help="Card folder, whose tuning.json gets the best configuration.")] = None,
    plan: Annotated[bool, typer.Option(help="Let the planner choose the order and skip what cannot fit.")] = True,
    seed: Annotated[int, typer.Option(help="Seed of random searches.")] = 0,
) -> Any:  # fmt: skip
    """Search for the fastest configuration (batch size, recomputation, kernels, layout) of a model by measuring.

    Each configuration is measured in a process of its own. Reports distinguish out of memory, a crash, a
    time-out, a wrong loss and slowness. A configuration whose result is in --db is not measured again.
    """
    from slapo_zoo.pipeline.trace_files import require_matplotlib
    from slapo_zoo.tune import tuning_job
    from slapo_zoo.tune import tuning_report as show
    from slapo_zoo.tune.database import Database
    from slapo_zoo.tune.strategies import find_strategy
    from slapo_zoo.tune.tuner import Limits, Tuner
    from slapo_zoo.zoo.cards.card import read_card

    strategy = find_strategy(search)
    if output is not None:
        require_matplotlib()
        output.mkdir(parents=True, exist_ok=True)
    if card is not None:
        read_card(card)
    grid, measure, scope, (prior, refused) = _of_model(
        model, symbol or [], change or [], gpus, seq_len, dtype, device, memory, timeout, plan
    )
    fits = [i for i in range(len(grid.points)) if i not in refused] or [0]
    start = max(fits, key=prior.__getitem__) if prior else fits[0]
    chosen = strategy(grid, seed=seed, start=start, prior=prior)
    on_trial = show.printer(min(evaluations, len(grid.points) - len(refused)))
    limits = Limits(evaluations, patience, quick_steps, steps)
    found = Tuner(grid, measure, chosen, Database(db).load(), scope, limits, refused, on_trial).run()  # fmt: skip
    lines = [show.as_text(found)]
    if output is not None:
        show.write_csv(found, output / "trials.csv")
        show.draw_trace(found, output / "trace.png")
        show.draw_surface(found, grid, output / "surface.png")
        lines.append(f"written to {output}")
    if (best := found.best) is None:
        return show.as_json(found), "\n".join(lines), _nothing_ran(found, refused)
    lines.append(f"best: {show.line_of(best)}")
    if card is not None:
        scope = tuning_job.scope_of(replace(measure.job, point=best.point))
        show.record(card, scope, best.point, best.outcome)
        lines.append(f"noted in {card / 'tuning.json'}")
    return show.as_json(found), "\n".join(lines)


def _nothing_ran(found: Any, refused: dict[int, str]) -> SlapoError:
    """Return the error of a tuning search in which no measurement finished; it names the last reason. `found` is the
    result of the search, `refused` maps the numbers of configurations that the planner excluded to the reason.
    """
    why = [trial.outcome.message or trial.outcome.kind for trial in found.trials] or list(refused.values())  # fmt: skip
    problem = f"no configuration finished; last error: {why[-1] if why else 'nothing'}"
    hint = "correct what this error names; for a lack of memory or time make the batch smaller, or raise --memory or --timeout"
    return SlapoError("tune", "search", problem, hint)


def _of_model(
    model: str, symbols: list[str], changes: list[str], gpus: int, seq_len: int, dtype: str, device: str,
    memory: str | None, timeout: float, plan: bool,
) -> Any:  # fmt: skip
    from slapo_zoo.tune import tuning_job
    from slapo_zoo.tune.grid import Grid
    from slapo_zoo.tune.trial import Job
    from slapo_zoo.weights.load_rank_slices import parse_size

    most = parse_size(memory, "--memory") or 0
    fields = {name: values[0] for name, values in _pairs(changes, "--change").items()}
    tuning_job.check_changes(model, fields)
    job = Job(model, seq_len=seq_len, changes=fields, dtype=dtype, device=device, memory=most)
    wanted = _pairs(symbols, "--symbol") or tuning_job.default_symbols(model)
    grid = Grid(tuning_job.points_for(gpus, wanted))
    judged = tuning_job.forecasts(job, grid) if plan else (None, {})
    return grid, tuning_job.Workers(job, timeout), tuning_job.scope_of(job), judged


def _pairs(texts: list[str], what: str) -> dict[str, list[Any]]:
    """Parse the texts NAME=V,V of the flag `what` into {name: values}; a value is a number, a bool, None or a text."""
    found: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not values:
            raise SlapoError("tune", f"{what} {text}", "found no NAME=VALUE", "write e.g. --symbol tp=1,2 or --change num_hidden_layers=2")  # fmt: skip
        found[name] = [_typed(value) for value in values.split(",")]
    return found


def _typed(word: str) -> Any:
    """Return the JSON value that a word spells (a number, true or false), None for "none", else the word."""
    try:
        return json.loads(word.lower().replace("none", "null"))
    except ValueError:
        return word
