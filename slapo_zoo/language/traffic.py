"""Which collectives one training step causes, noted where a dry run would send them.

A dry run runs the scheduled model on fake tensors, backward included, with groups that only change
shapes. Whatever calls a collective notes it, so nothing is predicted from a table: recomputation,
the parallel loss and a third party's ops are counted as they run.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from slapo_zoo.parallel.mesh import ShapeOnlyGroup


class Transfer(NamedTuple):
    """One collective that one rank takes part in: kind, bytes, module and phase.

    Args:
        kind: all_reduce, all_gather, reduce_scatter, all_to_all or send.
        mesh_dim: of the ranks that take part.
        phase: "forward", "backward" (a recomputed forward too) or "after backward".
        bytes: of the whole tensor that it sums, makes or divides.
        path: of the module that causes it.
        directive: that put it there.
    """

    kind: str
    mesh_dim: str
    phase: str
    bytes: int
    path: str = ""
    directive: str = ""


class Traffic:
    """The transfers of one dry-run step, in order."""

    def __init__(self) -> None:
        self.transfers: list[Transfer] = []
        self.losses: list[Tensor] = []

    def listen(self, group: Any, mesh_dim: str, path: str, directive: object) -> Any:
        """The group, which notes here what it is asked for; a real group stays as it is."""
        if not isinstance(group, ShapeOnlyGroup):
            return group

        def note(kind: str, nbytes: int) -> None:
            in_backward = torch._C._current_graph_task_id() != -1
            phase = "backward" if in_backward else "forward"
            self.transfers.append(Transfer(kind, mesh_dim, phase, nbytes, path, str(directive)))

        return group._replace(note=note)

    def backward(self, output: Any) -> None:
        """The backward of a dry-run forward: from the losses noted, and all else in its output."""
        leaves: Iterable[Any] = tree_leaves(dict(output) if hasattr(output, "keys") else output)
        found = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
        terms = [x.float().sum() for x in (*self.losses, *found)]
        if terms:
            torch.stack(terms).sum().backward()
