"""Position of a model in its sequence of random numbers: training step, rows of the batch, call of the model."""

import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

from slapo_zoo.parallel.known import known, places
from slapo_zoo.parallel.replaced import replaced
from slapo_zoo.parallel.rng.device_seeds import DeviceSeeds
from slapo_zoo.parallel.rng.seeds import advance_generator, mark_of_generator


class SiteName:
    """Path of a dropout module: base + suffix. `key`, the base's hash, is a tensor, so blocks share a compiled graph.

    Args:
        base: path of a block, or a SiteName, whose base and `key` this name takes over and whose suffix it continues.
        suffix: text that follows `base` in the path.
    """

    def __init__(self, base: "str | SiteName", suffix: str = ""):
        self.base = base
        if isinstance(base, str):
            self.suffix, self.key = suffix, torch.tensor(zlib.crc32(base.encode()), device="cpu")
        else:
            self.suffix, self.key = base.suffix + suffix, base.key

    def __str__(self) -> str:
        root: Any = self.base
        while not isinstance(root, str):
            root = root.base
        return root + self.suffix


Where = str | SiteName | int  # path of a module that draws, its SiteName, or the hash of the path


def hash_of(site: Where) -> int:
    """Return a 32-bit hash of the path of a module that draws random numbers; it is the same in every process."""
    return site if isinstance(site, int) else zlib.crc32(str(site).encode())


Position = tuple[int, int, int]  # step, first row, rows
NOWHERE = -1  # number of rows in `now` outside a call
TURN = 40  # bits for the step; the bits above number the draws of a module outside a call
MARKS = 1 << 14  # states of torch's generator that are remembered
GRAPHS = [0]  # number of draws by compiled code, which calls no method of a stream


@dataclass
class StreamPosition:
    """Position of a model in its sequence of random numbers, which all its dropouts share.

    Args:
        seed: seed of the run, the same on all ranks.
        step: number of training forwards of the whole model (of batches, not of micro-batches).
        first_row: index in the global batch of the first row of the current micro-batch.
        num_rows: number of rows of the current micro-batch, 0 when unknown.
    """

    seed: int = 0
    step: int = 0
    first_row: int = 0
    num_rows: int = 0
    copy: int = 0  # dp coordinate, for the row indices of draws outside a call
    real_tokens: Tensor | None = None  # bool [B, S], while padding is left out
    real_at: Tensor | None = None  # [N], indices of the tokens that are no padding among all B * S
    cut: Any = None  # `TokenCut` of a step whose tokens are sharded over cp
    device_seeds: DeviceSeeds = field(default_factory=DeviceSeeds, repr=False)
    has_rows: bool = True  # axis 0 of the inputs of dropouts is the batch
    is_open: bool = False  # a call is running; all its modules draw at one position
    again: Position | None = None  # position of the call whose backward runs
    calls: int = 0  # number of calls that drew and were no training step
    now: Tensor | None = field(default=None, repr=False, compare=False)  # `position` for a graph
    # state of torch's generator at the start of a call that has not drawn yet
    _start: int | None = None
    # number of draws outside a call, by hash of the module's path
    _turns: dict[int, int] = field(default_factory=dict, repr=False)
    _seen: dict[Any, Position] = field(default_factory=dict, repr=False)  # by generator state

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. If it changes the step or rows, store these also as the tensor `now`, for compiled code."""
        super().__setattr__(name, value)
        if name in ("step", "first_row", "num_rows", "again"):
            self._moved()
        if name == "step":
            self._turns = {}

    def _moved(self) -> None:
        if detect_fake_mode() is None:  # a fake tensor must not stay after a dry run
            step, first_row, num_rows = self.position()
            known = self.is_open or self.again or num_rows
            self.now = torch.tensor([step, first_row, num_rows if known else NOWHERE], device="cpu")

    @contextmanager
    def packing(self, real: Tensor) -> Iterator[None]:
        """Context of a forward whose N non-padding tokens, marked in `real` [B, S], are packed to one row [1, N, ...].

        A dropout then takes, for each packed token, the elements that the mask of the padded [B, S, ...] has for it.
        """
        counts = known().real
        at = places(real.flatten(), None if counts is None else sum(counts))
        self.real_tokens, self.real_at = real, at
        try:
            yield
        finally:
            self.real_tokens = self.real_at = None

    def position(self) -> Position:
        """Return (step, first row, number of rows), from which dropout is seeded; in a backward, those of its forward."""
        return (not self.is_open and self.again) or (self.step, self.first_row, self.num_rows)

    def saved(self) -> dict[str, Any]:
        """Return what a checkpoint needs so that a resumed run draws what an unbroken run draws: {"seed", "step",
        "calls": number of dropout-drawing forwards so far outside training steps, "turns": [(hash of a module's path,
        number - 1 of its draws in this step outside any forward of the model)]}.
        """
        return {"seed": self.seed, "step": self.step, "calls": self.calls, "turns": [*self._turns.items()]}  # fmt: skip

    def resume(self, kept: dict[str, Any]) -> None:
        """Go to the position `kept` that `saved` returned; checkpoints of older releases have seed and step alone."""
        self.seed, self.step, self.calls = kept["seed"], kept["step"], kept.get("calls", 0)
        self._turns = dict(kept.get("turns", ()))

    @contextmanager
    def at(self, step: int, first_row: int, num_rows: int) -> Iterator[None]:
        """Context in which dropout masks are drawn for the given step and batch rows, as within a call of the model."""
        before = (self.step, self.first_row, self.num_rows), self.is_open, self._start
        self._go((step, first_row, num_rows), True)
        try:
            yield
        finally:
            self._go(*before)

    def _go(self, place: Position, is_open: bool, start: int | None = None) -> None:
        found: dict[str, Any] = dict(zip(("step", "first_row", "num_rows"), place, strict=True))
        self.__dict__.update(found, is_open=is_open, _start=start)
        self._moved()

    @contextmanager
    def call(self, trains: bool, first_row: int, num_rows: int) -> Iterator[None]:
        """Context of a call of the model, or of one of its submodules: sets the step and rows that seed its dropout.

        Each call has dropout masks of its own. If torch's generator is in the state it had when an earlier call began
        (a recompute, the same seed set again), that call's masks are drawn. A drawing call advances the generator.

        Args:
            trains: True for a training forward of the whole model, which advances `step` by 1.
            first_row: index in the global batch of the first row of the micro-batch.
            num_rows: number of rows of the micro-batch, 0 when unknown.
        """
        mark = None if torch.compiler.is_compiling() else mark_of_generator()
        if mark in self._seen:
            number = self._seen[mark][0]
        elif trains:
            number = self.step = self.step + 1
        else:
            number = -self.calls - 1
        with self.at(number, first_row, num_rows):
            self._start, graphs = mark, GRAPHS[0]
            try:
                yield
            finally:
                if self._start is not None and GRAPHS[0] != graphs:  # only compiled code has drawn
                    self._begin()
                if mark is not None and self._start is None:
                    advance_generator()

    def _begin(self) -> None:
        """At the first draw of a model call, store the call's position (step, first row, number of rows) under the
        state of torch's generator at the call's start. A call that starts from it again, a recompute, draws alike.
        """
        start, self._start = self._start, None
        self.calls = max(self.calls, -self.step)
        self._remember(start)
        advance_generator()
        self._remember(mark_of_generator())

    def _remember(self, mark: Any, position: Position | None = None) -> None:
        if len(self._seen) >= MARKS:
            del self._seen[next(iter(self._seen))]
        self._seen[mark] = position or self.position()

    def place(self, site: Where, rows: int) -> Position:
        """Return the stream position (step, first row, number of rows) that seeds the random numbers which the module at
        path `site` draws for a tensor of `rows` rows. Outside a call of the model each draw counts as a step.
        """
        found = self._place(site, rows)
        return found if self.has_rows else (found[0], 0, 0)

    def _place(self, site: Where, rows: int) -> Position:
        if self.is_open or detect_fake_mode() is not None:
            if self._start is not None:
                self._begin()
            return self.position()
        mark, key = mark_of_generator(), hash_of(site)
        if mark in self._seen:  # within a call
            return self._seen[mark]
        found = self._seen.get((mark, key)) or self.again
        if found is None:
            turn = self._turns[key] = self._turns.get(key, -1) + 1
            first_row = self.first_row if self.num_rows else self.copy * rows
            found = self.step + (turn << TURN), first_row, self.num_rows
        if found is not self.again:
            self._remember((mark, key), found)
            advance_generator()
        return found

    def without_rows(self) -> AbstractContextManager[None]:
        """Context in which draws do not depend on the batch rows; all micro-batches and dp ranks draw equal numbers."""
        return replaced(self, "has_rows", False)
