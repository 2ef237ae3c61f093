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
    """Hook those terms of a `train_step` loss that are computed from weights alone, not from the model's output
    (L2-SP). Each rank has their gradient in full, so a hook divides it by the number of ranks that sum it later. Raises
    MeshError for a term, such as a norm, of a sharded weight that is no sum over elements, and with pp > 1 for a weight
    that only one stage has.

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
    """Return the factor for the gradient of a loss term computed from the weight `p` alone, which each rank has in
    full, so that later sums count it once: (ZeRO shards of `p`, as only ranks with the same shard add theirs) / (tp
    ranks that sum gradients of `p`, as its TensorPlan `row` says; `row` is None if none do).
    """
    divided = runtime.schedule.state.forward.tokens_divided
    factor = float(row.row_shards) if row and rows_of(p) else 1.0
    for one in row.sums(divided, PARTIAL, REPLICAS) if row else ():
        factor /= group_size(runtime.group(one))
    return factor


def _scaled(index: int, factor: float, grads: Any, _outputs: Any) -> Any:
    return tuple(g * factor if i == index and g is not None else g for i, g in enumerate(grads))


def _of_weights_alone(loss: Tensor, began: int) -> set[Any]:
    """Return the autograd nodes that compute scalar terms of `loss` from parameters alone, e.g. `p.square().sum()`: all
    nodes from the parameter to the scalar. Only nodes with a sequence number above `began` are searched.
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
    """Return True if the results of an autograd node (mean, norm, max, softmax, matmul, ..., by its name) on the shards
    of a weight do not add up to its result on the unsharded weight.
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
    """Recorder of the gradients that parameters get through the model's output in a user's own loop. Only these are
    summed over tp: the rest comes from loss terms computed from weights alone (L2-SP), which each rank has in full.
    """

    def __init__(self) -> None:
        self.found: dict[int, list[Tensor]] = {}

    def note(self, output: Any, wanted: set[int]) -> None:
        """Register hooks on the autograd graph of the model's `output` which, in its backward, append to `found[id(p)]`
        the gradient of each use in the model of a parameter p with id(p) in `wanted`.
        """
        for node, index, p in _leaves(reached(nodes_of(output)) if wanted else ()):
            if id(p) in wanted:
                node.register_hook(partial(self._came, id(p), index))

    def _came(self, key: int, index: int, grads: Any, _outputs: Any) -> None:
        if grads[index] is not None:
            self.found.setdefault(key, []).append(grads[index])

    def split(self, parameter: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        """Split `grad`, this rank's gradient of a parameter, into (the recorded part, which came through the model's
        output, the rest). The rest, from loss terms computed from weights alone, is None if there is none.
        """
        came = self.found.pop(id(parameter), [grad])
        own = came[0] if len(came) == 1 else sum(came[1:], came[0])
        return own, None if own.data_ptr() == grad.data_ptr() else grad - own
