"""`slapo-zoo init`: four questions, and the configuration of a run."""

from pathlib import Path
from typing import Annotated, Any

import typer

from slapo_zoo.cli.arguments import AsJson
from slapo_zoo.cli.readable_errors import say, stdout_for_json
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
    as_json: AsJson = False,
) -> None:
    """Write the configuration of a training run; what is not given is asked."""
    with stdout_for_json(as_json):
        keys = _write(file, model, data, task, ranks)
    told = f"{file} is written; start with: slapo-zoo train --config {file}"
    say(as_json, {"file": file, "keys": keys}, told)


def _write(
    file: Path, model: str | None, data: str | None, task: str | None, ranks: int | None
) -> dict[str, Any]:
    """Ask what is missing, write the file, and return its keys."""
    import yaml

    from slapo_zoo.cli.training.options import ConfigError, checked, described

    if file.exists():
        raise ConfigError(str(file), "", "it is there already", "name another file, or remove it")
    model = model or typer.prompt(ASKED["model"])
    data = data or typer.prompt(ASKED["data"])
    task = task or typer.prompt(ASKED["task"], default="auto")
    ranks = ranks or typer.prompt(ASKED["ranks"], default=1, type=int)
    keys: dict[str, Any] = {"model": model, "data": data, "eval_share": 0.05} | STARTING
    keys |= {"dp": ranks, "batch_size": -(-STARTING["batch_size"] // ranks) * ranks}
    if task != "auto":
        keys["task"] = task
    if task == "classify":
        keys["metric_for_best_model"] = "accuracy"
    about = described()
    lines = []
    keys = checked(keys, "init")
    for key, value in keys.items():
        text = yaml.safe_dump({key: value}).strip()
        lines.append(f"{text:<28}  # {about[key]}\n")
    file.write_text("".join(lines), encoding="utf-8")
    return keys


STARTING: dict[str, Any] = {
    "eval_steps": 100, "max_steps": 1000, "batch_size": 8, "learning_rate": 5e-5, "lr_scheduler_type": "linear",
    "warmup_steps": 50, "checkpoint": "runs/checkpoint", "best": "runs/best",
    "log_file": "runs/log.jsonl",
}  # fmt: skip
