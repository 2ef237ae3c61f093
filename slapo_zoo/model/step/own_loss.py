"""The user's own loss in `train_step`: which arguments it gets, and how the loss of a micro-batch is weighted in the step."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slapo_zoo.errors import SlapoError
from slapo_zoo.kernels.loss.vocab_logits import VocabLogits
from slapo_zoo.model.gradients.weight_terms import count_once, newest
from slapo_zoo.parallel.token_cut import cutting
from slapo_zoo.pipeline.pipeline_runtime import FOR_LOSS

OPTIONS = {"output_hidden_states", "output_attentions", "shift_labels", "num_items_in_batch"}


class OwnLoss:
    """Callable that runs the user's loss_fn(output, batch) and scales it to a micro-batch's share of the step's loss.

    Args:
        loss_fn: (output, batch) --> loss: the mean over the rows that it is given; if the step got `targets=`, the sum.
        divisor: number of micro-batches of all dp ranks; if the step got `targets=`, the total number of targets.
        runtime: state of the model: its schedule, plan and gradient hooks.
        cut: which tokens each cp rank computes; None without cp.
    """

    def __init__(
        self, loss_fn: Callable[[Any, dict[str, Any]], Tensor], divisor: float, runtime: Any,
        cut: Any = None,
    ):  # fmt: skip
        self.loss_fn, self.divisor, self.runtime, self.cut = loss_fn, divisor, runtime, cut

    def __call__(self, output: Any, part: Mapping[str, Any]) -> Tensor:
        """Return the value of the user's loss_fn, divided by `divisor`. `output` is the model's output, `part` the
        micro-batch. SlapoError if the value is no scalar or has no gradient.
        """
        given, output, began = of_loss(part, self.cut), whole_output(output), newest()
        with cutting(self.runtime.schedule.state.random, None):  # for a teacher that it calls
            loss = self.loss_fn(output, given)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            found = type(loss).__name__
            if isinstance(loss, Tensor):
                one = loss.numel() == 1
                shape = f"a tensor of shape {tuple(loss.shape)}"
                found = "a tensor that requires no gradient" if one else shape
            problem = f"returned {found}, expected a tensor of one element with a gradient"
            hint = "compute the loss from the output that loss_fn gets, and return the mean over its rows"
            raise SlapoError("train_step", "loss_fn", problem, hint)
        wide = torch.promote_types(loss.dtype, torch.float32)  # a gradient of float64 stays one
        loss = loss.reshape(()).to(wide) / self.divisor
        count_once(self.runtime, loss, began)
        return loss


def whole_output(output: Any) -> Any:
    """Return a model's output, in which logits sharded over the vocabulary are replaced by all-gathered ones."""
    for name in list(output) if hasattr(output, "keys") else ():
        if isinstance(output[name], VocabLogits):
            output[name] = output[name].gathered()
    return output


def for_loss_alone(forward: Callable[..., Any], batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the batch with the prefix FOR_LOSS at the names of entries that `forward` does not take. The user's
    loss_fn alone gets these entries.
    """
    known = inspect.signature(forward).parameters.keys() | OPTIONS
    return {name if name in known else FOR_LOSS + name: value for name, value in batch.items()}


def of_model(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a batch for the model's forward: all but those for loss_fn alone, which begin with FOR_LOSS."""
    return {name: value for name, value in part.items() if not name.startswith(FOR_LOSS)}


def of_loss(part: Mapping[str, Any], cut: Any) -> dict[str, Any]:
    """Return the entries of micro-batch `part` for the user's loss_fn, without the prefix FOR_LOSS in names. If tokens
    are sharded over cp (`cut` is not None), only those that had the prefix, which have all tokens.
    """
    found = {name: x for name, x in part.items() if cut is None or name.startswith(FOR_LOSS)}
    return {name.removeprefix(FOR_LOSS): x for name, x in found.items()}


def divisor_of(targets: Sequence[Any] | None, totals: Sequence[float], parts: int) -> float:
    """Return the number by which loss_fn's value on a micro-batch is divided to get its share of the step's loss:
    `parts` if `targets` is None, else totals[0].

    Args:
        targets: what the user passed as `targets=`: [number of labels on this rank over which loss_fn sums]; None if
            loss_fn returns a mean. SlapoError if it is a list of another length.
        totals: [that number, summed over all dp ranks].
        parts: number of micro-batches of all dp ranks.
    """
    if targets is None:
        return float(parts)
    if len(targets) != 1:
        problem = f"found {len(targets)} numbers, expected one, as loss_fn is one loss term"
        hint = "pass targets=[n], the number of targets over which loss_fn sums"
        raise SlapoError("train_step", "targets", problem, hint)
    return totals[0]


def require_gradients() -> None:
    """Raise SlapoError where gradients are switched off, in `torch.no_grad` or `inference_mode`."""
    if not torch.is_grad_enabled():
        problem = "gradients are switched off (torch.no_grad or inference_mode)"
        hint = "call train_step outside of them; to evaluate, call model(**batch)"
        raise SlapoError("train_step", "backward", problem, hint)
