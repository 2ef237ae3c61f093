"""A training job from its arguments: check everything first, then start the ranks."""

import copy
import difflib
import importlib.util
import inspect
import itertools
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from slapo_zoo.cli.data.batches import Batches
from slapo_zoo.cli.data.read import kind_of
from slapo_zoo.cli.data.stream import Stream
from slapo_zoo.cli.readable_errors import is_first
from slapo_zoo.cli.training.config import ConfigError, read_config
from slapo_zoo.cli.training.inputs import TASKS, Inputs, row_length, task_of
from slapo_zoo.cli.training.logs import check_log, check_trackers
from slapo_zoo.cli.training.schedules import make_schedule
from slapo_zoo.cli.training.stopping import StoppedError, passing_on
from slapo_zoo.cli.training.train_options import WRITTEN, TrainOptions
from slapo_zoo.errors import MeshError, WeightsError
from slapo_zoo.model.integrations.dialects import HOMES
from slapo_zoo.parallel.ranks.launch import run_local
from slapo_zoo.parallel.ranks.process_group import (
    init_distributed,
    is_distributed_launch,
    rank_guard,
    shutdown_distributed,
    world_size_of_launch,
)
from slapo_zoo.weights.encode import decode
from slapo_zoo.weights.history import is_history, latest
from slapo_zoo.weights.staging import check_target
from slapo_zoo.weights.training_state import read_state
from slapo_zoo.zoo.argument_values import checkpoint_config


def data_parallel_size(tp: int, pp: int, dp: int | None) -> int:
    """dp, by default what the launched processes leave; MeshError if they do not fit."""
    if not is_distributed_launch():
        return dp or 1
    world = world_size_of_launch()
    size = dp or max(1, world // (tp * pp))
    if tp * pp * size != world:
        problem = f"found {world} processes, expected a multiple of tp*pp = {tp * pp}"
        if dp:
            problem = f"found {world} processes, expected tp*pp*dp = {tp * pp * dp}"
        raise MeshError("train", f"tp={tp} pp={pp} dp={dp}", problem, "start that many processes")
    return size


def device_named(name: str) -> str | None:
    """The device of `--device`; None for auto."""
    import torch

    if name not in ("auto", "cpu", "cuda"):
        problem = "found no such device, expected auto, cpu or cuda"
        raise MeshError("--device", name, problem, "leave it out for auto")
    if name == "cuda" and not torch.cuda.is_available():
        problem = "found no CUDA device that this torch can use"
        raise MeshError("--device", name, problem, "leave it out, or choose cpu")
    return None if name == "auto" else name


def check_engine(name: str, zero_stage: int, pp: int) -> str:
    """The name of an engine that is installed and can do what is asked for."""
    if name not in HOMES:
        problem = f"found {name!r}, expected one of {sorted(HOMES)}"
        raise MeshError("train", "--engine", problem, "choose one of them")
    if importlib.util.find_spec(name) is None:
        hint = f"pip install slapo-zoo[{name}]"
        raise MeshError("train", f"--engine {name}", "its package is not installed", hint)
    if zero_stage and name != "deepspeed":
        problem = f"ZeRO belongs to DeepSpeed, found --engine {name}"
        raise MeshError("train", f"--zero-stage {zero_stage}", problem, "add --engine deepspeed")
    if zero_stage > 1 and pp > 1:
        problem = f"DeepSpeed's pipeline takes stage 0 and 1, found pp={pp}"
        raise MeshError("train", f"--zero-stage {zero_stage}", problem, "choose 1, or pp=1")
    if name == "megatron" and pp > 1:
        problem = f"found pp={pp}, expected 1: Megatron's pipeline needs CUDA"
        raise MeshError("train", "--engine megatron", problem, "choose --engine torch or deepspeed")
    return name


def require_trainer() -> None:
    """ConfigError where the package that Trainer needs is not installed."""
    if importlib.util.find_spec("accelerate") is None:
        hint = "pip install slapo-zoo[train]"
        raise ConfigError("train", "", "its package accelerate is not installed", hint)


def check_batch(batch_size: int, dp: int, micro_batches: int | None) -> None:
    """Every data-parallel rank and every micro-batch gets the same number of rows."""
    parts = dp * (micro_batches or 1)
    if batch_size % parts:
        problem = f"found {batch_size}, expected a multiple of dp * micro-batches = {parts}"
        hint = f"nearest: {(batch_size // parts + 1) * parts}"
        raise MeshError("train", "--batch-size", problem, hint)


def check_output(folder: Path, option: str = "--output") -> None:
    """Only a new or empty folder, or an older checkpoint, may be written to."""
    if option != "--checkpoint" or not (folder.is_dir() and is_history(folder)):
        check_target(folder.resolve(), option=option)
    check_parent(folder, option)


def check_parent(path: Path, option: str) -> None:
    """Check that the existing part of a path can be written to."""
    found = next(one for one in [path, *path.absolute().parents] if one.exists())
    if not os.access(found, os.W_OK) or (found != path and not found.is_dir()):
        hint = "check its rights, or name another place"
        raise WeightsError(str(path), option, f"{found} cannot be written to", hint)


def check_places(options: TrainOptions) -> None:
    """Check that each output has a path of its own: a save replaces its folder, or refuses other files in it."""
    named = {name: getattr(options, name) for name in (*WRITTEN, "data", "eval_data")}
    places = {name: Path(path).resolve() for name, path in named.items() if path is not None}
    for name, other in itertools.permutations(places, 2):
        if name in WRITTEN and places[name].is_relative_to(places[other]):
            problem = f"found {named[name]}, which is {other} or lies in it"
            raise ConfigError("train", name, problem, "put it beside, e.g. runs/best, runs/log")
    for name in {"output", "best"} & places.keys():
        check_output(places[name], f"--{name}")
    if "log_file" in places:
        check_log(places["log_file"])
        check_parent(places["log_file"], "log_file")


# what decides the numbers of a step; the layout does not, and what the data are is compared itself
DECIDE = ("document_masks", "load", "max_steps", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "weight_decay",
          "max_grad_norm", "engine")  # fmt: skip


def changes_since(folder: Path, options: TrainOptions) -> str:
    """Keys that were others when a checkpoint was written; training goes on with those of now."""
    then = {}
    with suppress(OSError, ConfigError):  # an older release wrote none
        then = read_config(folder / "run.yaml")
    now = {name: getattr(options, name) for name in DECIDE if name in then}
    return ", ".join(f"{k}: {then[k]!r} --> {v!r}" for k, v in now.items() if then[k] != v)


def check_checkpoint(folder: Path, batches: Batches | Stream, options: TrainOptions) -> None:
    """A checkpoint that is there was made with these rows, and has done no more steps than asked for."""
    check_output(folder, "--checkpoint")
    if (found := latest(folder)) is None:
        if folder.exists() and any(folder.iterdir()):
            read_state(folder)  # says what is missing
        return
    state, now = read_state(found), batches.position(0)
    now.pop("at", None)
    then = decode(state["data_position"])
    then = then if isinstance(then, dict) else {}
    differ = [name for name in now if name in then and then[name] != now[name]]
    differ += [
        name for name in now if name not in then and name not in ("text", "task")
    ]  # older ones had none
    if differ:
        said = ", ".join(
            "other data, or data that an older release read" if name == "text"  # a checksum
            else f"{name}={then.get(name)} (now {now[name]})" for name in differ
        )  # fmt: skip
        hint = "take the same --data, --seq-len, --batch-size and --seed, or name a new folder"
        raise WeightsError(str(folder), "--checkpoint", f"it was trained with {said}", hint)
    if changed := changes_since(found, options):
        sys.stderr.write(f"changed since {found} was written: {changed}\n" if is_first() else "")
    if state["step"] > options.max_steps:
        problem = f"it has done {state['step']} steps, and --max-steps asks for {options.max_steps} in all"
        raise WeightsError(str(folder), "--checkpoint", problem, "ask for more --max-steps")


def resolved(options: TrainOptions) -> tuple[TrainOptions, Any]:
    """The options with what depends on processes, device and model filled in, and the model's config.

    All that can be checked without the data is checked.
    """
    options = replace(
        options, dp=data_parallel_size(options.tp, options.pp, options.dp),
        device=device_named(options.device or "auto"),
        engine=check_engine(options.engine, options.zero_stage, options.pp),
    )  # fmt: skip
    require_trainer()
    check_batch(options.batch_size, options.dp or 1, options.micro_batches)
    check_evaluation(options)
    check_trackers(options)
    check_places(options)
    for name in (options.data, options.eval_data):
        if name is not None:
            kind_of(name)
    if options.data is None:
        hint = "name a file, a folder or a dataset: --data, or `data:` in the file"
        raise ConfigError("train", "data", "found none", hint)
    make_schedule(options)
    config = checkpoint_config(options.model)
    check_load(options.load, config)
    task = task_of(config, options.task)
    if task == "pairs":
        check_pairs(options)
    check_mesh(options, TASKS[task].head, config)
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        problem = "found no decoder_start_token_id, with which decoder inputs begin"
        raise WeightsError(options.model, "config.json", problem, "add it; T5's is 0")
    if options.target_len is not None:
        row_length(options.target_len, config, "target_len")
    return replace(options, task=task, seq_len=row_length(options.seq_len, config)), config


def check_mesh(options: TrainOptions, head: str, config: Any) -> None:
    """Heads, blocks and widths can be divided as asked for: the program is tried on meta, on no rank."""
    world = options.tp * options.pp * (options.dp or 1)
    if world == 1 or "schedule" in options.load:  # a program of one's own may divide otherwise
        return
    import torch

    from slapo_zoo.parallel.mesh import Mesh
    from slapo_zoo.zoo.options import BuildOptions
    from slapo_zoo.zoo.outline import Outline

    fields = BuildOptions.__dataclass_fields__.keys() - {"device", "seed", "kernels"}
    knobs = {name: value for name, value in options.load.items() if name in fields}
    config = copy.deepcopy(config)
    config.update({k: v for k, v in options.load.items() if hasattr(config, k) and k not in knobs})
    Outline(config, head, Mesh(options.tp, options.pp, options.dp or 1), torch.float32, **knobs)


# arguments of from_pretrained --> the key that decides them
OWN_KEYS = {"auto_class": "task", "target": "engine"}


def check_load(given: Mapping[str, Any], config: Any) -> None:
    """`load` names arguments of from_pretrained that no other key sets, or fields of the config."""
    from slapo_zoo.load.auto import AutoScheduledModel

    known = inspect.signature(AutoScheduledModel.from_pretrained).parameters.keys()
    taken = {"tp", "pp", "dp", "seed", "micro_batches", "device", "auto_class", "target"}
    for name in given:
        if name in taken or (name not in known and not hasattr(config, name)):
            problem = "it has a key of its own" if name in taken else "found no such argument"
            near = difflib.get_close_matches(name, [*known, *vars(config)], 1, 0.5)
            hint = f"did you mean {near[0]!r}?" if near else "see docs/guide.md"
            hint = f"write `{OWN_KEYS.get(name, name)}:` outside of load" if name in taken else hint
            raise ConfigError("train", f"load.{name}", problem, hint)


def check_pairs(options: TrainOptions) -> None:
    """Every pair is compared with all others of the step."""
    if options.engine != "torch":
        problem = f"found --engine {options.engine}, expected torch"
        raise ConfigError("train", "task=pairs", problem, "leave --engine out")
    if options.micro_batches not in (None, 1):
        problem = f"found {options.micro_batches}, expected 1: pairs of other parts are not seen"
        hint = "leave it out, or take a larger --dp"
        raise ConfigError("train", "--micro-batches", problem, hint)
    if options.batch_size < 2:
        problem = "found 1, expected more: a pair is compared with the others of its step"
        raise ConfigError("train", "--batch-size", problem, "choose a larger one")


def check_evaluation(options: TrainOptions) -> None:
    """Check that every key that needs an evaluation, other rows or a checkpoint has one."""
    if options.evaluates and options.engine != "torch":
        problem = f"found --engine {options.engine}, expected torch"
        raise ConfigError("train", "eval_data", problem, "evaluate its checkpoint by engine: torch")
    if options.eval_share and (options.eval_data or options.eval_split):
        other = "eval_data" if options.eval_data else "eval_split"
        problem = f"found {other} too, which is evaluated on in its place"
        raise ConfigError("train", "eval_share", problem, "leave one of them out")
    trained = (Path(str(options.data)).resolve(), options.data_split)
    judged = (Path(options.eval_data or trained[0]).resolve(), options.eval_split or trained[1])
    hint = "add eval_data, eval_split or eval_share, of other rows"
    if judged == trained and (options.eval_data or options.eval_split):
        raise ConfigError("train", "eval_data", "found the rows that are trained on", hint)
    needs = {
        ("best", "patience", "eval_batches"): (options.evaluates, "there is nothing to evaluate on", hint),
        ("save_total_limit",): (options.checkpoint, "there is no checkpoint", "add checkpoint: FOLDER"),
        ("lr_scheduler_kwargs",): (options.lr_scheduler_type != "constant", "a constant schedule takes none", "name another"),
    }  # fmt: skip
    for name, (is_there, problem, hint) in (
        (n, need) for names, need in needs.items() for n in names
    ):
        if not is_there and getattr(options, name) != getattr(TrainOptions(""), name):
            raise ConfigError("train", name, problem, hint)


def _run_local(options: TrainOptions, inputs: Inputs, world: int) -> list[float]:
    """On local ranks; a request to stop reaches them, and what they say about it reaches us."""
    with passing_on() as stop:
        outcome = run_local(training_of, world, (options, inputs), device=options.device)[0]
    if isinstance(outcome, StoppedError):
        raise StoppedError(stop.number, outcome.step, options)
    return outcome


def training_of(options: TrainOptions, inputs: Inputs) -> Any:
    """The losses of a rank, or that it was asked to stop; errors name this function."""
    from slapo_zoo.cli.training.run import train

    try:
        return train(options, inputs)
    except StoppedError as stopped:
        return stopped


def run(options: TrainOptions, inputs: Inputs) -> list[float]:
    """Train on the ranks that a launcher started, or on local ranks that we start; the losses."""
    from slapo_zoo.cli.training.run import train

    world = options.tp * options.pp * (options.dp or 1)
    if is_distributed_launch():
        init_distributed(device=options.device)
        with rank_guard("train"):
            losses = train(options, inputs)
        shutdown_distributed()
        return losses
    return train(options, inputs) if world == 1 else _run_local(options, inputs, world)
