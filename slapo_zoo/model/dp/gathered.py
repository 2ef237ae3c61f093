"""ZeRO's collectives: all-gather of parameters that dp ranks shard, reduce-scatter of their gradients."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slapo_zoo.parallel.begun import collective, explained
from slapo_zoo.parallel.compat import all_gather_single, new_group, reduce_scatter_single
from slapo_zoo.parallel.live_bytes import counted_as
from slapo_zoo.parallel.local_tensors import RowsOfRank
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.once import once


@dataclass
class Shards(RowsOfRank):
    """Sharding of parameters along axis 0 by ZeRO: process groups, ZeRO stage, and how gradients are reduced.

    Args:
        group: process group of the dp ranks that together hold one replica; each holds some rows of every parameter.
        copies: process group of the ranks that hold the same rows as this rank; None if no other rank does.
        stage: ZeRO stage: 1 reduces gradients after the last micro-batch, 2 after each; 3 is like 2, and
            gathers the parameters of a block only while it runs.
        averages: True if the backward averages gradients over all dp ranks, as in DDP; set when the user's own
            loop runs the backward, not `train_step`.
    """

    group: Any = None
    copies: Any = None
    stage: int = 3
    averages: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "Shards":
        """Return a copy of this object, with the same process groups, for a model that is copied."""
        return replace(self)

    @staticmethod
    def of(mesh: Mesh, size: int, stage: int) -> "Shards":
        """Create ZeRO's process groups, in a collective call of all ranks; return a Shards with those of this rank.

        Every `size` consecutive dp ranks hold one replica together; `stage` is the ZeRO stage, 1 to 3.
        """
        here, of_all = mesh.coord("loss"), mesh.size("loss")
        if size == of_all:
            return Shards(size, here, True, mesh.group("loss"), None, stage)
        group = copies = None
        for rank in mesh.ranks(loss=0):
            peers = mesh.seen_by(rank).peers("loss")
            for first in range(0, of_all, size):
                made = new_group(peers[first : first + size])
                group = made if mesh.rank in peers[first : first + size] else group
            for i in range(size):
                made = new_group(peers[i::size])
                copies = made if mesh.rank in peers[i::size] else copies
        return Shards(size, here % size, here < size, group, copies, stage)

    @property
    def ranks(self) -> int:
        """Return the number of dp ranks: ranks that hold one replica together, times the number of replicas."""
        return self.size * (1 if self.copies is None else dist.get_world_size(self.copies))

    def gather(self, parts: Sequence[Tensor], shapes: Sequence[Any], dtype: Any) -> list[Tensor]:
        """All-gather several tensors in one collective; return the gathered tensors in `dtype`.

        `parts` are this rank's rows of the tensors, `shapes` the shapes of the gathered tensors.
        """
        return self.finish(self.begin(parts, shapes, dtype), shapes)

    def begin(self, parts: Sequence[Tensor], shapes: Sequence[Any], dtype: Any) -> Any:
        """Start an all-gather of several tensors in `dtype`; return (work, receive buffer, send buffer) for `finish`.

        `parts` are this rank's rows of the tensors, `shapes` the shapes of the gathered tensors.
        """
        pairs = zip(parts, shapes, strict=True)
        flat = torch.cat([_padded(x.detach().to(dtype), self.rows(s)) for x, s in pairs])
        out = flat.new_empty(self.size * flat.numel())
        return collective(all_gather_single, out, flat, group=self.group, async_op=True), out, flat

    def finish(self, begun: Any, shapes: Sequence[Any]) -> list[Tensor]:
        """Wait for the all-gather `begun`, which `begin` returned; return the gathered tensors, of `shapes`."""
        work, out, _ = begun
        explained(work.wait)
        sizes = [self.rows(s) * _inner(s) for s in shapes]
        found = out.view(self.size, -1).split(sizes, 1)
        return [x.reshape(-1, *s[1:])[: s[0]] for x, s in zip(found, shapes, strict=True)]

    def scatter(
        self, grads: Sequence[Tensor | None], shapes: Sequence[Any], like: Tensor,
        average: bool = False,
    ) -> list[Any]:  # fmt: skip
        """Reduce-scatter gradients over `group`, the ranks that hold one replica; return this rank's rows (slice of
        axis 0, without padding) of each sum or, with `average`, of the average over all dp ranks.

        `grads` (of `shapes`, unsharded) may be None; a result is None if all ranks' are. `like` gives dtype and device.
        """
        sizes = [*(self.rows(s) * _inner(s) for s in shapes), len(grads)]
        flat = like.new_zeros(self.size, sum(sizes))
        *places, held = flat.split(sizes, 1)
        for grad, place, shape, is_there in zip(grads, places, shapes, held.unbind(1), strict=True):
            if grad is None:
                continue
            is_there.fill_(1.0)  # copying a list would make the host wait
            for r in range(self.size):
                rows = grad[r * self.rows(shape) : (r + 1) * self.rows(shape)].reshape(-1)
                place[r, : len(rows)].copy_(rows)
        out = flat.new_empty(flat.shape[1])
        collective(reduce_scatter_single, out, flat.reshape(-1), group=self.group)
        if average:
            out.mul_(1.0 / self.ranks)
            if self.copies is not None:
                collective(dist.all_reduce, out, group=self.copies)
        *sums, held = out.split(sizes)
        found: list[Any] = []
        for i, (grad, part, shape) in enumerate(zip(grads, sums, shapes, strict=True)):
            mine = self.mine(shape).count
            is_missing = grad is None and not held[i]
            found.append(None if is_missing else part.view(-1, *shape[1:])[:mine].clone())
        return found


def _inner(shape: Sequence[int]) -> int:
    return torch.Size(shape[1:]).numel()


def _padded(part: Tensor, rows: int) -> Tensor:
    missing = (rows - len(part)) * _inner(part.shape)
    return torch.cat([part.reshape(-1), part.new_zeros(missing)]) if missing else part.reshape(-1)


class Group:
    """Group of parameters, sharded by ZeRO, that one all-gather gathers.

    Args:
        shards: how the parameters are sharded: process groups, and the collectives that gather rows and sum gradients.
        parameters: (parameter with this rank's rows, shape before ZeRO) pairs of one dtype, all trained or all frozen.
        is_wide: True if modules read the parameters in the parameters' dtype (fp32), not in the model's compute dtype.
    """

    def __init__(
        self,
        shards: Shards,
        parameters: Sequence[tuple[nn.Parameter, tuple[int, ...]]],
        is_wide: bool,
    ):
        self.shards, self.is_wide = shards, is_wide
        self.parameters = [p for p, _ in parameters]
        self.shapes = [shape for _, shape in parameters]
        self._begun: tuple[Any, Tensor, Any] | None = None
        self._whole: list[Tensor] | None = None
        self.sums: list[Any] = [None] * len(parameters)  # unsharded gradients, in ZeRO-1

    def __getstate__(self) -> dict[str, Any]:
        """Return the group's attributes to pickle or copy, without gathered parameters and unreduced gradients."""
        return {**self.__dict__, "_begun": None, "_whole": None, "sums": [None] * len(self.sums)}

    def dtype_of(self, computes: torch.dtype | None) -> torch.dtype:
        """Return the dtype to gather in: `computes`, or the parameters' own if that is None or the group `is_wide`."""
        return self.parameters[0].dtype if self.is_wide or computes is None else computes

    def begin(self, dtype: torch.dtype) -> None:
        """Start the all-gather of the group's parameters in `dtype`, unless it has run or is running already."""
        if self._whole is None and self._begun is None:
            with counted_as("weights"):
                self._begun = self.shards.begin(self.parameters, self.shapes, dtype)

    def whole(self, dtype: torch.dtype) -> list[Tensor]:
        """Return the group's gathered parameters in `dtype`, without autograd; they stay in memory until `drop`."""
        if self._whole is None:
            with torch.no_grad(), counted_as("weights"):
                self.begin(dtype)
                self._whole = self.shards.finish(self._begun, self.shapes)
                self._begun = None
        return self._whole

    def drop(self) -> None:
        """Release the group's gathered parameters, after waiting for an all-gather that is still running."""
        if self._begun is not None:
            explained(self._begun[0].wait)
        self._begun = self._whole = None

    def traced(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the gathered parameters in `dtype`, with autograd: the backward reduce-scatters gradients over dp.

        The group itself keeps no reference to the gathered tensors, so they live as long as the caller uses them.
        """
        found = _Gathered.apply(self, dtype, *self.parameters)
        self.drop()
        return found

    def sum_waiting(self) -> None:
        """Reduce-scatter `self.sums`, the unsharded gradients of a ZeRO-1 step; add this rank's rows to `.grad`."""
        like = self.parameters[0].detach()
        found = self.shards.scatter(self.sums, self.shapes, like)
        self.sums = [None] * len(self.sums)
        for p, grad in zip(self.parameters, found, strict=True):
            if p.requires_grad and grad is not None:  # a loss term may have set `.grad`
                p.grad = grad if p.grad is None else p.grad.add_(grad)


class _Gathered(torch.autograd.Function):
    """Autograd function that all-gathers the parameters of a `Group`; its backward is one reduce-scatter over dp."""

    @staticmethod
    def forward(ctx: Any, group: Group, dtype: Any, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.averages = group, group.shards.averages
        ctx.set_materialize_grads(False)
        return tuple(group.whole(dtype))

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Any) -> Any:
        group: Group = ctx.group
        group.drop()
        if group.shards.stage > 1 or ctx.averages:
            like = group.parameters[0].detach()
            sums = group.shards.scatter(grads, group.shapes, like, ctx.averages)
            return (None, None, *sums)
        for i, grad in enumerate(grads):
            if grad is not None:
                wide, sums = grad.to(group.parameters[i].dtype), group.sums
                with counted_as("gradients"):
                    sums[i] = wide.clone() if sums[i] is None else sums[i].add_(wide)
        return (None, None, *(None for _ in grads))
