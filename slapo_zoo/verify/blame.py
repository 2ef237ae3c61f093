"""Search for the first module with a wrong tensor, and for modules whose directives (`shard`, ...) can be the cause.

One training step of the scheduled model is recorded on all ranks, and one of the plain model in fp64 and in
fp32 (with the attention core as a child module, so that q, k and v are recorded). The tensors are compared in
the order of the forward. If all agree, their gradients are compared in the opposite order, that of the backward.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slapo_zoo.verify.compare import Divergence, RankResult
from slapo_zoo.verify.events import Event, Seen
from slapo_zoo.verify.forms import form_of

SLACK, FLOOR = 8.0, 64 * torch.finfo(torch.float32).eps
MOST = 1e30  # masks hold the lowest number of their dtype


class Blame:
    """Search (`first`) for the first module of a scheduled model with a tensor unlike the plain model's on any rank.

    Args:
        found: result of each rank of the scheduled model; its `events` are the tensors recorded at the rank's modules.
        truth: {Event (module, its argument or output): Seen (tensor, gradient)} of the plain fp64 model on the batch.
        plain: the same of the plain model in fp32; the distance from `truth` is the rounding error.
        partial: paths of modules whose output gradients may be partial on the tp ranks: their sum then has to agree.
        experts: paths of modules whose experts are sharded over ranks; modules inside them are not compared.
    """

    def __init__(
        self, found: Sequence[RankResult], truth: Mapping[Event, Seen],
        plain: Mapping[Event, Seen], partial: frozenset[str] = frozenset(),
        experts: frozenset[str] = frozenset(),
    ):  # fmt: skip
        self.found, self.truth, self.plain, self.partial = found, truth, plain, partial
        self.order = [e for e in truth if not any(e.path.startswith(p + ".") for p in experts)]
        self.makers: dict[int, Event] = {}
        for event in self.order:
            if event.when == "out":
                self.makers.setdefault(truth[event].source, event)
        self.rows = max((seen.rows for seen in truth.values()), default=1)
        grads = [float(s.grad.abs().max()) for s in truth.values() if s.grad is not None and s.grad.numel()]  # fmt: skip
        self.largest_grad = max(grads, default=0.0)

    def first(self, wrong_parameters: Sequence[str]) -> Divergence | None:
        """Return the first difference from the plain model (module, tensor, rank, suspects); None if modules agree.

        Arguments and outputs are compared in forward order, then their gradients in backward order. The gradient of a
        parameter in `wrong_parameters` (names) is the first difference if the backward agrees down to its module.
        """
        return self._forward() or self._backward(wrong_parameters)

    def _forward(self) -> Divergence | None:
        for index, event in enumerate(self.order):
            wrong = self._wrong(event, gradient=False)
            if wrong is not None:
                causes = self._causes(index)
                return Divergence(event.path, "forward", _describe(event), wrong, causes)
        return None

    def _backward(self, wrong_parameters: Sequence[str]) -> Divergence | None:
        owners: dict[str, list[str]] = {}
        for name in wrong_parameters:
            owners.setdefault(name.rpartition(".")[0], []).append(name)
        left = [e.path for e in self.order if e.when == "out"]
        for index in reversed(range(len(self.order))):
            event = self.order[index]
            if event.when != "out":
                continue
            # what several modules return was made by the first; its gradient is complete only there
            makes = self.makers.get(self.truth[event].source) == event
            wrong = self._wrong(event, gradient=True) if makes else None
            if wrong is not None:
                what = f"gradient of its {_describe(event)}"
                consumers = self._consumers(index)
                return Divergence(event.path, "backward", what, wrong, (*consumers, event.path))
            left.pop()
            if event.path in owners and event.path not in left:
                what = f"gradient of {owners[event.path][0]}"
                return Divergence(event.path, "parameters", what, 0, (event.path, parent_of(event.path)))  # fmt: skip
        for path, names in owners.items():
            return Divergence(path, "parameters", f"gradient of {names[0]}", 0, (path,))
        return None

    def _wrong(self, event: Event, gradient: bool) -> int | None:
        """Return the first rank whose tensor recorded as `event` is, up to rounding, neither the plain model's nor a
        shard of it; None if there is no such rank. `gradient` True compares the gradients of these tensors instead.
        """
        seen = self.truth[event]
        want = seen.grad if gradient else seen.value
        own = self.plain[event].grad if gradient else self.plain[event].value
        if want is None or own is None:
            return None
        want, own = _clamped(want), _clamped(own)
        for ranks, parts, rows in self._parts(event, gradient):
            place = _rows(want, self.rows, rows)
            if gradient and place is want and rows[1] not in (0, self.rows):
                continue  # a tensor without batch rows: each micro-batch has a part of its gradient
            scale = max(float(want.abs().max()) if want.numel() else 0.0, 1e-3 * self.largest_grad * gradient)  # fmt: skip
            error = float((own - want).abs().max()) if want.numel() else 0.0
            allowed = SLACK * error + FLOOR * scale

            def close(x: Tensor, place: Tensor = place, allowed: float = allowed) -> bool:
                if not place.numel():
                    return True
                return bool((x - place).abs().max() <= allowed)

            partial = gradient and event.path in self.partial
            if None in parts or not form_of(parts, place, close, partial):  # pyright: ignore[reportArgumentType]
                return ranks[_rank_to_blame(parts, place)]
        return None

    def _parts(
        self, event: Event, gradient: bool
    ) -> Iterator[tuple[list[int], list[Tensor | None], tuple[int, int]]]:
        """Yield (ranks, tensors, (first row in the batch, number of rows)) for every micro-batch, stage and dp rank.

        `ranks` are the tp ranks of that stage. `tensors` has one item for each of these ranks: the tensor recorded as
        `event` (an input or output of a module) or, if `gradient` is True, its gradient; None if nothing was recorded.
        """
        places: dict[tuple[int, int, int], dict[int, Seen]] = {}
        for result in self.found:
            tp_coord, *others = result.coords
            for row in sorted({e.first_row for e in result.events}):
                mine = event._replace(first_row=row)
                key: Any = (*others, row)
                if mine in result.events:
                    places.setdefault(key, {})[tp_coord] = result.events[mine]
        size = 1 + max(result.coords[0] for result in self.found)
        for key, by_coord in places.items():
            seen = [by_coord.get(r) for r in range(size)]
            chosen = [None if s is None else (s.grad if gradient else s.value) for s in seen]
            values = [None if v is None else _clamped(v) for v in chosen]
            if all(v is None for v in values):
                continue
            ranks = [i for i, r in enumerate(self.found) if r.coords[1:] == key[:2]]
            first = next(s for s in seen if s is not None)
            yield ranks, values, (key[2], first.rows)

    def _causes(self, index: int) -> tuple[str, ...]:
        """Return the paths of modules that can have made recorded tensor `index` (its number in forward order) wrong:
        for an output its module, the module's children and the parent; for an argument its module, the parent and the
        parent's other children that ran before.
        """
        event = self.order[index]
        if event.when == "out":
            return (event.path, *self._children(index), parent_of(event.path))
        found = [event.path, parent_of(event.path)]
        for earlier in reversed(self.order[:index]):
            if earlier.when == "out" and parent_of(earlier.path) == parent_of(event.path):
                found.append(earlier.path)
        return tuple(dict.fromkeys(found))

    def _children(self, index: int) -> list[str]:
        """Return paths of the children of the module of recorded tensor `index`; the child that ran last comes first."""
        path = self.order[index].path
        inside = [e.path for e in reversed(self.order[:index]) if parent_of(e.path) == path]
        return list(dict.fromkeys(inside))

    def _consumers(self, index: int) -> list[str]:
        """Return the paths of modules that took recorded tensor `index` (its number in forward order) as an argument.

        If there are none, return the module that ran next under the same parent, and the parent.
        """
        source = self.truth[self.order[index]].source
        later = self.order[index + 1 :]
        took = [e.path for e in later if e.when == "in" and self.truth[e].source == source]
        if not took:
            parent = parent_of(self.order[index].path)
            beside = [e.path for e in later if e.when == "in" and parent_of(e.path) == parent]
            took = [*beside[:1], parent]
        return _containers_last(list(dict.fromkeys(took)))


def _containers_last(paths: list[str]) -> list[str]:
    """Return module `paths` in order, but those above two nested ones ("h" above "h.0" and "h.0.ln") last."""

    def within(path: str) -> list[str]:
        return [p for p in paths if p != path and p.startswith(path + "." if path else "")]

    far = [path for path in paths if any(within(p) for p in within(path))]
    return [*(p for p in paths if p not in far), *far]


def _clamped(x: Tensor) -> Tensor:
    """Return `x` in fp64, clamped to +-1e30, so that additive masks, which use the lowest number of a dtype, agree."""
    return x.double().clamp(-MOST, MOST)


def _rows(want: Tensor, all_rows: int, rows: tuple[int, int]) -> Tensor:
    """Return the rows of a micro-batch, `rows` (first row, count), cut out of `want`, a tensor of the whole batch.

    A tensor without a batch axis is returned unchanged. `all_rows` is the number of rows of the whole batch.
    """
    first, count = rows
    if not want.ndim or not count or count == all_rows or want.shape[0] % all_rows:
        return want
    each = want.shape[0] // all_rows
    return want[first * each : (first + count) * each]


def _rank_to_blame(parts: Sequence[Tensor | None], want: Tensor) -> int:
    """Return the index in `parts` (a tensor per tp rank) of the first None, else of the first whose largest absolute
    error against the plain model's `want` is >= 1e-3 of that of all ranks. Return 0 if a shape is not that of `want`.
    """
    for i, part in enumerate(parts):
        if part is None:
            return i
    shapes = [tuple(p.shape) for p in parts if p is not None]
    if len(set(shapes)) == 1 and shapes[0] == tuple(want.shape):
        errors = [float((p - want).abs().max()) for p in parts if p is not None and p.numel()]  # fmt: skip
        close = [e < 1e-3 * max(errors) for e in errors]
        return next((i for i, ok in enumerate(close) if not ok), 0)
    return 0


def _describe(event: Event) -> str:
    side = "argument" if event.when == "in" else "output"
    return f"{side} {event.leaf}" + (f" of call {event.call}" if event.call else "")


def parent_of(path: str) -> str:
    """Return the path of a module's parent: "h.0" for "h.0.attn"."""
    return path.rpartition(".")[0]
