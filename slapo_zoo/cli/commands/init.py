"""`slapo-zoo init`: four questions, and the configuration of a run."""

from pathlib import Path
from typing import Annotated

import typer

from slapo_zoo.cli.training.options import ONE_OF

ASKED = {
    "model": "Which model? A checkpoint folder, or an id of the Hub",
    "data": "On which data? A file, a folder, or a data set of the Hub",
    "task": f"What is learned? {', '.join(ONE_OF['task'])}; auto: as the model was pre-trained",
    "ranks": "On how many GPUs",
}


def init(
    file: Annotated[Path, typer.Argument(help="Where it goes.")] = Path("run.yaml"),
    model: Annotated[str | None, typer.Option(help=ASKED["model"])] = None,
    data: Annotated[str | None, typer.Option(help=ASKED["data"])] = None,
    task: Annotated[str | None, typer.Option(help=ASKED["task"])] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help=ASKED["ranks"])] = None,
) -> None:
    """Write the configuration of a training run; what is not given is asked."""
    import yaml

    from slapo_zoo.cli.training.config import ConfigError, checked
    from slapo_zoo.cli.training.options import described

    if file.exists():
        raise ConfigError(str(file), "", "it is there already", "name another file, or remove it")
    model = model or typer.prompt(ASKED["model"])
    data = data or typer.prompt(ASKED["data"])
    task = task or typer.prompt(ASKED["task"], default="auto")
    ranks = ranks or typer.prompt(ASKED["ranks"], default=1, type=int)
    keys = {"model": model, "data": data, "eval_share": 0.05} | STARTING | {"dp": ranks}
    if task != "auto":
        keys["task"] = task
    if task == "classify":
        keys["best_metric"] = "accuracy"
    about = described()
    lines = []
    for key, value in checked(keys, "init").items():
        text = yaml.safe_dump({key: value}).strip()
        lines.append(f"{text:<28}  # {about[key]}\n")
    file.write_text("".join(lines), encoding="utf-8")
    typer.echo(f"{file} is written; start with: slapo-zoo train --config {file}")


STARTING = {
    "eval_every": 100, "steps": 1000, "batch_size": 8, "lr": 5e-5, "lr_schedule": "linear",
    "warmup_steps": 50, "checkpoint": "runs/checkpoint", "best": "runs/best",
    "log_file": "runs/log.jsonl",
}  # fmt: skip
