"""Checks of a training run before data are read: processes, device, engine, output paths, loader arguments."""

import copy
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

from slapo_zoo.cli.arguments import data_parallel_size, device_named
from slapo_zoo.cli.training.options import ConfigError, TrainOptions, read_config
from slapo_zoo.cli.training.records import check_log, check_trackers
from slapo_zoo.cli.training.trainer_arguments import make_schedule
from slapo_zoo.data.read import kind_of
from slapo_zoo.data.tasks import TASKS, DataError
from slapo_zoo.errors import ArchitectureError, WeightsError
from slapo_zoo.model.integrations.dialects import HOMES
from slapo_zoo.model.load.exact import virtual_mesh
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.ranks.slurm import is_first
from slapo_zoo.weights.encode import decode
from slapo_zoo.weights.history import is_history, latest
from slapo_zoo.weights.staging import check_target
from slapo_zoo.weights.training_state import read_state
from slapo_zoo.zoo.argument_values import checkpoint_config
from slapo_zoo.zoo.options import unknown_knob

WRITTEN = ("output", "best", "checkpoint", "log_file")
BEHIND_PADDING = {"roberta", "xlm-roberta", "camembert", "esm"}  # positions begin after padding_idx
# keys that `load` refuses --> the option that sets them
OWN_KEYS = {"tp": "tp", "pp": "pp", "dp": "dp", "cp": "cp", "seed": "seed", "micro_batches": "micro_batches", "device": "device",
            "auto_class": "task", "target": "engine", "exact": "exact"}  # fmt: skip
# options that decide the numbers of a step or of an evaluation; the layout does not
DECIDE = ("document_masks", "load", "exact", "max_steps", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "weight_decay",
          "max_grad_norm", "metric_for_best_model", "data", "data_split", "eval_data", "eval_split", "engine", "optim", "adam_beta1",
          "adam_beta2", "adam_epsilon", "trainer")  # fmt: skip


def resolved(options: TrainOptions) -> tuple[TrainOptions, Any]:
    """Return (`options`, config of the model). Where the user gave none, dp follows from the number of processes, task
    is the family's pre-training task, seq_len at most 128. Wrong options raise SlapoError, before data are read.
    """
    dp = data_parallel_size(options.tp, options.pp, options.dp, options.cp)
    options = replace(options, dp=dp, device=device_named(options.device or "auto"))
    mesh = Mesh(options.tp, options.pp, dp, cp=options.cp)
    if options.exact:
        mesh = virtual_mesh(mesh, options.exact)
        options = replace(options, exact=mesh.sizes)
    check_engine(options)
    _require(importlib.util.find_spec("accelerate"), "", "found no package accelerate, which this command needs", "pip install slapo-zoo[train]")  # fmt: skip
    check_batch(options.batch_size, mesh.dp, options.micro_batches)
    check_evaluation(options)
    check_trackers(options)
    check_places(options)
    hint = "name a file, a folder or a dataset: --data, or `data:` in the file"
    _require(options.data, "data", "found none", hint)
    for name in {options.data, options.eval_data} - {None}:
        kind_of(str(name))
    make_schedule(options)
    config = checkpoint_config(options.model)
    check_load(options.load, config)
    task = task_of(config, options.task)
    looks_ahead = task == "causal" and task_of(config) == "masked" and not options.load.get("is_decoder")  # fmt: skip
    problem = f"found {config.model_type} with is_decoder=false: a token sees the next one, which it is to predict"
    _require(not looks_ahead, "task=causal", problem, "add load: {is_decoder: true}, or choose task masked")  # fmt: skip
    if task == "pairs":
        check_pairs(options)
    check_mesh(mesh, options, TASKS[task].head, config)
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        problem = "found no decoder_start_token_id, with which decoder inputs begin"
        hint = "add it to config.json (T5 has 0)"
        raise WeightsError(options.model, "config.json", problem, hint)
    if options.target_len is not None:
        row_length(options.target_len, config, "target_len")
    return replace(options, task=task, seq_len=row_length(options.seq_len, config)), config


def _require(held: Any, what: str, problem: str, hint: str) -> None:
    if not held:
        raise ConfigError("train", what, problem, hint)


def check_engine(options: TrainOptions) -> None:
    """Raise ConfigError if the engine (torch, deepspeed, megatron) is not installed or does not support an option that is set."""
    name, pp = options.engine, options.pp
    problem = f"not supported together with cp={options.cp}"
    _require(options.cp == 1 or not options.exact, "exact", problem, "leave exact out, or use cp=1")
    _require(options.cp == 1 or name == "torch", f"--engine {name}", problem, "choose --engine torch, or cp=1")  # fmt: skip
    _require(name in HOMES, "--engine", f"found {name!r}, expected one of {sorted(HOMES)}", "choose one of them")  # fmt: skip
    _require(name == "torch" or not options.exact, "exact", f"found --engine {name}, which sums gradients in an order of its own", "leave --engine out")  # fmt: skip
    _require(options.exact or not options.log_digest, "log_digest", "digests of two meshes are equal only with `exact`", "add exact: {tp: 2}")  # fmt: skip
    hint = f"pip install slapo-zoo[{name}]"
    _require(importlib.util.find_spec(name), f"--engine {name}", f"the package {name} is not installed", hint)  # fmt: skip
    is_deepspeed = name == "deepspeed"
    _require(is_deepspeed or not options.deepspeed, "deepspeed", f"these options are for DeepSpeed, found --engine {name}", "add --engine deepspeed")  # fmt: skip
    stage = options.deepspeed.get("zero_optimization", {}).get("stage", 0)
    problem = f"DeepSpeed's pipeline takes stage 0 and 1, found stage {stage} and pp={pp}"
    _require(stage < 2 or pp == 1, "deepspeed", problem, "choose stage 1, or pp=1")
    problem = f"found pp={pp}, expected 1: Megatron's pipeline needs CUDA"
    _require(name != "megatron" or pp == 1, "--engine megatron", problem, "choose --engine torch or deepspeed")  # fmt: skip


def check_batch(batch_size: int, dp: int, micro_batches: int | None) -> None:
    """Raise ConfigError unless dp * `micro_batches` (None: 1) divides `batch_size`, the rows of a step."""
    parts = dp * (micro_batches or 1)
    problem = f"found {batch_size}, expected a multiple of dp * micro-batches = {parts}"
    _require(batch_size % parts == 0, "--batch-size", problem, f"nearest: {(batch_size // parts + 1) * parts}")  # fmt: skip


def check_places(options: TrainOptions) -> None:
    """Raise an error for an output path that is not writable, that equals or lies in the path of another
    option (output, data, ...), or for an output that is the folder of the model: a save replaces its whole folder.
    """
    named = {name: getattr(options, name) for name in (*WRITTEN, "data", "eval_data", "model")}
    places = {name: Path(path).resolve() for name, path in named.items() if path is not None}
    for name, other in itertools.permutations(places, 2):
        if other == "model":  # it may be a checkpoint to resume, and a folder in it stays in it
            is_taken = name in ("output", "best") and places[name] == places[other]
        else:
            is_taken = name in WRITTEN and places[name].is_relative_to(places[other])
        if is_taken:
            problem = f"found {named[name]}, which is the path of {other} or lies in it"
            hint = f"name a path outside of {other}, e.g. runs/best or runs/log"
            raise ConfigError("train", name, problem, hint)
    for name in {"output", "best"} & places.keys():
        check_target(places[name], option=f"--{name}")
        check_parent(places[name], f"--{name}")
    if "log_file" in places:
        check_log(places["log_file"])
        check_parent(places["log_file"], "log_file")


def check_parent(path: Path, option: str) -> None:
    """Raise WeightsError, which names the flag `option`, unless the path or its closest existing parent is writable."""
    found = next(one for one in [path, *path.absolute().parents] if one.exists())
    if not os.access(found, os.W_OK) or (found != path and not found.is_dir()):
        hint = "check the permissions of this path, or name another one"
        raise WeightsError(str(path), option, f"{found} cannot be written to", hint)


def check_evaluation(options: TrainOptions) -> None:
    """Raise ConfigError for an option that has no effect without another, e.g. `patience` without evaluation rows, or
    if the evaluation rows are the training rows.
    """
    names = [name for name in ("eval_data", "eval_split") if getattr(options, name)]
    if options.evaluates:
        problem = f"found --engine {options.engine}, expected torch"
        _require(options.engine == "torch", [*names, "eval_share"][0], problem, "leave it out, and evaluate the checkpoint later with --engine torch")  # fmt: skip
    if options.eval_share:
        problem = f"found {' and '.join(names)} too, which is evaluated on in its place"
        _require(not names, "eval_share", problem, "leave one of them out")
    trained = (Path(str(options.data)).resolve(), options.data_split)
    judged = (Path(options.eval_data or trained[0]).resolve(), options.eval_split or trained[1])
    hint = "add eval_data, eval_split or eval_share, of other rows"
    _require(not names or judged != trained, "eval_data", "found the rows that are trained on", hint)  # fmt: skip
    nothing = (options.evaluates, "there is nothing to evaluate on", hint)
    needs = {
        "best": nothing, "patience": nothing, "eval_batches": nothing, "eval_delay": nothing,
        "save_total_limit": (options.checkpoint, "there is no checkpoint", "add checkpoint: FOLDER"),
        "lr_scheduler_kwargs": (options.lr_scheduler_type != "constant", "a constant schedule takes no arguments", "name another lr_scheduler_type"),
        "optim_args": (options.optim == "sgd", f"optim={options.optim} takes no arguments", "add optim: sgd, or use adam_beta1, ..."),
    }  # fmt: skip
    given, usual = {**vars(options), **options.trainer}, vars(TrainOptions(""))
    for name, need in needs.items():
        if given.get(name) != usual.get(name):
            _require(need[0], name, *need[1:])
    named = {entry.partition("=")[0].strip() for entry in given.get("optim_args", "momentum").split(",")}  # fmt: skip
    problem = f"found {', '.join(sorted(named))}, expected momentum, dampening or nesterov"
    _require(named <= {"momentum", "dampening", "nesterov"}, "optim_args", problem, "write momentum=0.9,nesterov=true")  # fmt: skip


def check_pairs(options: TrainOptions) -> None:
    """Raise ConfigError if task `pairs`, a contrastive loss, would not compare all pairs of a step: with another engine
    than torch, with several micro-batches, with option `exact`, or with one row per step.
    """
    problem = f"found --engine {options.engine}, expected torch"
    _require(options.engine == "torch", "task=pairs", problem, "leave --engine out")
    count, hint = options.micro_batches, "leave it out, or take a larger --dp"
    problem = f"found {count}, expected 1: a pair is compared only with those of its own micro-batch"  # fmt: skip
    _require(count in (None, 1), "--micro-batches", problem, hint)
    problem = "a pair would be compared only with those of its own virtual rank"
    _require(not options.exact, "exact", problem, "leave exact out")
    problem = "found 1, expected more: a pair is compared with the others of its step"
    _require(options.batch_size > 1, "--batch-size", problem, "choose a larger one")


def check_load(given: Mapping[str, Any], config: Any) -> None:
    """Raise SlapoError if `given`, the entries of option `load`, has a name that is no argument of from_pretrained and
    no field of `config`, or one that the run sets by another option: tp, pp, dp, cp, seed, device, ... (OWN_KEYS).
    """
    from slapo_zoo.model.load.auto import AutoScheduledModel

    known = inspect.signature(AutoScheduledModel.from_pretrained).parameters.keys()
    for name in given:
        if name in OWN_KEYS:
            hint = f"write `{OWN_KEYS[name]}:` outside of load"
            problem = "this argument is an option of its own, not an entry of `load`"
            raise ConfigError("train", f"load.{name}", problem, hint)
        if name not in known and not hasattr(config, name):
            raise unknown_knob("train", f"load.{name}", [f"load.{n}" for n in (*known, *vars(config))])  # fmt: skip


def check_mesh(mesh: Mesh, options: TrainOptions, head: str, config: Any) -> None:
    """Raise an error if `mesh` cannot shard the model with `config` and a head of auto class `head`; to find out, a
    model on the meta device is sharded. The mesh is that of the processes or, with option `exact`, of the virtual
    ranks, several of which a process runs as threads.
    """
    import torch

    from slapo_zoo.model.context_parallel import check_cp
    from slapo_zoo.model.dp.dp_shard import check_dp_shard
    from slapo_zoo.zoo.options import BuildOptions, LoaderOptions
    from slapo_zoo.zoo.outline import Outline

    given = options.load
    known = LoaderOptions.__dataclass_fields__.keys()
    check_cp("train", mesh, LoaderOptions(**{k: v for k, v in given.items() if k in known}))
    check_dp_shard(mesh, given.get("dp_shard", 1), given.get("zero_stage", 3), options.engine)
    if mesh.world_size == 1 or "schedule" in given:  # the user's own schedule may shard otherwise
        return
    fields = BuildOptions.__dataclass_fields__.keys() - {"device", "seed", "kernels"}
    knobs = {name: value for name, value in given.items() if name in fields}
    config = copy.deepcopy(config)
    config.update({k: v for k, v in given.items() if hasattr(config, k) and k not in knobs})
    Outline(config, head, mesh, torch.float32, **knobs)


def task_of(config: Any, asked: str | None = None) -> str:
    """Return the name of the task ("causal", "masked", "classify", ...): `asked`, or for None the family's pre-training
    task. ArchitectureError is raised if the family has no head for the task.
    """
    import transformers

    family, kind = config.model_type, type(config)
    known = [name for name, task in TASKS.items() if kind in getattr(transformers, task.head)._model_mapping]  # fmt: skip
    if asked is not None:
        if asked in known:
            return asked
        problem = f"transformers has no model of the family {family!r} for this task"
        hint = f"choose another task: {', '.join(known)}" if known else "call model.train_step from a script of your own"  # fmt: skip
        raise ArchitectureError("train", f"task={asked}", problem, hint)
    if "masked" in known and not config.is_decoder and not config.is_encoder_decoder:
        return "masked"
    if "causal" in known:
        return "causal"
    if "span" in known and "t5" in family:
        return "span"
    problem = "found no language-modelling head that this command trains"
    hint = "name the task (--set task=classify), or call model.train_step from a script of your own"
    raise ArchitectureError("train", f"model_type={family!r}", problem, hint)


def row_length(asked: int | None, config: Any, option: str = "--seq-len") -> int:
    """Return the tokens per row: `asked`, or for None 128, or as many as the model has positions if they are fewer.
    DataError, which names the flag `option`, is raised if the model has fewer positions than `asked`.
    """
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and config.model_type in BEHIND_PADDING:
        longest -= config.pad_token_id + 1
    if asked is not None and longest is not None and asked > longest:
        problem = f"found {asked} tokens, but the model has {longest} positions"
        raise DataError("train", option, problem, f"choose at most {longest}")
    return asked or min(128, longest or 128)


def check_checkpoint(folder: Path, position: Mapping[str, Any], options: TrainOptions) -> None:
    """Raise WeightsError if an existing checkpoint in `folder` was trained on other rows, or for more steps than the
    run asks for. `position`, from `Batches.position(0)`, has the settings and a checksum of this run's data.
    """
    if not (folder.is_dir() and is_history(folder)):
        check_target(folder.resolve(), option="--checkpoint")
    check_parent(folder, "--checkpoint")
    if (found := latest(folder)) is None:
        if folder.exists() and any(folder.iterdir()):
            read_state(folder)  # its error says what is missing
        return
    state, now = read_state(found), {k: v for k, v in position.items() if k != "at"}
    held = decode(state["data_position"])
    then = held if isinstance(held, dict) else {}
    missing = [name for name in now if name not in then and name not in ("text", "task")]
    differ = [name for name in now if name in then and then[name] != now[name]] + missing
    if differ:
        said = ", ".join(
            "other data, or with data read by an older slapo_zoo" if name == "text"  # a checksum
            else f"{name}={then.get(name)} (now {now[name]})" for name in differ
        )  # fmt: skip
        hint = "take the same --data, --seq-len, --batch-size and --seed, or name a new folder"
        raise WeightsError(str(folder), "--checkpoint", f"the checkpoint was trained with {said}", hint)  # fmt: skip
    if changed := changes_since(found, options):
        sys.stderr.write(f"changed since {found} was written: {changed}\n" if is_first() else "")
    if state["step"] > options.max_steps:
        problem = f"the checkpoint has done {state['step']} steps, and --max-steps asks for {options.max_steps} in all"
        raise WeightsError(str(folder), "--checkpoint", problem, "raise --max-steps")


def changes_since(folder: Path, options: TrainOptions) -> str:
    """Return which options changed since the checkpoint in `folder` was written, as text "key: old --> new, ..."."""
    then = {}
    with suppress(OSError, ConfigError):  # older releases wrote no run.yaml
        then = read_config(folder / "run.yaml")
    now = {name: getattr(options, name) for name in DECIDE if name in then}
    return ", ".join(f"{k}: {then[k]!r} --> {v!r}" for k, v in now.items() if then[k] != v)
