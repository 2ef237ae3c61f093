"""Watch over the numbers of a training: the first NaN or infinity, replicas that differ, spikes of the loss."""

import math
import statistics
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from slapo_zoo.errors import SlapoError
from slapo_zoo.parallel.digests import digest_of_tensor
from slapo_zoo.parallel.ranks.agreement import together
from slapo_zoo.pipeline.stages import Foreign

SPIKE, HISTORY, LEAST = 3.0, 50, 8  # times the median of the last losses, and how many are needed


class NumericsError(SlapoError, ArithmeticError):
    """Error that `NumericsWatch` raises when a module's output, or the gradient of the output, has NaN or infinity."""


class NumericsWarning(UserWarning):
    """Warning of `NumericsWatch` that replicas of a parameter differ between ranks, or that the loss jumped."""


class NumericsWatch:
    """Context that watches outputs, gradients and losses of a scheduled model while the model trains.

        with NumericsWatch(model) as watch:
            loss = model.train_step(batch)
            watch.step(loss)            # loss spikes
            watch.replicas()            # now and then

    A forward or backward in which NaN or infinity appears first raises NumericsError, which names the module, the rank
    and the rows of the micro-batch. In `train_step` the other ranks raise an error too.

    Args:
        model: a scheduled model.
        spike: warn of a loss larger than this many times the median of the last 50 losses.

    Attributes:
        reports: texts of all warnings so far.
    """

    def __init__(self, model: Any, spike: float = SPIKE):
        self.model, self.spike = model, spike
        self.reports: list[str] = []
        self._losses: deque[float] = deque(maxlen=HISTORY)
        self._hooks: list[Any] = []

    def __enter__(self) -> "NumericsWatch":
        for path, module in self.model.named_modules():
            if path and not isinstance(module, Foreign):
                self._hooks.append(module.register_forward_hook(self._after(path)))
        return self

    def __exit__(self, *exc: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _after(self, path: str) -> Callable[..., None]:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            leaves = dict(output) if hasattr(output, "keys") else output
            for x in tree_leaves(leaves):
                if isinstance(x, Tensor) and x.is_floating_point():
                    self._require_finite(x, path, "output")
                    if x.requires_grad:
                        x.register_hook(self._on_gradient(path, self._rows()))

        return after

    def _on_gradient(self, path: str, rows: str) -> Callable[[Tensor], None]:
        def check(grad: Tensor) -> None:
            self._require_finite(grad, path, "gradient of its output", rows)

        return check

    def _rows(self) -> str:
        stream = self.model.schedule.state.random
        return f"rows {stream.first_row}..{stream.first_row + max(stream.num_rows, 1) - 1}"

    def _require_finite(self, x: Tensor, path: str, what: str, rows: str = "") -> None:
        with torch._C.DisableTorchFunctionSubclass():
            wrong = ~torch.isfinite(x)
            if not bool(wrong.any()):
                return
            kind = "NaN" if bool(torch.isnan(x).any()) else "infinity"
        rank = self.model.mesh.rank
        problem = f"{int(wrong.sum())} of {x.numel()} elements are {kind} in {rows or self._rows()}"
        hint = "this module is the first with such values: look at its inputs and weights"
        raise NumericsError(f"rank {rank}", f"{path}, {what}", problem, hint)

    def step(self, loss: Tensor | float) -> bool:
        """Record a step's loss; return True, after a warning, if it is > `spike` * median so far, or is not finite."""
        value = float(loss)
        usual = statistics.median(self._losses) if len(self._losses) >= LEAST else None
        jumped = not math.isfinite(value) or (usual is not None and value > self.spike * usual)
        if jumped:
            known = "no median yet" if usual is None else f"the median of the last is {usual:.4g}"
            self._report(f"loss {value:.4g}: {known}")
        else:
            self._losses.append(value)
        return jumped

    def replicas(self) -> list[str]:
        """Compare replicas of parameters over all ranks bit for bit; warn, and return a text for each that differs. All
        ranks must call this method.
        """
        mine = digests(self.model)
        every = together(self.model.mesh, "replicas", lambda: mine)
        found = [
            f"{name} on rank {rank} differs from that of rank {first}"
            for name, rank, first in unlike_replicas(every)
        ]
        for text in found:
            self._report(text)
        return found

    def _report(self, text: str) -> None:
        self.reports.append(text)
        if self.model.mesh.rank == 0:
            warnings.warn(text, NumericsWarning, stacklevel=3)


def digests(model: Any, grads: bool = False) -> dict[str, tuple[str, str]]:
    """Return {name of a parameter: (hash of the bytes on this rank, text that tells which shard this rank holds)}.

    With `grads` the parameter's gradient is hashed. Ranks with equal texts hold the same shard.
    """
    named = model.named_parameters(remove_duplicate=False)
    held = ((name, p.grad if grads else p) for name, p in named)
    return {name: (digest_of_tensor(x), part_of(model, name)) for name, x in held if x is not None}


def unlike_replicas(
    ranks: Sequence[Mapping[str, tuple[str, str]]],
) -> Iterator[tuple[str, int, int]]:
    """Yield (parameter name, rank, first): `rank` and the lowest rank `first` hold the same shard, but other values.

    `ranks` has the result of `digests` for each rank: {name: (hash of the bytes, text that tells which shard)}.
    """
    for name in sorted({name for held in ranks for name in held}):
        seen: dict[str, tuple[int, str]] = {}
        for rank, held in enumerate(ranks):
            if name in held:
                digest, part = held[name]
                first, want = seen.setdefault(part, (rank, digest))
                if digest != want:
                    yield name, rank, first


def part_of(model: Any, name: str) -> str:
    """Return a text that tells which shard of the parameter `name` this rank holds: "all", or ranges of indices."""
    row = model.plan.of(name)
    if row is None:
        return "all"
    cut, found = row.placement, "all"
    if cut is not None:
        found = str(cut.runs(row.shape[cut.axis], *model.mesh.place(cut.mesh_dim)))
    if row.row_shards > 1 and row.is_parameter:
        found += f", rows {model.mesh.coord('loss') % row.row_shards} of {row.row_shards}"
    return found
