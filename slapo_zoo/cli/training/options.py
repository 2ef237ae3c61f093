"""Options of a training run, read from a YAML file, from `--set key=value`, from flags or from Python."""

import difflib
import math
import os
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml

from slapo_zoo.errors import SlapoError
from slapo_zoo.parallel.ranks.slurm import is_first


class ConfigError(SlapoError, ValueError):
    """Error of a key or a value in the configuration of a training run."""


def option(default: Any, about: str, **bounds: Any) -> Any:
    """Return a dataclass field of TrainOptions.

    Args:
        default: default value.
        about: meaning of the option, for --help, docs/training.md and errors.
        **bounds: bounds of legal values: `least` (inclusive), `below` (exclusive) or `one_of`.
    """
    metadata = {"about": about, **bounds}
    if default == {}:
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


# fmt: off
@dataclass(frozen=True)
class TrainOptions:
    """Options of a training run: each is a key of the YAML file and a flag of `slapo-zoo train`.

    An option that `transformers.TrainingArguments` has too has the same name as there.
    """

    model: str = option(MISSING, "checkpoint folder or Hub id.")
    data: str | None = option(None, "a file, a folder, or the name of a dataset on the Hub.")
    data_config: str | None = option(None, "configuration of a dataset that has several.")
    data_split: str = option("train", "split to train on.")
    columns: Mapping[str, str] = option({}, "names of columns: input of the task --> column of the data, e.g. {text: body}.")
    stream: bool = option(False, "read the data during training, and hold at most `shuffle_rows` rows in memory.")
    shuffle_rows: int = option(1000, "number of rows within which a stream is shuffled.", least=1)
    task: str | None = option(None, "causal, masked, span, classify, tag, seq2seq or pairs; None: the family's own.", one_of=("causal", "masked", "span", "classify", "tag", "seq2seq", "pairs"))
    seq_len: int | None = option(None, "tokens per row; None: 128, or the model's maximum if that is less.", least=2)
    target_len: int | None = option(None, "tokens of a seq2seq target; None: the same as seq_len.", least=1)
    document_masks: bool | None = option(None, "tokens attend only to their own document of a packed row; None: if the model supports it.")
    eval_data: str | None = option(None, "data for evaluation: a file, a folder or a data set; None: eval_split of `data`.")
    eval_split: str | None = option(None, "split for evaluation.")
    eval_share: float = option(0.0, "share of the rows of `data` that is held out for evaluation, 0 to 1.", least=0, below=1)
    eval_steps: int = option(100, "steps between two evaluations; there is one after the last step too.", least=1)
    eval_batches: int | None = option(None, "maximum number of batches of an evaluation; None: all rows.", least=1)
    tp: int = option(1, "tensor-parallel ranks.", least=1)
    pp: int = option(1, "pipeline stages.", least=1)
    dp: int | None = option(None, "data-parallel replicas; None: launched processes / (tp * pp * cp).", least=1)
    cp: int = option(1, "ranks that shard the tokens of each row.", least=1)
    micro_batches: int | None = option(None, "micro-batches per step and replica; None: the loader's default.", least=1)
    batch_size: int = option(8, "rows per step, over all replicas.", least=1)
    exact: Mapping[str, int] = option({}, "virtual mesh, e.g. {tp: 4, dp: 2}: every mesh that divides it trains with the same bits.")
    load: Mapping[str, Any] = option({}, "more arguments of `from_pretrained`, e.g. {sequence_parallel: true}.")
    max_steps: int = option(100, "optimizer steps.", least=1)
    learning_rate: float | None = option(None, "learning rate; None: 1e-4, or the checkpoint's when resuming.", least=0)
    lr_scheduler_type: str = option("constant", "a name of `transformers.get_scheduler`.")
    lr_scheduler_kwargs: Mapping[str, Any] = option({}, "arguments of that schedule, e.g. {num_cycles: 2}.")
    warmup_steps: int = option(0, "number of steps in which the learning rate rises from 0.", least=0)
    optim: str = option("adamw_torch_fused", "adamw_torch_fused, adamw_torch or sgd.", one_of=("adamw_torch_fused", "adamw_torch", "sgd"))
    adam_beta1: float = option(0.9, "AdamW's beta1, the decay of the mean of the gradients.", least=0, below=1)
    adam_beta2: float = option(0.999, "AdamW's beta2, the decay of the mean of their squares.", least=0, below=1)
    adam_epsilon: float = option(1e-08, "AdamW's epsilon.", least=0)
    weight_decay: float = option(0.01, "weight decay of matrices; vectors (biases, norms) have none.", least=0)
    max_grad_norm: float = option(1.0, "largest global gradient norm; 0 does not clip.", least=0)
    seed: int = option(0, "seed of dropout, new weights, the order of the rows, and masks.", least=0, below=2**32)
    output: str | None = option(None, "folder for the trained checkpoint.")
    checkpoint: str | None = option(None, "folder for training checkpoints; training resumes from one that exists.")
    save_steps: int = option(100, "steps between two checkpoints; one is written after the last step too.", least=1)
    save_total_limit: int | None = option(None, "number of checkpoints to keep, in step folders below `checkpoint`; None: one, `checkpoint` itself.", least=1)
    best: str | None = option(None, "folder for the checkpoint with the best evaluation so far.")
    metric_for_best_model: str = option("loss", "loss or accuracy.", one_of=("loss", "accuracy"))
    patience: int | None = option(None, "stop after this many evaluations without improvement; None: never.", least=1)
    log_file: str | None = option(None, "file to which a JSON line is written for each step.")
    log_digest: bool = option(False, "write a digest of loss, norm and weights into each line of the log; needs `exact`.")
    report_to: tuple[str, ...] = option((), "trackers of Trainer: tensorboard, wandb, trackio, mlflow, ...")
    logging_dir: str | None = option(None, 'folder for files of trackers; None: the path of output (or checkpoint) + "-logs".')
    logging_steps: int | None = option(None, "steps between two progress lines without a terminal; None: ten lines in all, and one every half minute.", least=1)
    device: str | None = option(None, '"cpu" or "cuda"; None: a GPU if there is one.')
    engine: str = option("torch", "torch, deepspeed or megatron.")
    deepspeed: Mapping[str, Any] = option({}, "entries of DeepSpeed's configuration, e.g. {zero_optimization: {stage: 1}}.")
    trainer: Mapping[str, Any] = option({}, "further arguments of `TrainingArguments`, e.g. {run_name: first}; they may also be keys of their own.")
    # fmt: on

    @property
    def evaluates(self) -> bool:
        """Return whether the run has rows to evaluate on."""
        return bool(self.eval_data or self.eval_split or self.eval_share)


def described() -> dict[str, str]:
    """Return {option name: help text} of all options of `slapo-zoo train`."""
    return {each.name: each.metadata["about"] for each in fields(TrainOptions)}


def bounds_of(kind: str) -> dict[str, Any]:
    """Return {option name: bound} for the options that have a bound of `kind`: "least", "below" or "one_of"."""
    held = {each.name: each.metadata.get(kind) for each in fields(TrainOptions)}
    return {name: bound for name, bound in held.items() if bound is not None}


LEAST, BELOW, ONE_OF = (bounds_of(kind) for kind in ("least", "below", "one_of"))
PATHS = ("output", "best", "checkpoint", "log_file", "model", "data", "eval_data", "logging_dir")

# Keys and flags of the release before --> what they are called now; they go on working for one release.
RENAMED = {
    "steps": "max_steps", "lr": "learning_rate", "lr_schedule": "lr_scheduler_type", "lr_options": "lr_scheduler_kwargs",
    "clip": "max_grad_norm", "save_every": "save_steps", "keep": "save_total_limit", "eval_every": "eval_steps",
    "best_metric": "metric_for_best_model", "log_every": "logging_steps", "trackers": "report_to",
}  # fmt: skip
# What the Trainer of transformers and others call it --> our key, and what is different.
ELSEWHERE = {
    "lr_scheduler": "lr_scheduler_type", "gradient_clip_val": "max_grad_norm", "early_stopping_patience": "patience",
    "model_name_or_path": "model", "dataset_name": "data", "train_file": "data", "validation_file": "eval_data",
    "max_length": "seq_len", "max_seq_length": "seq_len", "tensor_parallel_size": "tp", "pipeline_parallel_size": "pp", "context_parallel_size": "cp",
    "output_dir": "checkpoint, the folder of all that training needs to go on; output is that of the trained model",
    "per_device_train_batch_size": "batch_size, which counts the rows of all replicas together",
    "train_batch_size": "batch_size, which counts the rows of all replicas together",
    "gradient_accumulation_steps": "micro_batches; batch_size counts the rows of a whole step",
    "num_train_epochs": "max_steps: rows of the data * epochs / batch_size",
    "warmup_ratio": "warmup_steps: ratio * steps",
    "load_best_model_at_end": "best, the folder of the best checkpoint",
    "bf16": "load: {precision: bf16}", "fp16": "load: {precision: fp16}",
    "gradient_checkpointing": "load: {checkpoint_ratio: 1.0}",
}  # fmt: skip

# Arguments of TrainingArguments that Trainer gets as they are, with their types: entries of the key `trainer`.
PASSED: dict[str, Any] = {
    "optim_args": str, "tf32": bool, "full_determinism": bool, "eval_delay": int, "logging_first_step": bool, "run_name": str,
    "project": str, "trackio_space_id": str, "trackio_bucket_id": str, "trackio_static_space_id": str,
}  # fmt: skip
# How other arguments of TrainingArguments begin --> why a run does not take them, what to do.
REFUSED: dict[tuple[str, ...], tuple[str, str]] = {
    ("dataloader_", "remove_unused_", "label_names", "train_sampling_", "group_by_length", "length_column_", "accelerator_",
     "auto_find_", "data_seed", "ignore_data_", "per_device_eval_", "eval_accumulation_", "eval_do_concat_", "eval_use_gather_",
     "include_for_metrics", "batch_eval_", "prediction_loss_"): (
        "a run makes its own batches, which are the same in every layout", "use batch_size, seq_len and seed"),
    ("neftune_", "label_smoothing_", "average_tokens_"): (
        "the loss is that of the model's head, the same in every layout and after a resume",
        "call ScheduledTrainer from a program (docs/trainer.md)"),
    ("torch_compile", "use_liger_", "liger_", "activation_", "gradient_checkpointing_", "fsdp", "ddp_", "parallelism_", "bf16_full_",
     "fp16_full_", "use_cache", "torch_empty_", "local_rank", "use_cpu", "optim_target_"): (
        "the loader shards, casts and recomputes the model", "use tp, pp, dp, device or load, e.g. load: {precision: bf16}"),
    ("save_only_", "save_strategy", "save_on_each_", "push_to_", "hub_", "enable_jit_", "restore_callback_", "resume_from_",
     "greater_is_"): (
        "a run writes one kind of checkpoint, which every layout resumes", "use checkpoint, save_steps, output or best"),
    ("logging_strategy", "log_on_each_", "log_level", "logging_nan_", "include_num_", "disable_tqdm", "skip_memory_", "debug"): (
        "every step is logged, once for all ranks", "use log_file, logging_steps or report_to"),
    ("eval_strategy", "eval_on_start", "do_"): ("the data decide whether a run evaluates", "use eval_data, eval_split or eval_share, and eval_steps"),
}  # fmt: skip


class ConfigLoader(yaml.SafeLoader):
    """YAML loader that refuses a repeated key, and reads 4e-3 as a number, which PyYAML reads as text."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Return the YAML mapping `node` as a dict; raise YAMLError for a repeated key."""
        names = [key.value for key, _ in node.value]
        if twice := [name for name in names if names.count(name) > 1]:
            raise yaml.YAMLError(f"found the key {twice[0]!r} {len(twice)} times, keep one of them")
        return super().construct_mapping(node, deep)


NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
ConfigLoader.add_implicit_resolver("tag:yaml.org,2002:float", NUMBER, list("-+.0123456789"))


def _not_yaml(error: Exception) -> str:
    """Return, as text for the user, the parser's `error` on a text that is not YAML, with line and column if known."""
    mark, lines = getattr(error, "problem_mark", None), str(error).splitlines()
    said = ", ".join(line.strip() for line in lines if not mark or not line.startswith(" "))
    said = f"line {mark.line + 1}, column {mark.column + 1}: {said}" if mark else said
    return f"this is not valid YAML: {said}"


def read_config(path: Path) -> dict[str, Any]:
    """Return {option name: value} from the YAML file `path`, each value checked and converted to the option's type."""
    hint = "write one `key: value` per line"
    try:
        found = ConfigLoader(path.read_text(encoding="utf-8")).get_single_data()
    except FileNotFoundError:
        hint = "slapo-zoo init writes one"
        raise ConfigError(str(path), "--config", "found no such file", hint) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), "--config", _not_yaml(error), hint) from None
    if not isinstance(found, dict):
        problem = f"found {type(found).__name__}, expected keys and values"
        raise ConfigError(str(path), "--config", problem, hint)
    return checked(found, str(path))


def read_sets(words: Sequence[str]) -> dict[str, Any]:
    """Return {option name: value} from words key=value of `--set`; `columns.text=body` sets an entry of a mapping."""
    found: dict[str, Any] = {}
    for word in words:
        key, is_set, text = word.partition("=")
        if not is_set:
            raise ConfigError("--set", word, "found no `=`", "write key=value")
        key, _, entry = key.strip().partition(".")
        try:
            value = ConfigLoader(text).get_single_data()
        except yaml.YAMLError as error:
            hint = "write the value as in YAML, in quotes where it has brackets"
            raise ConfigError("--set", word, _not_yaml(error), hint) from None
        entries = held if isinstance(held := found.get(key), dict) else {}
        found[key] = {**entries, entry: value} if entry else value
    return checked(found, "--set")


def checked(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return {option name: value} with each value converted to the option's type, and old option names replaced.

    ConfigError, which names `where` (a file or a flag), is raised for an unknown name or an illegal value.
    A number may be given as a text, such as "1e-4".
    """
    if isinstance(held := given.get("trainer"), Mapping):  # its entries are keys like the others
        given = {**held, **given, "trainer": {}}
    given = {str(key): value for key, value in given.items()}
    if stage := given.pop("zero_stage", None):  # of the layout, as in every other command
        load = given.get("load") or {}
        given["load"] = {**load, "zero_stage": stage} if isinstance(load, Mapping) else load
    now = {key: RENAMED.get(key, key) for key in given}
    _warn(where, [f"{key} is called {new} now" for key, new in now.items() if key != new])
    if twice := [(key, new) for key, new in now.items() if key != new and new in given]:
        problem = f"found {twice[0][0]} too, the older name of this option"
        raise ConfigError(where, twice[0][1], problem, "leave one of them out")
    read = {new: _value(new, given[key], where) for key, new in now.items()}
    passed = {key: read.pop(key) for key in PASSED if key in read}
    return {**read, "trainer": passed} if passed else read


def _warn(where: str, older: Sequence[str]) -> None:
    """Print the texts `older` on renamed options in the file or flag `where` as a warning, on one process only."""
    sys.stderr.write(f"warning: {where}: {', '.join(older)}\n" if older and is_first() else "")


def make_options(*sources: Mapping[str, Any]) -> TrainOptions:
    """Return the options that several sources (file, flags, ...) give; a later source wins, mappings are merged."""
    given: dict[str, Any] = {}
    for source in sources:
        for key, value in source.items():
            is_part = isinstance(value, Mapping) and key in given
            given[key] = {**given[key], **value} if is_part else value
    if not given.get("model"):
        hint = "name a folder or a Hub id: slapo-zoo train MODEL, or `model:` in the file"
        raise ConfigError("train", "model", "no model was given", hint)
    if given.get("engine") == "deepspeed" and "zero_stage" in (given.get("load") or {}):
        _warn("train", ["zero_stage of engine: deepspeed is called deepspeed: {zero_optimization: {stage: N}} now"])  # fmt: skip
        stage = {"stage": given["load"]["zero_stage"]}
        given["load"] = {k: v for k, v in given["load"].items() if k != "zero_stage"}
        given["deepspeed"] = {"zero_optimization": stage, **given.get("deepspeed", {})}
    return TrainOptions(**given)


def as_yaml(options: TrainOptions) -> str:
    """Return all options as the text of a YAML file for `--config`."""
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(options).items()}
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


def changes(options: TrainOptions) -> str:
    """Return, as YAML text, the options whose values differ from their defaults."""
    whole, usual = (yaml.safe_load(as_yaml(each)) for each in (options, TrainOptions("")))
    given = {key: value for key, value in whole.items() if value != usual[key]}
    return yaml.safe_dump(given, sort_keys=False, allow_unicode=True)


def _value(key: str, value: Any, where: str) -> Any:
    """Return `value` converted to the type of option `key`; raise ConfigError, which names the file
    or flag `where`, if the value is illegal.
    """
    known = KINDS | PASSED
    if key not in known:
        for names, why in REFUSED.items():
            if key.startswith(names):
                raise ConfigError(where, key, f"this option is refused: {why[0]}", why[1])
        near = difflib.get_close_matches(key, [*known, *ELSEWHERE], 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
        hint = f"use {ELSEWHERE[near[0]]}" if near and near[0] in ELSEWHERE else hint
        raise ConfigError(where, key, "no option has this name", hint)
    kinds = get_args(known[key]) if isinstance(known[key], types.UnionType) else (known[key],)
    problem = f"found {value!r:.60}, expected {' or '.join(READERS[kind][1] for kind in kinds)}"
    for kind in kinds:
        with suppress(ValueError, TypeError):
            read = READERS[kind][0](value)
            problem = _out_of_bounds(key, read)
            if problem is None:
                return os.path.expanduser(read) if key in PATHS and read else read
            break
    default = getattr(TrainOptions(""), key, None)
    hint = f"correct the value; the default is {default!r}" if default not in (None, "") else f"correct the value of {key}, which means: {described().get(key, 'as in TrainingArguments')}"
    raise ConfigError(where, key, str(problem), hint)


def _out_of_bounds(key: str, value: Any) -> str | None:
    """Return what is wrong with `value` for option `key`, as text for an error; None if the value is legal."""
    if value is None:
        return None
    if value == "":
        return "found an empty text; write a text, or leave the key out"
    if isinstance(value, float) and not math.isfinite(value):
        return f"found {value}, expected a finite number"
    if key in LEAST and value < LEAST[key]:
        return f"found {value!r}, expected at least {LEAST[key]}"
    if key in BELOW and value >= BELOW[key]:
        return f"found {value!r}, expected less than {BELOW[key]}"
    if key in ONE_OF and value not in ONE_OF[key]:
        return f"found {value!r}, expected one of {', '.join(ONE_OF[key])}"
    return None


def _is(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError  # `_value` says what was expected
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError
    return float(value)


def _integer(value: Any) -> int:
    if _number(value) % 1:
        raise ValueError
    return int(_number(value))


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(_is(str, one) for one in ([value] if isinstance(value, str) else value))


def _named(value: Any, kind: type = object) -> dict[str, Any]:
    return {_is(str, name): _is(kind, held) for name, held in _is(Mapping, value).items()}


def _sizes(value: Any) -> dict[str, int]:
    """Return {mesh dim: size} from a mapping, or from a text such as "tp=4,dp=2"; ValueError or TypeError for others."""
    if isinstance(value, str):
        value = dict(part.split("=") for part in value.replace(" ", "").split(","))
    return {name: _integer(size) for name, size in _named(value).items()}


# type of a key --> what reads a value as that type or raises ValueError, and what it is called
READERS: dict[Any, tuple[Callable[[Any], Any], str]] = {
    str: (lambda value: _is(str, value), "a text"), bool: (lambda value: _is(bool, value), "true or false"),
    int: (_integer, "an integer"), float: (_number, "a number"), tuple[str, ...]: (_texts, "a list of texts"),
    Mapping[str, Any]: (_named, "a mapping of names"), type(None): (lambda value: _is(type(None), value), "nothing"),
    Mapping[str, int]: (_sizes, "sizes, e.g. {tp: 4, dp: 2} or tp=4,dp=2"),
    Mapping[str, str]: (lambda value: _named(value, str), "a mapping of names"),
}  # fmt: skip
KINDS = get_type_hints(TrainOptions)
