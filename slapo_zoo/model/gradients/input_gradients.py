"""Gradients of tensors outside a model: a soft prompt in `inputs_embeds`, a head of the user's in a loss.

Each rank computes such inputs, but only some pipeline stages read them. In `train_step` and in a user's own loop the
gradient of the inputs is summed over the stages, and the gradient of the parameters from which they are computed is
averaged over dp. In `train_step` the same happens to the parameters of a head that `loss_fn` applies. A leaf tensor
that is no `nn.Parameter` (a perturbation of some rows) gets the gradient of this rank's rows only.
"""

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from slapo_zoo.errors import SlapoError
from slapo_zoo.model.gradients.batch_check import check_trained_inputs
from slapo_zoo.model.gradients.of_models import place_of, runtime_of
from slapo_zoo.parallel.collectives import all_reduce_
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.thread_sums import runs_a_rank


class InputGradients:
    """Tensors outside a model that get gradients in a step: batch entries, and parameters that batch or loss use.

    With pipeline stages, detached copies replace the entries in the batch.

    Args:
        mesh: mesh of all ranks.
        tensors: the batch, name --> tensor; with pp > 1 entries that require a gradient are replaced in this dict.
        known: trained parameter outside the model that an earlier step has found --> its number, in order of first use.
        loss_fn: the user's loss function or None; if it is an nn.Module, its parameters get gradients too.
        scale: factor by which the engine multiplies a loss before its backward.
    """

    def __init__(
        self, mesh: Mesh, tensors: dict[str, Tensor], known: Any, loss_fn: Any, scale: float
    ):
        self.mesh, self.known, self.loss_fn, self.scale = mesh, known, loss_fn, scale
        self.given = {name: x for name, x in tensors.items() if x.requires_grad}
        self.beyond = trained_inputs(mesh, self.given, known)
        held = self.given if mesh.pp > 1 else {}
        self.leaves = {name: x.detach().requires_grad_() for name, x in held.items()}
        tensors.update(self.leaves)
        self.before = {id(p): p.grad for p in self.beyond}
        self.in_loss: list[nn.Parameter] = []
        if isinstance(loss_fn, nn.Module):
            own = (p for p in loss_fn.parameters() if p.requires_grad and runtime_of(p) is None)
            self._register([p for p in own if id(p) not in self.before])

    def add_from_loss(self, loss: Tensor, output: Any) -> None:
        """Register the trained parameters outside the model (e.g. of a head) that the user's loss function read to
        compute `loss` from `output`, so that they get gradients. With pp > 1 SlapoError, unless they belong to
        `self.loss_fn`, an nn.Module, or the batch was computed from them.
        """
        if self.loss_fn is None or self.mesh.world_size == 1:
            return
        known = {id(p) for p in (*self.beyond, *self.in_loss)}
        found = _made_of([loss], nodes_of(output), with_added=self.mesh.pp > 1)
        new = [p for p in found if id(p) not in known]
        if new and self.mesh.pp > 1:
            shapes = ", ".join(str(list(p.shape)) for p in new[:3])
            problem = f"the loss uses trained parameters {shapes} that only the last of pp={self.mesh.pp} stages sees"
            hint = "pass as loss_fn= an nn.Module, outside of the model, that holds these parameters on all ranks"
            raise SlapoError("train_step", "loss_fn", problem, hint)
        self._register(new)

    def held(self) -> list[Tensor]:
        """Return the tensors outside the model that get gradients: the parameters that the user's loss reads, and for
        the batch its detached entries if pp > 1, else the parameters from which it was computed.
        """
        return [*(self.leaves.values() or self.beyond), *self.in_loss]

    def _register(self, new: list[nn.Parameter]) -> None:
        require_equal(self.mesh, new, self.known)
        self.before |= {id(p): p.grad for p in new}
        self.in_loss += new
        for p in new:
            p.grad = None

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Context of a training step; at its end the gradients of parameters outside the model are averaged over dp."""
        for p in self.beyond:
            p.grad = None
        try:
            yield
        except BaseException:
            for p in (*self.in_loss, *self.beyond):
                p.grad = self.before[id(p)]
            raise
        for leaf in self.leaves.values():
            leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            all_reduce_(leaf.grad, self.mesh.group("pp"))
        if self.leaves:
            grads = [leaf.grad for leaf in self.leaves.values()]
            torch.autograd.backward([self.given[name] for name in self.leaves], grads)
        for i, p in enumerate((*self.in_loss, *self.beyond)):
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            if i < len(self.in_loss):  # only the last stage computes it
                all_reduce_(grad, self.mesh.group("pp"))
            all_reduce_(grad.mul_(1.0 / self.scale), self.mesh.group("loss"))
            old = self.before[id(p)]
            p.grad = grad if old is None else old.add_(grad)


def trained_inputs(mesh: Mesh, batch: Any, known: MutableMapping) -> list[nn.Parameter]:
    """Return all trainable parameters in a batch's autograd graph that belong to no scheduled model (a soft prompt).

    Args:
        mesh: mesh of all ranks, which compare the values of new parameters; unequal ones raise MeshError.
        batch: tensors, also in containers and caches of transformers.
        known: {parameter met before: its number, in order of first use}; new ones are added.
    """
    asking = list(_requiring_grad(batch))
    found = _made_of(asking) if asking else []
    require_equal(mesh, found, known)
    return found


def require_equal(mesh: Mesh, parameters: Iterable[nn.Parameter], known: MutableMapping) -> None:
    """Raise MeshError on all ranks if one of `parameters` that is new has other values on another rank (by a hash of
    some values); else add it to `known`, {parameter: number, in order of first use}. SlapoError at once for a new one
    with `exact=`, which lets one process run several virtual ranks, one thread each: all would add to the same `.grad`.
    """
    if new := [p for p in parameters if p not in known]:
        if runs_a_rank():
            problem = f"several virtual ranks of a process would add to the same .grad of {[*new[0].shape]}, which is outside the model"
            hint = "leave exact= out; or, with virtual dp=1, compute a loss of model(**batch).logits by hand"
            raise SlapoError("exact=", "trained parameters of loss_fn or inputs", problem, hint)
        check_trained_inputs(mesh, new)
        for p in new:
            known[p] = len(known)


def _requiring_grad(value: Any) -> Iterator[Tensor]:
    """Yield the tensors with `requires_grad` in a value: in nested containers, and in caches of transformers."""
    for x in tree_leaves(value):
        if isinstance(x, Tensor):
            if x.requires_grad:
                yield x
        elif type(x).__module__ == "transformers.cache_utils":  # a trained prefix of keys, values
            yield from _requiring_grad(list(vars(x).values()))


def nodes_of(output: Any) -> list[Any]:
    """Return the `grad_fn` of each tensor in a model's output: the autograd nodes where a backward enters the model."""
    leaves = tree_leaves(dict(output) if hasattr(output, "keys") else output)
    # logits that are computed on demand have their inputs as `rows`
    tensors = [each for x in leaves for each in (x, getattr(x, "rows", None))]
    return [x.grad_fn for x in tensors if isinstance(x, Tensor) and x.grad_fn is not None]


def reached(nodes: Iterable[Any], goes_on: Callable[[Any], bool] = bool) -> list[Any]:
    """Return the autograd nodes `nodes` and all that a backward reaches from them, breadth first. The search stops
    before a node with `goes_on(node)` False; by default it never does.
    """
    seen = dict.fromkeys(nodes)
    for node in (waiting := list(seen)):
        new = [e for e, _ in node.next_functions if e is not None and e not in seen and goes_on(e)]
        seen.update(dict.fromkeys(new))
        waiting += dict.fromkeys(new)
    return waiting


def _made_of(
    tensors: Iterable[Tensor], ends: Iterable[Any] = (), with_added: bool = False
) -> list[nn.Parameter]:
    """Return the parameters, of no scheduled model, from which `tensors` are computed, as their autograd graph says.

    With `with_added` also return parameters that the user added to a scheduled model after its load. The search
    stops before the autograd nodes `ends`.
    """
    ends = {None, *ends}
    nodes = reached((x.grad_fn for x in tensors if x.grad_fn not in ends), lambda e: e not in ends)
    leaves = [getattr(node, "variable", None) for node in nodes]
    found = [(p, place_of(p)) for p in leaves if isinstance(p, nn.Parameter)]
    return [p for p, at in found if at is None or (with_added and at[0].of(at[1]) is None)]
