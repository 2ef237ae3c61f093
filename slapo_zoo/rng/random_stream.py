"""Random numbers that do not depend on the layout.

A mask is drawn per *cell*: (seed, step, site, global batch row[, global head]). So any rank can
draw just its own part of the mask that one device would have drawn, for every tp, pp, dp and
number of micro-batches, and a recomputation draws it again.
"""

import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

from slapo_zoo.parallel.known import known, places
from slapo_zoo.rng.device_seeds import STRIDE, DeviceSeeds, later, mix, split_cells
from slapo_zoo.rng.seeds import advance_generator, mark_of_generator


class SiteName:
    """The path of a site that drops, and its hash as a tensor: blocks that differ in it alone share a graph.

    Args:
        base: a path, or the name that this one begins with.
        suffix: behind it.
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


Where = str | SiteName | int  # a site's path, its name, or the hash of it


def hash_of(site: Where) -> int:
    """32 bits of a site, the same in every process."""
    return site if isinstance(site, int) else zlib.crc32(str(site).encode())


Position = tuple[int, int, int]  # step, first row, rows
NOWHERE = -1  # rows of a graph's position where no call runs
TURN = 40  # bits of a step; those above tell the draws of a site beside any call from each other
MARKS = 1 << 14  # states of torch's generator that are remembered
GRAPHS = [0]  # how often compiled code has drawn: no stream sees it


@dataclass
class RandomStream:
    """Where in the random sequence a model is; shared by all its sites.

    Args:
        seed: of the whole run, the same on all ranks.
        step: counts training forwards of the whole model (of whole batches, not of micro-batches).
        first_row: global batch row of the first row in the current micro-batch.
        num_rows: rows of the current micro-batch, 0 when unknown.
    """

    seed: int = 0
    step: int = 0
    first_row: int = 0
    num_rows: int = 0
    copy: int = 0  # our dp coordinate, which tells the rows of what is drawn beside any call
    real_tokens: Tensor | None = None  # [B, S], while all that are real stand in one row
    real_at: Tensor | None = None  # [N], where they are among all B * S
    device_seeds: DeviceSeeds = field(default_factory=DeviceSeeds, repr=False)
    has_rows: bool = True  # whether axis 0 of what is dropped are batch rows
    is_open: bool = False  # a call runs: its sites draw at one position
    again: Position | None = None  # of the call whose backward runs
    calls: int = 0  # so many drew that were no training forward of the whole model
    now: Tensor | None = field(default=None, repr=False, compare=False)  # `position` for a graph
    _start: int | None = None  # mark at the start of a call that has drawn nothing yet
    _turns: dict[int, int] = field(default_factory=dict, repr=False)  # of a site beside any call
    _seen: dict[Any, Position] = field(default_factory=dict, repr=False)  # by mark

    def __setattr__(self, name: str, value: Any) -> None:
        """A position is a tensor too: see drawn_in_graphs."""
        super().__setattr__(name, value)
        if name in ("step", "first_row", "num_rows", "again"):
            self._moved()
        if name == "step":
            self._turns = {}

    def _moved(self) -> None:
        if detect_fake_mode() is None:  # what a dry run makes must not be met again
            step, first_row, num_rows = self.position()
            known = self.is_open or self.again or num_rows
            self.now = torch.tensor([step, first_row, num_rows if known else NOWHERE], device="cpu")

    @contextmanager
    def packing(self, real: Tensor) -> Iterator[None]:
        """Within it, a mask for [1, N, ...] is that of the real tokens of [B, S, ...]."""
        counts = known().real
        at = places(real.flatten(), None if counts is None else sum(counts))
        self.real_tokens, self.real_at = real, at
        try:
            yield
        finally:
            self.real_tokens = self.real_at = None

    def position(self) -> Position:
        """Return the position that a recomputation restores to draw the same masks."""
        return (not self.is_open and self.again) or (self.step, self.first_row, self.num_rows)

    @contextmanager
    def at(self, step: int, first_row: int, num_rows: int) -> Iterator[None]:
        """Draw at this position, as a call does."""
        before = (self.step, self.first_row, self.num_rows), self.is_open, self._start
        self._go((step, first_row, num_rows), True)
        try:
            yield
        finally:
            self._go(*before)

    def _go(self, place: Position, is_open: bool, start: int | None = None) -> None:
        found = dict(zip(("step", "first_row", "num_rows"), place, strict=True))
        self.__dict__.update(found, is_open=is_open, _start=start)
        self._moved()

    @contextmanager
    def call(self, trains: bool, first_row: int, num_rows: int) -> Iterator[None]:
        """Around a call of the model or of a part, whose masks are its own.

        From a state of torch's generator from which a call has drawn before (a recomputation, a seed
        that was set anew) it draws as that one did. A call that draws moves the generator. One that
        `trains` is a training forward of the whole model, which has a step of its own.
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
                if self._start is not None and GRAPHS[0] != graphs:  # in compiled code alone
                    self._begin()
                if mark is not None and self._start is None:
                    advance_generator()

    def _begin(self) -> None:
        """The first draw of a call."""
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
        """The position of a draw for so many rows; beside any call a site has one of its own for each."""
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

    @contextmanager
    def without_rows(self) -> Iterator[None]:
        """Draw for what has no batch rows: the same for every micro-batch, dp rank and packing."""
        self.has_rows = False
        try:
            yield
        finally:
            self.has_rows = True

    def keep_mask(self, x: Tensor, p: float, site: Where, heads: Sequence[int] = ()) -> Tensor:
        """A dropout mask for x, 0 or 1/(1-p), in the shape and dtype of x.

        Args:
            x: [rows, ...], or [rows, len(heads), ...] when `heads` is given.
            p: probability that an element becomes 0.
            site: path of the module that drops; two sites are independent.
            heads: global indices of axis 1, whose cells are drawn one by one.
        """
        if not self.draws_in_blocks(x.device):
            keep = hashed_cells(x, p, self.seeds(x, site, heads))
            return keep.div_(1.0 - p) if p < 1.0 else keep
        real = self.real_tokens if self.has_rows else None
        if torch.compiler.is_compiling():
            from slapo_zoo.rng.drawn_in_graphs import drawn_mask, in_graph

            at = self.now, self.seed, self.has_rows, real
            return drawn_mask(*at, *in_graph(site), list(heads), x.shape, p, x.dtype)
        if real is not None:
            whole = x.new_empty(()).expand(*real.shape, *x.shape[2:])
            return self._mask(whole, p, site, heads)[real][None]
        return self._mask(x, p, site, heads)

    def _mask(self, x: Tensor, p: float, site: Where, heads: Sequence[int]) -> Tensor:
        keep = self.draw_cells(x, p, self.cells(x.shape[0], site, heads))
        return keep.div_(1.0 - p) if p < 1.0 else keep

    @staticmethod
    def draws_in_blocks(device: torch.device) -> bool:
        """Return whether masks are drawn by a generator, as on a CPU; else they are hashed where they are used."""
        return device.type == "cpu"

    def drawn(
        self, x: Tensor, p: float, site: Where, of: str = "mask", part: tuple = ()
    ) -> dict[str, Any]:
        """What a dropout of x takes: `keep`, or where an operator hashes the mask, its `seeds` and `p`.

        x holds a `part` of "columns" or "tokens", or of "mask" the heads: see the methods that keep it.
        """
        if self.hashes(x.device):
            find = self.seeds if of == "mask" else getattr(self, f"seeds_of_{of}")
            return {"seeds": find(x, site, *part), "p": p}
        return {"keep": getattr(self, f"keep_{of}")(x, p, site, *part)}

    def hashes(self, device: torch.device) -> bool:
        """Return whether an operator hashes a mask from its seeds, and none lies in memory."""
        return not self.draws_in_blocks(device)

    def seeds(self, x: Tensor, site: Where, heads: Sequence[int] = ()) -> Tensor:
        """The seeds of the mask of x, on its device: x is cut into as many equal runs; see `keep_mask`."""
        real, rows = self.real_tokens if self.has_rows else None, x.shape[0]
        rows = rows if real is None or heads else len(real)
        found = self.found(x.device, site, rows, heads)
        if real is None or heads or self.real_at is None:
            return found
        width = x.numel() // max(x.shape[1], 1)
        return split_cells(found, real.shape[1], width).index_select(0, self.real_at)

    def found(
        self, device: torch.device, site: Where, rows: int, heads: Sequence[int] = ()
    ) -> Tensor:
        """[rows * len(heads)] seeds of a site, on the device."""
        if torch.compiler.is_compiling():
            from slapo_zoo.rng.drawn_in_graphs import drawn_seeds, in_graph

            at = self.now, self.seed, self.has_rows
            return drawn_seeds(*at, *in_graph(site), rows, list(heads), device)
        at, key = self.place(site, rows), hash_of(site)
        return self.device_seeds.find(device, self.seed, at, key, rows, heads)

    def seeds_of_columns(self, x: Tensor, site: Where, run: tuple[int, int], size: int) -> Tensor:
        """Return the seeds of `keep_columns`: one per row of the last axis."""
        found = self.seeds(whole := x.detach().new_empty(()).expand(*x.shape[:-1], size), site)
        rows = whole.numel() // max(size, 1) // max(len(found), 1)
        return later(split_cells(found, rows, size), run[0])

    def seeds_of_tokens(self, x: Tensor, site: Where, n: int, r: int) -> Tensor:
        """Return the seeds of `keep_tokens`: those of this rank's run of tokens."""
        if x.ndim > 2:
            return later(self.seeds(x, site), r * (x.numel() // max(x.shape[0], 1)))
        tokens = x.shape[0] // max(self.position()[2], 1)
        found = self.seeds(x.detach().new_empty(()).expand(n * x.shape[0], x.shape[1]), site)
        return found.view(-1, n * tokens).narrow(1, r * tokens, tokens).flatten()

    def cells(self, count: int, site: Where, heads: Sequence[int] = ()) -> list[int]:
        """The seed of each cell of `count` rows, row by row; arguments as above."""
        step, first_row, num_rows = self.place(site, count)
        key = (self.seed, step, hash_of(site))
        # A model may flatten [rows, choices, ...] to [rows * choices, ...].
        per_row = count // num_rows if num_rows else 1
        rows = range(first_row * per_row, first_row * per_row + count)
        return [mix(*key, row, head) for row in rows for head in heads or (0,)]

    def keep_columns(
        self, x: Tensor, p: float, site: Where, run: tuple[int, int], size: int
    ) -> Tensor:
        """The mask of an x whose last axis is `run` of a global axis of `size`.

        The whole row is drawn and cut: n times the work, for one dropout of T5's feed-forward.
        """
        whole = x.new_empty(()).expand(*x.shape[:-1], size)
        return self.keep_mask(whole, p, site)[..., run[0] : run[1]]

    def keep_tokens(self, x: Tensor, p: float, site: Where, n: int, r: int) -> Tensor:
        """The mask of an x that holds the r-th of n runs of tokens; all are drawn, then cut.

        x is [rows, tokens / n, ...], or [rows * tokens / n, width] where a model flattens.
        """
        if x.ndim > 2:
            whole = x.new_empty(()).expand(x.shape[0], n * x.shape[1], *x.shape[2:])
            return self.keep_mask(whole, p, site).narrow(1, r * x.shape[1], x.shape[1])
        tokens = x.shape[0] // max(self.position()[2], 1)
        whole = x.new_empty(()).expand(n * x.shape[0], x.shape[1])
        keep = self.keep_mask(whole, p, site).view(-1, n * tokens, x.shape[1])
        return keep.narrow(1, r * tokens, tokens).reshape(x.shape)

    def uniform(self, x: Tensor, site: Where) -> Tensor:
        """Numbers of [0, 1) in the shape of x, each row from a cell of its own (stochastic depth)."""
        if torch.compiler.is_compiling():
            from slapo_zoo.rng.drawn_in_graphs import drawn_uniform, in_graph

            at = self.now, self.seed, self.has_rows
            return drawn_uniform(*at, *in_graph(site), x.shape, x.dtype, x.device)
        if self.hashes(x.device):  # what is drawn on the host would be waited for
            counter = torch.arange(x[0].numel(), device=x.device)
            bits = hashed_bits(counter, self.seeds(x, site)[:, None])
            return (bits / 0x1000000).to(x.dtype).view(x.shape)
        import numpy as np

        seeds = self.cells(len(x), site)
        drawn = [np.random.Generator(np.random.SFC64(s)).random(x[0].numel()) for s in seeds]
        return torch.from_numpy(np.stack(drawn)).to(x.device, x.dtype).view(x.shape)

    @staticmethod
    def draw_cells(x: Tensor, p: float, seeds: list[int]) -> Tensor:
        """0 or 1 in the shape and dtype of x, a cell per seed: a native generator, seeded anew for each cell; 16 random bits per element.

        Eight times as fast as `bernoulli_`; the probability is rounded to a multiple of 2**-16.
        """
        import numpy as np  # not at the top: exported kernels import torch alone

        keep, least = torch.empty(x.shape, dtype=x.dtype), round(p * 65536) - 32768
        if least > 32767 or not keep.numel():
            return keep.zero_()
        for cell, seed in zip(keep.view(len(seeds), -1), seeds, strict=True):
            words = np.random.SFC64(seed).random_raw(-(-len(cell) // 4))
            torch.ge(torch.from_numpy(words.view(np.int16))[: len(cell)], least, out=cell)
        return keep


def hashed_cells(x: Tensor, p: float, seeds: Sequence[int] | Tensor) -> Tensor:
    """A counter-based mask in tensor operations, for devices where seeding per cell is slow."""
    if torch.compiler.is_compiling() and isinstance(seeds, Tensor):
        from slapo_zoo.rng.drawn_in_graphs import hashed_mask

        return hashed_mask(seeds, p, x.shape, x.dtype)
    key = torch.as_tensor(seeds, dtype=torch.int64, device=x.device)
    counter = torch.arange(x.numel() // max(len(key), 1), dtype=torch.int64, device=x.device)
    return is_kept(counter[None], key[:, None], p).to(x.dtype).view(x.shape)


def is_kept(counter: Tensor, key: Tensor, p: float) -> Tensor:
    """Return whether dropout keeps element `counter` of the cell with seed `key`; the two broadcast."""
    return hashed_bits(counter, key) >= int(p * 0x1000000)


def hashed_bits(counter: Tensor, key: Tensor) -> Tensor:
    """24 random bits of element `counter` of the cell with seed `key`."""
    bits = counter * STRIDE + key  # int64 wraps around, as intended
    for multiplier in (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15):
        bits = (bits ^ ((bits >> 31) & 0x1FFFFFFFF)) * multiplier
    return (bits >> 40) & 0xFFFFFF


def dropout(
    x: Tensor, p: float, stream: RandomStream, site: Where, heads: Sequence[int] = ()
) -> Tensor:
    """x --> x * mask / (1 - p), the mask drawn from the cells of `site`."""
    return x * stream.keep_mask(x, p, site, heads) if p > 0.0 else x


_DRAWING = threading.RLock()


@contextmanager
def drawn_from(seed: int | Tensor) -> Iterator[None]:
    """Torch's own generator starts from `seed`, or a state, within, and is as before afterwards.

    One thread at a time: ranks may be threads of one process, and the generator is global.
    """
    with _DRAWING, torch.random.fork_rng(devices=[]):
        torch.set_rng_state(seed) if isinstance(seed, Tensor) else torch.manual_seed(seed)
        yield
