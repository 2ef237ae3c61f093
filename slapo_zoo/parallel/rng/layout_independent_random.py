"""Random numbers that are the same for every sharding of the model.

A dropout mask is drawn in blocks ("cells"), each from a seed hashed of (seed of the run, step, site, global
batch row[, global head]); a *site* is the path of the module that draws. So any rank can draw just its own
part of the mask that one device would have drawn, for every tp, pp, dp and number of micro-batches, and a
recomputation draws it again. Compiled code draws by custom operators that take the step and batch rows as a tensor:
a graph draws new masks at every step without a recompilation, and its backward those of its forward.
"""

import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slapo_zoo.errors import SlapoError
from slapo_zoo.parallel.rng.device_seeds import (
    NAMESPACE,
    DeviceSeeds,
    drawn_cells,
    hashed_bits,
    hashed_cells,
    later,
    mix,
    split_cells,
)
from slapo_zoo.parallel.rng.seeds import seeded
from slapo_zoo.parallel.rng.stream_position import (
    GRAPHS,
    NOWHERE,
    SiteName,
    StreamPosition,
    Where,
    hash_of,
)

# Tag of operators that CUDA graphs must not contain: a replay would repeat the masks of the capture.
UNSAFE = [t for n in ("cudagraph_unsafe",) if (t := getattr(torch.Tag, n, None)) is not None]


class _SeedsOfGraphs(threading.local):
    """Cache of seeds for compiled code, one per thread, since ranks may be threads that are at different steps."""

    def __init__(self) -> None:
        self.held = DeviceSeeds()


_SEEDS = _SeedsOfGraphs()


class RandomStream(StreamPosition):
    """Source of dropout masks, or of seeds to hash them from, the same on every mesh; `call` sets step and rows."""

    def keep_mask(
        self, x: Tensor, p: float, site: Where, heads: Sequence[int] = (), first: int = 0
    ) -> Tensor:
        """Return a dropout mask for x, 0 or 1/(1-p), in the shape and dtype of x.

        Args:
            x: [rows, ...], or [rows, len(heads), ...] when `heads` is given.
            p: probability that an element becomes 0.
            site: path of the module that drops; the masks of different paths are independent.
            heads: global indices of the heads on axis 1; each head has a seed of its own.
            first: number of elements of the unsharded tensor that precede x in each row, or in each head of a row.
        """
        if not self.draws_in_blocks(x.device):
            seeds = self.seeds(x, site, heads)
            keep = hashed_cells(x, p, later(seeds, first) if first else seeds)
            return keep.div_(1.0 - p) if p < 1.0 else keep
        real = self.real_tokens if self.has_rows else None
        if torch.compiler.is_compiling():
            at = self.now, self.seed, self.has_rows, real
            return drawn_mask(*at, *in_graph(site), list(heads), first, x.shape, p, x.dtype)
        if real is not None:
            whole = x.new_empty(()).expand(*real.shape, *x.shape[2:])
            return self._mask(whole, p, site, heads)[real][None]
        return self._mask(x, p, site, heads, first)

    def _mask(
        self, x: Tensor, p: float, site: Where, heads: Sequence[int], first: int = 0
    ) -> Tensor:
        keep = drawn_cells(x, p, self.cells(x.shape[0], site, heads), first)
        return keep.div_(1.0 - p) if p < 1.0 else keep

    @staticmethod
    def draws_in_blocks(device: torch.device) -> bool:
        """Return True on a CPU, where a generator draws each block of a mask; GPUs hash each element from a seed."""
        return device.type == "cpu"

    def drawn(
        self, x: Tensor, p: float, site: Where, of: str = "mask", part: tuple = ()
    ) -> dict[str, Any]:
        """Return the arguments of `kernels.dropout` for x: {"keep": mask} on a CPU, {"seeds", "p"} on a GPU.

        Args:
            x: this rank's input of the dropout.
            p: probability that an element becomes 0.
            site: path of the module that drops.
            of: how x is sharded: "mask" (not, or over heads), "columns" (last axis) or "tokens".
            part: for "mask" (global indices of the heads on axis 1,), or () if x has no such axis; for "columns"
                ((first, one past the last), unsharded number of columns); for "tokens" (number of slices, this rank's).
        """
        if self.cut is not None and of == "mask":
            of, part = ("queries", part) if part else ("tokens", (self.cut.n, self.cut.r))
        elif self.cut is not None and of == "tokens":  # tp shards a cp rank's tokens once more
            n, r = part
            part = self.cut.n * n, self.cut.r * n + r
        if self.hashes(x.device):
            find = self.seeds if of == "mask" else getattr(self, f"seeds_of_{of}")
            return {"seeds": find(x, site, *part), "p": p}
        return {"keep": getattr(self, f"keep_{of}")(x, p, site, *part)}

    def hashes(self, device: torch.device) -> bool:
        """Return whether operators on this device hash dropout masks from seeds, so that no mask is held in memory."""
        return not self.draws_in_blocks(device)

    def seeds(self, x: Tensor, site: Where, heads: Sequence[int] = ()) -> Tensor:
        """Return the seeds, int64 on the device of x, from which operators hash the dropout mask of x.

        There is one seed per row, or per row and head (heads fastest); where layers skip padding, one per token.

        Args:
            x: [rows, ...], or [rows, len(heads), ...].
            site: path of the module that drops.
            heads: global indices of the heads on axis 1; each head has a seed of its own.
        """
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
        """Return the dropout seeds [rows * len(heads)], on a device, of the module at path `site` for this micro-batch.

        `heads` are global indices of heads, each with a seed of its own; () gives one seed per row.
        """
        if torch.compiler.is_compiling():
            at = self.now, self.seed, self.has_rows
            return drawn_seeds(*at, *in_graph(site), rows, list(heads), device)
        at, key = self.place(site, rows), hash_of(site)
        return self.device_seeds.find(device, self.seed, at, key, rows, heads)

    def seeds_of_columns(self, x: Tensor, site: Where, run: tuple[int, int], size: int) -> Tensor:
        """Return the seeds from which operators hash the dropout mask of x, one per row of x (all axes but the last).

        Args:
            x: tensor that holds some columns (the last axis) of an unsharded tensor.
            site: path of the module that drops.
            run: first column of this rank, and one past its last.
            size: number of columns of the unsharded tensor.
        """
        whole = x.detach().new_empty(()).expand(*x.shape[:-1], size)
        cut = self.cut
        found = self.seeds_of_tokens(whole, site, cut.n, cut.r) if cut else self.seeds(whole, site)
        rows = whole.numel() // max(size, 1) // max(len(found), 1)
        return later(split_cells(found, rows, size), run[0])

    def seeds_of_tokens(self, x: Tensor, site: Where, n: int, r: int) -> Tensor:
        """Return the seeds of the dropout mask of x, the r-th of n equal slices of the tokens: one per row for x [rows,
        tokens / n, ...], one per token for x [rows * tokens / n, width]. `site` is the module's path.
        """
        if x.ndim > 2:
            return later(self.seeds(x, site), r * (x.numel() // max(x.shape[0], 1)))
        tokens = x.shape[0] // max(self.position()[2], 1)
        found = self.seeds(x.detach().new_empty(()).expand(n * x.shape[0], x.shape[1]), site)
        return found.view(-1, n * tokens).narrow(1, r * tokens, tokens).flatten()

    def cells(self, count: int, site: Where, heads: Sequence[int] = ()) -> list[int]:
        """Return the seeds, as ints, of the dropout mask of an input with `count` rows (a multiple of the micro-batch's
        rows) of the module at path `site`: one per row or, for `heads` (global indices), one per row and head.
        """
        step, first_row, num_rows = self.place(site, count)
        key = (self.seed, step, hash_of(site))
        # A model may flatten [rows, choices, ...] to [rows * choices, ...].
        per_row = count // num_rows if num_rows else 1
        rows = range(first_row * per_row, first_row * per_row + count)
        return [mix(*key, row, head) for row in rows for head in heads or (0,)]

    def keep_columns(
        self, x: Tensor, p: float, site: Where, run: tuple[int, int], size: int
    ) -> Tensor:
        """Return the dropout mask (0 or 1/(1-p)) of an x whose last axis is the range `run` (first, one past the last)
        of an axis of length `size`. Each rank draws the mask of the unsharded axis and slices it; a dropout in T5's
        feed-forward needs this. `site` is the path of the module that drops.
        """
        whole = x.new_empty(()).expand(*x.shape[:-1], size)
        cut = self.cut
        keep = (
            self.keep_tokens(whole, p, site, cut.n, cut.r)
            if cut
            else self.keep_mask(whole, p, site)
        )
        return keep[..., run[0] : run[1]]

    def keep_queries(self, x: Tensor, p: float, site: Where, heads: Sequence[int]) -> Tensor:
        """Return the dropout mask (0 or 1/(1-p)) of attention weights x [B, H, s, T]. `site` is the attention's path,
        `heads` are the global indices of all heads of the tp rank. With cp x has all of them, for this cp rank's
        queries; with cp by "ulysses" it has this cp rank's share of them, for all queries.
        """
        return self.keep_mask(x, p, site, *self._of_queries(x, heads))

    def queries_again(
        self, x: Tensor, p: float, site: Where, heads: Sequence[int]
    ) -> Callable[[], Tensor]:
        """Return a function that makes this step's dropout mask, 0 and 1, in the shape and dtype of attention weights x
        [B, H, s, T], also in a later backward: its seeds are chosen now. Arguments are those of `keep_queries`.
        """
        heads, first = self._of_queries(x, heads)
        if not self.draws_in_blocks(x.device):
            return partial(hashed_cells, x, p, later(self.seeds(x, site, heads), first))
        return partial(drawn_cells, x, p, self.cells(x.shape[0], site, heads), first)

    def seeds_of_queries(self, x: Tensor, site: Where, heads: Sequence[int]) -> Tensor:
        """Return the seeds [B * H] from which operators hash the dropout mask of attention weights x [B, H, s, T].
        `site` is the attention's path, `heads` are the global indices of all heads of the tp rank.
        """
        heads, first = self._of_queries(x, heads)
        return later(self.seeds(x, site, heads), first) if first else self.seeds(x, site, heads)

    def _of_queries(self, x: Tensor, heads: Sequence[int]) -> tuple[Sequence[int], int]:
        """Return (global indices of the H heads of attention weights x [B, H, s, T], elements before x in each head).

        With cp (context parallelism) x has the queries of this rank's tokens or, if cp works by "ulysses", all queries
        of some heads; `heads` are the global indices of all heads of the tp rank.
        """
        if (cut := self.cut) is None or cut.by_heads:
            return cut.heads(heads) if cut else heads, 0
        return heads, cut.r * x.shape[2] * x.shape[3]

    def keep_tokens(self, x: Tensor, p: float, site: Where, n: int, r: int) -> Tensor:
        """Return the dropout mask (0 or 1/(1-p)) of an x that holds the r-th of n equal slices of the tokens.

        x is [rows, tokens / n, ...], or [rows * tokens / n, width]; `site` is the path of the module that drops.
        """
        if x.ndim > 2 and self.real_tokens is None:
            return self.keep_mask(x, p, site, first=r * (x.numel() // max(x.shape[0], 1)))
        if x.ndim > 2:  # of rows without padding, the mask of all tokens is drawn
            whole = x.new_empty(()).expand(x.shape[0], n * x.shape[1], *x.shape[2:])
            return self.keep_mask(whole, p, site).narrow(1, r * x.shape[1], x.shape[1])
        tokens = x.shape[0] // max(self.position()[2], 1)
        whole = x.new_empty(()).expand(n * x.shape[0], x.shape[1])
        keep = self.keep_mask(whole, p, site).view(-1, n * tokens, x.shape[1])
        return keep.narrow(1, r * tokens, tokens).reshape(x.shape)

    def uniform(self, x: Tensor, site: Where) -> Tensor:
        """Return numbers in [0, 1) in the shape of x, drawn from one seed per row (for stochastic
        depth). The seeds depend on `site`, the path of the module that draws.
        """
        if torch.compiler.is_compiling():
            at = self.now, self.seed, self.has_rows
            return drawn_uniform(*at, *in_graph(site), x.shape, x.dtype, x.device)
        if self.hashes(x.device):  # drawing on the host would make the device wait
            counter = torch.arange(x[0].numel(), device=x.device)
            bits = hashed_bits(counter, self.seeds(x, site)[:, None])
            return (bits / 0x1000000).to(x.dtype).view(x.shape)
        import numpy as np

        seeds = self.cells(len(x), site)
        drawn = [np.random.Generator(np.random.SFC64(s)).random(x[0].numel()) for s in seeds]
        return torch.from_numpy(np.stack(drawn)).to(x.device, x.dtype).view(x.shape)


def _stream(at: Tensor, seed: int, rows: bool, real: Tensor | None) -> RandomStream:
    step, first_row, num_rows = at.tolist()  # a CPU tensor, so no wait for the device
    if num_rows == NOWHERE:
        problem = "a compiled module that is called alone, not by the model, would repeat its dropout masks"
        hint = "call the module through the model's forward, or uncompiled"
        raise SlapoError("dropout", "torch.compile", problem, hint)
    GRAPHS[0] += 1
    place = (first_row, num_rows) if rows else (0, 0)
    stream = RandomStream(seed, step, *place, device_seeds=_SEEDS.held, is_open=True)
    stream.real_tokens = real if rows else None
    return stream


def in_graph(site: Where) -> tuple[Tensor | None, str]:
    """Return the arguments (key, site) by which custom operators get a module's path: (None, path). For a SiteName, a
    module in a block, (hash of the block's path as a tensor, rest of the path), so that blocks share a graph.
    """
    return (site.key, site.suffix) if isinstance(site, SiteName) else (None, str(site))


def _whole(key: Tensor | None, site: str) -> int:
    return zlib.crc32(site.encode(), 0 if key is None else int(key))


@torch.library.custom_op(f"{NAMESPACE}::drawn_mask", mutates_args=(), tags=UNSAFE)
def drawn_mask(
    at: Tensor, seed: int, rows: bool, real: Tensor | None, key: Tensor | None, site: str,
    heads: Sequence[int], first: int, shape: Sequence[int], p: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return the dropout mask (0 or 1/(1-p)) of a tensor of `shape` on a CPU; a custom op. `seed` is the run's.

    `at`, int64 [3], is (step, first row, number of rows) of the micro-batch; `rows` is True if masks depend on the row
    of the batch (axis 0); `real` [B, S] marks tokens that are no padding, or is None. If `key` is None, `site` is the
    module's path; else `key` is the hash of the path's beginning, and `site` the rest. `heads` are the global indices
    of axis 1, or empty; `first` elements of each row or head of the unsharded tensor come before this tensor's.
    """
    whole = torch.empty((), dtype=dtype).expand(list(shape))
    stream = _stream(at, seed, rows, real)
    return stream.keep_mask(whole, p, _whole(key, site), list(heads), first).clone()


@drawn_mask.register_fake
def _(at, seed, rows, real, key, site, heads, first, shape, p, dtype):
    return torch.empty(shape, dtype=dtype)


@torch.library.custom_op(f"{NAMESPACE}::drawn_uniform", mutates_args=(), tags=UNSAFE)
def drawn_uniform(
    at: Tensor, seed: int, rows: bool, key: Tensor | None, site: str,
    shape: Sequence[int], dtype: torch.dtype, device: torch.device,
) -> Tensor:  # fmt: skip
    """Return numbers in [0, 1) in `shape` on `device`; a custom op. `seed` is the run's. Each row has a seed of its
    own, the same in every micro-batch unless `rows` is True.

    `at`, int64 [3], is (step, first row, number of rows) of the micro-batch. If `key` is None, `site` is the module's
    path; else `key` is the hash of the path's beginning, and `site` the rest.
    """
    whole = torch.empty((), dtype=dtype, device=device).expand(list(shape))
    return _stream(at, seed, rows, None).uniform(whole, _whole(key, site))


@drawn_uniform.register_fake
def _(at, seed, rows, key, site, shape, dtype, device):
    return torch.empty(shape, dtype=dtype, device=device)


@torch.library.custom_op(f"{NAMESPACE}::drawn_seeds", mutates_args=(), tags=UNSAFE)
def drawn_seeds(
    at: Tensor, seed: int, rows: bool, key: Tensor | None, site: str,
    count: int, heads: Sequence[int], device: torch.device,
) -> Tensor:  # fmt: skip
    """Return the dropout seeds of a module for `count` rows, [count] or one per head [count * len(heads)]; a custom op.

    `seed` is the run's; `at`, int64 [3], is (step, first row, number of rows) of the micro-batch; `count` is a multiple
    of its rows if the module sees each several times. If `rows` is False, seeds depend on a row's index in the
    micro-batch only. If `key` is None, `site` is the module's path; else `key` is the hash of the path's beginning, and
    `site` the rest. `heads` are global indices, or empty.
    """
    return (
        _stream(at, seed, rows, None).found(device, _whole(key, site), count, list(heads)).clone()
    )


@drawn_seeds.register_fake
def _(at, seed, rows, key, site, count, heads, device):
    return torch.empty(count * max(len(heads), 1), dtype=torch.int64, device=device)


def dropout(
    x: Tensor, p: float, stream: RandomStream, site: Where, heads: Sequence[int] = ()
) -> Tensor:
    """Return attention weights x [B, H, s, T] times their dropout mask (0 or 1/(1-p)); for p = 0 return x.

    `stream` draws the mask for the path `site`; `heads` are the global indices of the H heads, () if x has all heads.
    """
    return x * stream.keep_queries(x, p, site, heads) if p > 0.0 else x


_DRAWING = threading.RLock()


@contextmanager
def drawn_from(seed: int | Tensor) -> Iterator[None]:
    """Context in which torch's global CPU generator starts from a seed or state; its state is restored afterwards.

    Only one thread at a time can be in this context, since ranks may be threads, which share the generator.
    """
    with _DRAWING, seeded(0 if isinstance(seed, Tensor) else seed):
        if isinstance(seed, Tensor):
            torch.set_rng_state(seed)
        yield
