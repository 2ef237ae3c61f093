"""Context parallelism: each of the n ranks of cp holds one contiguous part of the tokens of every row."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from slapo_zoo.parallel.collectives import all_gather, all_to_all, gather_along
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.replaced import replaced

# Attention on a rank: "gather": its queries, keys of all tokens; "ulysses": all tokens, some heads; "ring": its
# queries, keys of one rank after the other.
WAYS = ("gather", "ulysses", "ring")


@dataclass(frozen=True)
class TokenCut:
    """Sharding of a step's tokens over cp: of the n * s tokens of each row, this rank holds those from r * s to (r + 1) * s.

    Args:
        n: number of ranks of cp.
        r: this rank's coordinate on cp.
        group: process group of these ranks.
        way: how attention reaches the tokens of other ranks: "gather" (all keys and values), "ulysses" (all-to-all: all
            tokens, some heads) or "ring" (keys and values of one rank after the other).
    """

    n: int
    r: int
    group: Any
    way: str = WAYS[0]

    @classmethod
    def of(cls, mesh: Mesh, way: str = WAYS[0]) -> "TokenCut | None":
        """Return the TokenCut of a mesh: how its cp ranks shard each row's tokens; None when cp is 1. `way`, how
        attention gets other ranks' tokens, is "gather" (the default), "ulysses" or "ring"; other names are not refused
        here.
        """
        return cls(*mesh.place("cp"), mesh.group("cp"), way) if mesh.size("cp") > 1 else None

    @property
    def by_heads(self) -> bool:
        """Return whether each rank computes attention for some heads of all tokens, not for all heads of some tokens."""
        return self.way == "ulysses"

    def heads(self, heads: Sequence[int]) -> Sequence[int]:
        """Return those of `heads` (global indices) that attention computes on this rank: all, unless `way` is "ulysses"."""
        size = len(heads) // self.n if self.by_heads else len(heads)
        first = self.r * size if self.by_heads else 0
        return heads[first : first + size]

    def part(self, x: Tensor, axis: int) -> Tensor:
        """Return this rank's tokens of an x [.., n * s, ..] that holds all tokens along `axis`."""
        size = x.shape[axis] // self.n
        return x.narrow(axis, self.r * size, size).contiguous()

    def whole(self, x: Tensor, axis: int) -> Tensor:
        """All-gather x [.., s, ..] along `axis` to all n * s tokens; the backward reduce-scatters the gradient."""
        return all_gather(x, axis, self.group)

    def exchanged(self, x: Tensor) -> Tensor:
        """Reshard x [B, n * h, s, d] (this rank's tokens) to [B, h, n * s, d] (this rank's heads) by an all-to-all;
        the backward reshards the gradient the opposite way.
        """
        return all_to_all(x, 1, 2, self.group)

    def whole_of_numbers(self, x: Tensor, axis: int) -> Tensor:
        """All-gather x [.., s, ..], such as a mask or position ids, along `axis` to all n * s tokens; no gradient."""
        return gather_along(x, axis, self.group)


_NOW: ContextVar[TokenCut | None] = ContextVar("token_cut", default=None)


def cut_now() -> TokenCut | None:
    """Return how the running forward shards its tokens over cp; None if this rank holds all tokens."""
    return _NOW.get()


@contextmanager
def cutting(stream: Any, cut: TokenCut | None) -> Iterator[None]:
    """Context of the forwards and backwards of a step whose tokens are sharded over cp as `cut` says.

    Args:
        stream: the model's RandomStream (source of dropout masks); attention and dropout read `cut` from it.
        cut: how the tokens are sharded over cp; None for a step in which the rank holds all tokens.
    """
    token = _NOW.set(cut)
    try:
        with replaced(stream, "cut", cut):
            yield
    finally:
        _NOW.reset(token)
