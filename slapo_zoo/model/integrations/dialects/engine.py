"""Base of all engines: one call per optimizer step, and checkpoints that every engine reads."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

from torch import Tensor

from slapo_zoo.errors import SlapoError
from slapo_zoo.model.checkpoints.resume import load_checkpoint
from slapo_zoo.model.checkpoints.training_checkpoint import Resumed, save_checkpoint

OF_MODEL = (
    "config", "mesh", "schedule", "ledger", "parameters", "named_parameters", "train_step",
    "clip_grad_norm_", "consolidated_state_dict", "save_pretrained", "push_to_hub", "generate",
)  # fmt: skip


class TargetEngine:
    """Scheduled model in an engine. An attribute that this class lacks is looked up in the engine, then in the model.

    Methods of a scheduled model, and its parameters under their HuggingFace names, always come from the model, not
    from the engine's wrapper.

    Args:
        model: a scheduled model.
        native: the engine's own object around the model.
        optimizer: the optimizer that the engine steps.
        clip: largest global gradient norm, to which `update` scales gradients; 0 does not clip.
    """

    def __init__(self, model: Any, native: Any, optimizer: Any, clip: float = 0.0):
        self.model, self.native, self.optimizer, self.clip = model, native, optimizer, clip
        self._norm = float("nan")

    def update(
        self, batch: Mapping[str, Any], micro_batches: int | None = None, loss_fn: Any = None
    ) -> Tensor:
        """Run one optimizer step: forward, backward, clipping, step, zero_grad.

        Args:
            batch: this dp rank's rows with labels; ranks that differ only in tp, pp or cp pass the same rows.
            micro_batches: number of equal parts of the rows; None takes the model's default.
            loss_fn: a loss of your own, (output, batch) --> scalar; only with target="torch". None: the model's.

        Returns:
            the mean loss over the batch of all dp ranks, a scalar on every rank.
        """
        loss = self.model.train_step(batch, micro_batches, loss_fn=loss_fn)
        self._norm = float(self.model.clip_grad_norm_(self.clip or float("inf")))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    @property
    def grad_norm(self) -> float:
        """Return the global gradient norm of the last `update`; nan where the engine does not report it."""
        return self._norm

    def save_checkpoint(self, folder: Any, **options: Any) -> None:
        """Save in `folder` a checkpoint from which any engine on any mesh resumes. `options` are arguments of
        `slapo_zoo.save_checkpoint`: scheduler, step, data_position, extra, ...
        """
        save_checkpoint(self.model, folder, self.optimizer, **options)

    def load_checkpoint(self, folder: Any, scheduler: Any = None) -> Resumed:
        """Resume from the checkpoint in `folder`, saved by any engine on any mesh; return its step, data position and
        extras. `scheduler` is a learning-rate scheduler of the saved class, or None.
        """
        return load_checkpoint(self.model, folder, self.optimizer, scheduler)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.native(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        native, model = self.__dict__["native"], self.__dict__["model"]
        if name in OF_MODEL:
            return getattr(model, name)
        try:
            return getattr(native, name)
        except AttributeError:
            if not hasattr(model, name):
                raise
        return getattr(model, name)


def is_scheduled(sch: Any) -> TypeGuard[Any]:
    """Return whether `sch` is a model that AutoScheduledModel loaded (also with `exact=`), not a schedule or a module."""
    return is_exact(sch) or hasattr(sch, "_slapo")


def is_exact(model: Any) -> bool:
    """Return whether `model` was loaded with `exact=`: its process runs several virtual ranks, one thread each."""
    return hasattr(type(model), "on_each_rank")


def require_scheduled(sch: Any, target: str) -> Any:
    """Return `sch` if it is a model of AutoScheduledModel; else raise SlapoError that names the engine `target`."""
    if not is_scheduled(sch):
        problem = f"found {type(sch).__name__}, expected a model of AutoScheduledModel"
        raise SlapoError(f"target={target!r}", "sch", problem, "load it by AutoScheduledModel")
    return sch


def made_optimizer(optimizer: Any, parameters: Iterable[Any]) -> Any:
    """Return `optimizer(parameters)` if `optimizer` is a function that makes one, else `optimizer` itself."""
    is_maker = callable(optimizer) and not hasattr(optimizer, "param_groups")
    return optimizer(parameters) if is_maker else optimizer
