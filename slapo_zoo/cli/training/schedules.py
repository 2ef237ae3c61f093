"""Learning-rate schedules, and groups of parameters with and without weight decay."""

from collections.abc import Iterable
from typing import Any

import torch

from slapo_zoo.cli.training.options import ConfigError, TrainOptions

DEFAULT_LR = 1e-4


def base_lr(options: TrainOptions) -> float:
    """Return the base learning rate, which the schedule multiplies by a factor per step."""
    return DEFAULT_LR if options.learning_rate is None else options.learning_rate


def make_schedule(options: TrainOptions, done: int = 0) -> Any:
    """Return the learning-rate schedule of a run: a LambdaLR made by `transformers.get_scheduler`.

    It depends on the step alone, so a resumed run needs no saved state. Its optimizer is a dummy,
    because an engine may wrap the real optimizer or shard it over ranks.

    Args:
        options: options of the run.
        done: number of steps already done.
    """
    from transformers import get_scheduler

    name = _with_warm_up(options.lr_scheduler_type, options.warmup_steps)
    alone = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=base_lr(options))
    arguments: dict[str, Any] = {"scheduler_specific_kwargs": dict(options.lr_scheduler_kwargs)}
    try:
        made: Any = get_scheduler(name, alone, options.warmup_steps, options.max_steps, **arguments)
    except (ValueError, TypeError) as error:
        problem = f"transformers.get_scheduler: {error}"
        hint = "choose e.g. constant, linear, cosine; its arguments go into lr_scheduler_kwargs"
        raise ConfigError("train", f"lr_scheduler_type={name}", problem, hint) from error
    if not hasattr(made, "lr_lambdas"):
        problem = "this schedule depends on more than the number of the step"
        hint = "choose one that does not: constant, linear, cosine, inverse_sqrt, ..."
        raise ConfigError("train", f"lr_scheduler_type={name}", problem, hint)
    made.load_state_dict({**made.state_dict(), "last_epoch": done - 1})
    alone.step()
    made.step()
    return made


def _with_warm_up(name: str, warmup_steps: int) -> str:
    """Return the name of the scheduler that applies a warm-up, since "constant" of transformers ignores it."""
    return "constant_with_warmup" if name == "constant" and warmup_steps else name


def parameter_groups(parameters: Iterable[Any], weight_decay: float) -> list[dict[str, Any]]:
    """Return two optimizer groups: matrices with weight decay, and vectors (biases, norms) without."""
    held = list(parameters)
    matrices = [p for p in held if p.ndim >= 2]
    vectors = [p for p in held if p.ndim < 2]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
