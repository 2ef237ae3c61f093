"""Inputs that are trained: a soft prompt before `inputs_embeds`, or an encoder of one's own.

Every rank makes them, and one stage reads them: their gradient is summed over the stages, and what it
reaches beyond the model is averaged over dp.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from slapo_zoo.parallel.collectives import all_reduce_
from slapo_zoo.parallel.mesh import Mesh


class InputGradients:
    """The tensors of a batch that ask for a gradient; with stages, leaves take their place in it."""

    def __init__(self, mesh: Mesh, tensors: dict[str, Tensor], own: Iterable[Tensor]):
        self.mesh = mesh
        self.given = {name: x for name, x in tensors.items() if x.requires_grad}
        self.beyond = _made_of(self.given.values(), {id(p) for p in own}) if self.given else []
        held = self.given if mesh.pp > 1 else {}
        self.leaves = {name: x.detach().requires_grad_() for name, x in held.items()}
        tensors.update(self.leaves)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Around a step: parameters beyond the model get the mean over dp of their gradient."""
        before = [p.grad for p in self.beyond]
        for p in self.beyond:
            p.grad = None
        yield
        for leaf in self.leaves.values():
            leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            all_reduce_(leaf.grad, self.mesh.group("pp"))
        if self.leaves:
            grads = [leaf.grad for leaf in self.leaves.values()]
            torch.autograd.backward([self.given[name] for name in self.leaves], grads)
        for p, old in zip(self.beyond, before, strict=True):
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            all_reduce_(grad.mul_(1.0 / self.mesh.dp), self.mesh.group("dp"))
            p.grad = grad if old is None else old.add_(grad)


def _made_of(tensors: Iterable[Tensor], known: set[int]) -> list[Any]:
    """The parameters that tensors were made of, in the order in which their graph is walked."""
    found, waiting = {}, [x.grad_fn for x in tensors if x.grad_fn is not None]
    seen = set(waiting)
    for node in waiting:  # which grows
        if isinstance(leaf := getattr(node, "variable", None), Tensor) and id(leaf) not in known:
            found[id(leaf)] = leaf
        new = [each for each, _ in node.next_functions if each is not None and each not in seen]
        seen.update(new)
        waiting += dict.fromkeys(new)
    return list(found.values())
