"""Command `slapo-zoo init`: asks four questions, and writes the configuration of a training run."""

from pathlib import Path
from typing import Annotated, Any

import typer

from slapo_zoo.cli.arguments import command
from slapo_zoo.cli.training.options import ONE_OF, ConfigError, checked, described

ASKED = {
    "model": "Model: a checkpoint folder, or an id of the Hub",
    "data": "Data: a file, a folder, or a data set of the Hub",
    "task": f"Task: {', '.join(ONE_OF['task'])}; auto: as the model was pre-trained",
    "ranks": "Number of GPUs (data-parallel replicas)",
}


@command
def init(
    file: Annotated[Path, typer.Argument(help="File to write.")] = Path("run.yaml"),
    model: Annotated[str | None, typer.Option(help=ASKED["model"])] = None,
    data: Annotated[str | None, typer.Option(help=ASKED["data"])] = None,
    task: Annotated[str | None, typer.Option(help=ASKED["task"])] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help=ASKED["ranks"])] = None,
) -> Any:
    """Write the configuration of a training run as YAML; ask for the model, data, task and ranks that no flag gives."""
    import yaml

    if file.exists():
        problem = "this file exists already"
        raise ConfigError(str(file), "", problem, "name another file, or remove this one")
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
    about, keys = described(), checked(keys, "init")
    texts = {key: yaml.safe_dump({key: value}).strip() for key, value in keys.items()}
    lines = [f"{text:<28}  # {about[key]}\n" for key, text in texts.items()]
    file.write_text("".join(lines), encoding="utf-8")
    told = f"{file} is written; start with: slapo-zoo train --config {file}"
    return {"file": file, "keys": keys}, told


STARTING: dict[str, Any] = {
    "eval_steps": 100, "max_steps": 1000, "batch_size": 8, "learning_rate": 5e-5, "lr_scheduler_type": "linear",
    "warmup_steps": 50, "checkpoint": "runs/checkpoint", "best": "runs/best",
    "log_file": "runs/log.jsonl",
}  # fmt: skip
