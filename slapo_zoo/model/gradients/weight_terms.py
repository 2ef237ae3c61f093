"""Loss terms that depend on weights alone (L2-SP, EWC, FedProx): each rank has their gradient in full, without a sum.

rewrite:  loss = f(output) + g(p)  -->  over tp the gradient of f is summed, that of g is not

In `train_step` such terms are found in the loss of `loss_fn`, and their gradient is divided by the number of ranks that
will sum it. In a user's own loop the gradient of p through the model's output is recorded; the rest is that of g.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slapo_zoo.errors import MeshError
from slapo_zoo.model.gradients.input_gradients import nodes_of, reached
from slapo_zoo.model.gradients.of_models import runtime_of
from slapo_zoo.parallel.collectives import group_size
from slapo_zoo.parallel.local_tensors import is_divided, rows_of
from slapo_zoo.parallel.rank_plan import PARTIAL, REPLICAS, TIED

Place = tuple[Any, int, Any]  # a node, which of its edges leads to a parameter, and the parameter
# Autograd nodes (without "Backward"): ADDING is linear on scalars, MIXING reads several elements of a tensor.
ADDING = {"Add", "Sub", "Mul", "Div", "Neg", "Sum", "Dot", "Stack", "Cat", "View", "Select", "Index", "Unbind", "Expand",
          "Squeeze", "Unsqueeze", "ToCopy", "Clone", "Alias"}  # fmt: skip
MIXING = ("Sum", "Mean", "Linalg", "Norm", "ForeachNorm", "Mm", "Bmm", "Mv", "Max", "Min", "Amax", "Amin", "Std", "Var",
          "Softmax", "LogSoftmax", "Logsumexp", "Cum", "Sort", "Topk")  # fmt: skip


def newest() -> int:
    """Return autograd's sequence number of the newest node of this thread; nodes made later have larger numbers."""
    return torch.zeros((), requires_grad=True).clone().grad_fn._sequence_nr()  # pyright: ignore[reportOptionalMemberAccess]


def count_once(runtime: Any, loss: Tensor, began: int) -> None:
    """Hook the terms of a `train_step` loss that depend on weights alone (L2-SP): a hook multiplies the term's
    gradient by `_factor`, so that the later sum of gradients over ranks counts the term once.
    Raises MeshError for a term that needs an unsharded weight where the weight is sharded, and with pp > 1 for a
    weight that only one stage has.

    Args:
        runtime: state of the model, with its mesh, plan (sharding and gradient sums of each tensor) and hooks.
        loss: the loss of one micro-batch.
        began: torch's sequence number of the newest autograd node before `loss_fn` ran; only newer nodes are searched.
    """
    mesh = runtime.schedule.mesh
    if mesh.world_size == 1:
        return
    names = {id(p): name for name, p in runtime.calls.named}
    alone = _of_weights_alone(loss, began)
    mixed = next((node.name() for node in alone if _mixes(node)), "")
    for node, index, p in (place for place in _leaves(alone) if runtime_of(place[2])):
        name = names.get(id(p), "")
        row = runtime.plan.of(name)
        if mixed and (is_divided(p) or runtime.plan.sharded(name)):
            problem = f"a loss term computes {mixed} on this rank's shard of {name}, but needs the unsharded weight"
            hint = "write a sum over elements, e.g. p.square().sum() / elements of the unsharded weight"
            raise MeshError("train_step", "loss_fn", problem, hint)
        if mesh.pp > 1 and not (row and row.sums(True, TIED)):
            problem = f"the loss has a term in the weight {name}, which other stages do not hold"
            hint = "leave the term out of loss_fn; after train_step add its gradient to each p.grad"
            raise MeshError("train_step", "loss_fn", problem, hint)
        factor = _factor(runtime, row, p)
        if factor != 1:
            node.register_hook(partial(_scaled, index, factor))


def _factor(runtime: Any, row: Any, p: Any) -> float:
    """Return the factor for the gradient of a loss term in the weight `p` alone, which each rank computes in full, so
    that the later sum over ranks counts it once: 1 / (number of tp ranks that sum gradients of `p`) * (ZeRO shards of
    `p`). `row` is the TensorPlan of `p`, which lists these ranks, or None.
    """
    divided = runtime.schedule.state.forward.tokens_divided
    factor = float(row.row_shards) if row and rows_of(p) else 1.0
    for one in row.sums(divided, PARTIAL, REPLICAS) if row else ():
        factor /= group_size(runtime.group(one))
    return factor


def _scaled(index: int, factor: float, grads: Any, _outputs: Any) -> Any:
    return tuple(g * factor if i == index and g is not None else g for i, g in enumerate(grads))


def _of_weights_alone(loss: Tensor, began: int) -> set[Any]:
    """Return the autograd nodes of scalar terms of `loss` in parameters alone, e.g. `p.square().sum()`: each term's
    last node, and those from there to the parameters. Nodes up to sequence number `began` are not searched.
    """
    alone: set[Any] = set()
    made = reached(
        [loss.grad_fn], lambda e: not hasattr(e, "variable") and e._sequence_nr() > began
    )
    for node in sorted(made, key=lambda each: each._sequence_nr()):  # inputs come first
        if all(e is None or e in alone or hasattr(e, "variable") for e, _ in node.next_functions):
            alone.add(node)
    tops = [node for node in alone if torch.Size(node._input_metadata[0].shape).numel() == 1]
    return set(reached(tops, lambda e: e in alone))


def _mixes(node: Any) -> bool:
    """Return True for an autograd node of a mean, norm, ...: its results on the shards of a weight do not add up to its
    result on the unsharded weight.
    """
    name = node.name().partition("Backward")[0]
    if hasattr(node, "_saved_reduction"):
        return node._saved_reduction == 1  # a mean
    if torch.Size(node._input_metadata[0].shape).numel() > 1:
        return name.startswith(MIXING)
    edges = sum(each is not None for each, _ in node.next_functions)
    return name not in ADDING or (name in ("Mul", "Div") and edges > 1)


def _leaves(nodes: Iterable[Any]) -> Iterator[Place]:
    for node in nodes:
        for index, (each, _) in enumerate(node.next_functions):
            if hasattr(each, "variable"):
                yield node, index, each.variable


class Uses:
    """Record of the part of each parameter's gradient that comes through the model's output, for loops of the user's own
    without `train_step`. The rest of the gradient is that of loss terms on weights (L2-SP).
    """

    def __init__(self) -> None:
        self.found: dict[int, list[Tensor]] = {}

    def note(self, output: Any, wanted: set[int]) -> None:
        """Register hooks on the graph of `output` that record, in its backward, the gradients of the parameters whose
        id() is in `wanted`: for each parameter a list with one gradient per use in the model.
        """
        for node, index, p in _leaves(reached(nodes_of(output)) if wanted else ()):
            if id(p) in wanted:
                node.register_hook(partial(self._came, id(p), index))

    def _came(self, key: int, index: int, grads: Any, _outputs: Any) -> None:
        if grads[index] is not None:
            self.found.setdefault(key, []).append(grads[index])

    def split(self, parameter: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        """Split the gradient `grad` of a parameter; return (part through the model's output, part of weight terms or None).

        Each rank has the second part in full, so only the first part is summed over ranks.
        """
        came = self.found.pop(id(parameter), [grad])
        own = came[0] if len(came) == 1 else sum(came[1:], came[0])
        return own, None if own.data_ptr() == grad.data_ptr() else grad - own
