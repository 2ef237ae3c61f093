"""All-reduce between virtual ranks (threads of a process, by `exact=`): in memory, with the bits of gloo's all-reduce.

gloo sums in a ring: it splits a tensor into one chunk per rank, and sums chunk c in the order of the ranks c - 1, c - 2,
..., c (modulo their number). Here the thread of rank c sums chunk c in this order and writes it to all ranks.
"""

import threading
import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

SEGMENT = 1 << 20  # bytes; gloo sends no larger piece
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
_OF_THREAD = threading.local()  # `meetings`: those of the ranks beside which this thread runs


class Meetings:
    """Points where ranks that are threads of this process meet to sum tensors: one point per process group.

    Args:
        ranks: global ranks that run in this process.
        timeout_s: seconds after which a waiting rank raises.
    """

    def __init__(self, ranks: Iterable[int], timeout_s: float):
        self.ranks, self.timeout_s, self._lost = frozenset(ranks), timeout_s, False
        self._found: dict[Any, Meeting] = {}
        self._lock = threading.Lock()

    def enter(self) -> None:
        """Make `thread_sums.all_reduce` sum at these meeting points in the current thread, which runs one rank."""
        _OF_THREAD.meetings = self

    def of(self, group: Any) -> "Meeting | None":
        """Return the Meeting whose `sum_` sums tensors over a group; None if a rank is in another process."""
        members = tuple(dist.get_process_group_ranks(group))
        if not self.ranks.issuperset(members):
            return None
        with self._lock:
            found = self._found.setdefault((group.group_name, members), Meeting(len(members), self.timeout_s))  # fmt: skip
            if self._lost:
                found.barrier.abort()
            return found

    def abort(self) -> None:
        """Let all ranks that wait at a meeting, or will wait, raise, because a rank has left."""
        with self._lock:
            self._lost = True
            for meeting in self._found.values():
                meeting.barrier.abort()


class Meeting:
    """Point where the `size` ranks of one process group meet to sum their tensors."""

    def __init__(self, size: int, timeout_s: float):
        self.tensors: list[Any] = [None] * size  # by rank of the group
        self.barrier = threading.Barrier(size, timeout=timeout_s)
        self.timeout_s = timeout_s

    def sum_(self, x: Tensor, rank: int) -> None:
        """Replace x (contiguous) by its sum over the group's ranks, threads that call this and wait for all."""
        size, flat = len(self.tensors), x.detach().view(-1)
        self.tensors[rank] = flat
        self._wait()
        length = _chunk(flat, size)
        chunks = [y[rank * length : (rank + 1) * length] for y in self.tensors]
        total = chunks[rank - 1].clone()
        for step in range(2, size + 1):
            total += chunks[rank - step]
        for chunk in chunks:
            chunk.copy_(total)
        self._wait()
        self.tensors[rank] = None

    def _wait(self) -> None:
        begin = time.monotonic()
        try:
            self.barrier.wait()
        except threading.BrokenBarrierError:
            text = "Connection closed by peer"
            if time.monotonic() - begin >= self.timeout_s:
                text = f"Timed out waiting {1e3 * self.timeout_s:.0f}ms"
            raise RuntimeError(f"{text} (ranks are threads of this process)") from None


def runs_a_rank() -> bool:
    """Return whether this thread is a virtual rank, of which a load with `exact=` runs several in one process."""
    return hasattr(_OF_THREAD, "meetings")


def _chunk(flat: Tensor, size: int) -> int:
    """Return the number of elements of a chunk of gloo's ring of `size` ranks; the last chunks may be shorter or empty."""
    item, total = flat.element_size(), flat.nbytes
    per_rank = max(-(-total // (SEGMENT * size)), 2)
    return per_rank * -(-total // (per_rank * size * item))


def all_reduce(x: Tensor, op: Any, group: Any) -> None:
    """All-reduce x in place, as `dist.all_reduce` does. Ranks that are threads of one process (virtual ranks, which
    `exact=` runs) add up a contiguous x (op SUM; fp32, fp64, bf16) themselves, if all ranks of the group are here.

    Else, and under a dispatch mode, which is to see the same operators as in separate processes, gloo does.
    """
    meetings = None if torch.compiler.is_compiling() else getattr(_OF_THREAD, "meetings", None)
    fits = op == dist.ReduceOp.SUM and x.dtype in DTYPES and x.is_contiguous()
    if meetings and fits and _get_current_dispatch_mode() is None and (found := meetings.of(group)):
        found.sum_(x, dist.get_rank(group))
    else:
        dist.all_reduce(x, op=op, group=group)
