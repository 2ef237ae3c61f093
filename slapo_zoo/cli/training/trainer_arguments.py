"""Arguments of Trainer that follow from the options of a run, the learning-rate schedule, and groups of parameters."""

from collections.abc import Iterable
from typing import Any

import torch
from transformers import TrainingArguments

from slapo_zoo.cli.training.options import ConfigError, TrainOptions

DEFAULT_LR = 1e-4
# options that Trainer has under the same name
SHARED = ("max_steps", "max_grad_norm", "seed", "eval_steps", "save_steps", "optim", "adam_beta1", "adam_beta2", "adam_epsilon")  # fmt: skip


def arguments_of(options: TrainOptions, device: str) -> TrainingArguments:
    """Return the TrainingArguments that follow from `options`: optimizer, logging, evaluation, saving. Precision, parallelism
    and accumulation keep their defaults, because the model and its engine handle them. `device` is the type of the
    model's device: ranks train on the CPU where there are fewer GPUs than ranks.

    ConfigError is raised for an entry of `trainer` that TrainingArguments refuses, e.g. tf32 on a CPU.
    """
    try:
        return TrainingArguments(
            output_dir=place_of_logs(options), report_to=[*options.report_to], use_cpu=device == "cpu",
            learning_rate=base_lr(options), **{name: getattr(options, name) for name in SHARED},
            logging_strategy="steps", logging_steps=1, logging_nan_inf_filter=False,
            eval_strategy="steps" if options.evaluates else "no",
            save_strategy="no" if options.checkpoint is None else "steps",
            disable_tqdm=True, log_level="error", log_level_replica="error", **options.trainer,
        )  # fmt: skip
    except (ValueError, TypeError) as error:
        problem = f"TrainingArguments: {str(error).partition(chr(10))[0]}"
        hint = "correct the entry of `trainer` that transformers refuses"
        raise ConfigError("train", f"trainer={dict(options.trainer)}", problem, hint) from error


def optimizer_of(options: TrainOptions, device: str) -> tuple[Any, dict[str, Any]]:
    """Return (class of the optimizer that the options name, its arguments); ConfigError for arguments that it refuses.
    `device` is the type of the model's device.
    """
    from transformers import Trainer

    arguments = arguments_of(options, device)
    try:
        kind, values = Trainer.get_optimizer_cls_and_kwargs(arguments)
        kind([torch.zeros(1)], **values)
    except ValueError as error:
        hint = "write e.g. momentum=0.9,nesterov=true"
        raise ConfigError("train", "optim_args", str(error), hint) from error
    return kind, values


def place_of_logs(options: TrainOptions) -> str:
    """Return the folder for files of trackers (TensorBoard, ...), beside the output folder, which a save replaces."""
    if not options.report_to:
        return "."  # nothing is written there
    run = options.output or options.checkpoint or options.best or "slapo-zoo"
    return options.logging_dir or f"{run.rstrip('/')}-logs"


def base_lr(options: TrainOptions) -> float:
    """Return the base learning rate, which the learning-rate schedule multiplies by a factor per step."""
    return DEFAULT_LR if options.learning_rate is None else options.learning_rate


def make_schedule(options: TrainOptions, done: int = 0) -> Any:
    """Return the learning-rate schedule of a run: a LambdaLR made by `transformers.get_scheduler`.

    The learning rate depends on the step alone, so a resumed run needs no saved state. The optimizer of the LambdaLR is
    a dummy, because an engine may wrap the real optimizer or shard it over ranks.

    Args:
        options: options of the run.
        done: number of steps already done.
    """
    from transformers import get_scheduler

    name = options.lr_scheduler_type
    if name == "constant" and options.warmup_steps:  # "constant" of transformers ignores a warm-up
        name = "constant_with_warmup"
    alone = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=base_lr(options))
    arguments: dict[str, Any] = {"scheduler_specific_kwargs": dict(options.lr_scheduler_kwargs)}
    try:
        made: Any = get_scheduler(name, alone, options.warmup_steps, options.max_steps, **arguments)
    except (ValueError, TypeError) as error:
        problem = f"transformers.get_scheduler: {error}"
        hint = "choose e.g. constant, linear, cosine; its arguments go into lr_scheduler_kwargs"
        raise ConfigError("train", f"lr_scheduler_type={name}", problem, hint) from error
    if not hasattr(made, "lr_lambdas"):
        problem = "the learning rate would depend on more than the step number, e.g. on the loss"
        hint = "choose e.g. constant, linear, cosine or inverse_sqrt"
        raise ConfigError("train", f"lr_scheduler_type={name}", problem, hint)
    made.load_state_dict({**made.state_dict(), "last_epoch": done - 1})
    alone.step()
    made.step()
    return made


def parameter_groups(parameters: Iterable[Any], weight_decay: float) -> list[dict[str, Any]]:
    """Return two optimizer groups: matrices with weight decay, and vectors (biases, norms) without."""
    held = list(parameters)
    matrices = [p for p in held if p.ndim >= 2]
    vectors = [p for p in held if p.ndim < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]  # fmt: skip
