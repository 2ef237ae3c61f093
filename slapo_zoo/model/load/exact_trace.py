"""Record of a step's operations on each virtual rank, to find where two runs first differ. With `exact=` of
`from_pretrained` a process runs several virtual ranks, one thread each.

with model.tracing() as mine:
    model.train_step(batch); model.clip_grad_norm_(1.0)
mine.first_difference(other)  -->  "rank 1, row 812: aten::mm in transformer.h.0.mlp.c_proj differs"
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slapo_zoo.parallel.digests import digest_of_tensor

# operation, module whose forward runs (or the node of autograd), digest of its results
Row = tuple[str, str, str]


class Recorder(TorchDispatchMode):
    """Mode that records each operation of this thread, with a digest of its results; with `exact=` of `from_pretrained`
    a process runs several virtual ranks, one thread each.

    Args:
        model: the model of the virtual rank that this thread runs.
        rows: list to which a row (operation, module, digest) is added for each operation.
    """

    def __init__(self, model: nn.Module, rows: list[Row]):
        super().__init__()
        self.paths = {module: path for path, module in model.named_modules()}
        self.rows, self.within, self.handles = rows, [], []
        self.sent: dict[int, tuple[str, str, Tensor]] = {}  # storage --> collective that fills it
        self._note_weights(model)

    def __enter__(self) -> "Recorder":
        hooks: Any = nn.modules.module
        self.handles = [
            hooks.register_module_forward_pre_hook(self._begin),
            hooks.register_module_forward_hook(self._end, always_call=True),
        ]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self.handles:
            handle.remove()

    def _begin(self, module: nn.Module, _args: Any) -> None:
        if module in self.paths:  # not of another thread's rank
            self.within.append(self.paths[module])

    def _end(self, module: nn.Module, _args: Any, _output: Any) -> None:
        if module in self.paths and self.within:
            self.within.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, taken = str(func.name()), _tensors((args, kwargs))
        self._note_results(taken)
        if name.startswith("c10d::"):  # a collective: its result is recorded when it is read
            self.rows.append((name, self._place(), ""))
            self.sent |= {x.untyped_storage().data_ptr(): (name, self._place(), x) for x in taken}
            return func(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        found = _tensors(out)
        if found and not func.is_view and "empty" not in name:
            self.rows.append((name, self._place(), _digest(found)))
        return out

    def _note_results(self, taken: Sequence[Tensor]) -> None:
        """Add a row (operation, module, digest) to `rows` for the result of each collective that is among `taken`, the
        tensors that the operation about to run reads. A result is recorded once, at the first such operation.
        """
        for x in taken:
            if known := self.sent.pop(x.untyped_storage().data_ptr(), None):
                name, place, result = known
                self.rows.append((f"result of {name}", place, _digest([result])))

    def _place(self) -> str:
        if self.within:
            return self.within[-1]
        node: Any = torch._C._current_autograd_node()
        return "" if node is None else str(node.name())

    def _note_weights(self, model: nn.Module) -> None:
        """Add a row ("weights", name, digest) for each parameter: the optimizer that changed them was not recorded."""
        for name, p in model.named_parameters():
            self.rows.append(("weights", name, _digest([p.detach()])))


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, Tensor) and not x.is_meta]


def _digest(tensors: Sequence[Tensor]) -> str:
    return " ".join(digest_of_tensor(x)[:16] for x in tensors)


@dataclass
class ExactTrace:
    """Recorded operations of all virtual ranks, as rows (operation, module, digest of its results); with `exact=` of
    `from_pretrained` a process runs several virtual ranks, one thread each.

    Args:
        rows: virtual rank --> the rows of its operations, in order.
    """

    rows: dict[int, list[Row]] = field(default_factory=dict)

    def save(self, path: str | Path) -> None:
        """Write the recorded rows of all virtual ranks to the file `path`, as JSON."""
        Path(path).write_text(json.dumps(self.rows), encoding="utf-8")

    @classmethod
    def read(cls, path: str | Path) -> "ExactTrace":
        """Return the record that `save` wrote to the file `path`."""
        found: Mapping[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        return cls({int(rank): [tuple(row) for row in rows] for rank, rows in found.items()})

    def first_difference(self, other: "ExactTrace") -> str:
        """Return where the runs first differ, as text: virtual rank, row (index of the operation), operation and
        module; "" if nowhere. Ranks wait for each other at collectives, so the smallest row over all ranks is the
        earliest.
        """
        found = [
            (number, rank)
            for rank in sorted(self.rows.keys() & other.rows.keys())
            if (number := _first(self.rows[rank], other.rows[rank])) is not None
        ]
        if not found:
            return ""
        number, rank = min(found)
        mine, its = (_at(trace.rows[rank], number) for trace in (self, other))
        what = f"{mine} differs" if mine == its else f"found {mine}, the other run has {its}"
        return f"rank {rank}, row {number}: {what}"


def _first(rows: Sequence[Row], others: Sequence[Row]) -> int | None:
    """Return the index of the first row in which `rows` and `others` differ; None if all are equal."""
    for number, (row, other) in enumerate(zip(rows, others, strict=False)):
        if row != other:
            return number
    return None if len(rows) == len(others) else min(len(rows), len(others))


def _at(rows: Sequence[Row], number: int) -> str:
    if number >= len(rows):
        return "the end"
    operation, place, _ = rows[number]
    return f"{operation} in {place}" if place else operation
