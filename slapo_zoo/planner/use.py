"""Cost of one unit of a model in a training step, as plain numbers that scale with the rows."""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple


class Product(NamedTuple):
    """A batch of matrix products [m, k] x [k, n], or with `n = 0` an attention of m queries and k keys.

    Args:
        batch: number of products, or rows times heads.
        m: rows of the first matrix.
        n: columns of the second matrix; 0 for a fused attention.
        k: what is summed over; of a fused attention the number of keys.
        flops: floating-point operations of all of them.
        moved: bytes that they read and write.
    """

    batch: float
    m: float
    n: float
    k: float
    flops: float
    moved: float


@dataclass(frozen=True)
class Work:
    """Work of a device in one phase of a unit.

    Args:
        products: matrix products and attentions.
        moved: bytes that all other operations read and write, each by itself.
        ops: operations that write memory.
        fused: bytes that are read and written where chains of element-wise operations are one kernel.
        launches: kernels then.
        comm: bytes that cross the tp ranks on a ring of many.
        collectives: number of them.
    """

    products: tuple[Product, ...] = ()
    moved: float = 0.0
    ops: float = 0.0
    fused: float = 0.0
    launches: float = 0.0
    comm: float = 0.0
    collectives: float = 0.0

    @property
    def flops(self) -> float:
        """Floating-point operations of all matrix products."""
        return sum(product.flops for product in self.products)

    def plus(self, other: "Work") -> "Work":
        """Return the work of both, one after the other."""
        numbers = (a + b for a, b in zip(_numbers(self), _numbers(other), strict=True))
        return Work(self.products + other.products, *numbers)

    def toward(self, other: "Work", share: float) -> "Work":
        """The point at `share` of the way from here to the other."""
        products = tuple(
            Product(*(x + (y - x) * share for x, y in zip(a, b, strict=True)))
            for a, b in zip(self.products, other.products, strict=True)
        )
        numbers = (
            a + (b - a) * share for a, b in zip(_numbers(self), _numbers(other), strict=True)
        )
        return Work(products, *numbers)


def _numbers(work: Work) -> tuple[float, ...]:
    return (work.moved, work.ops, work.fused, work.launches, work.comm, work.collectives)


@dataclass(frozen=True)
class Use:
    """One call of a unit on one tp rank, for a micro-batch.

    The peaks are counted above what was alive when the forward of the unit began (and, for the
    backward, above the gradients of parameters).

    Args:
        forward: what the device does in the forward.
        backward: what it does in the backward.
        attention: the part of the forward that is softmax(q k') v.
        kept: bytes that the forward leaves alive.
        attention_kept: the part of them that lies between q, k, v and the output of attention.
        gathered: bytes that its forward gathered over tp, of sequence parallelism.
        matmuls: bytes of its results of matrix products and fused attention.
        output: bytes that it returns and that no unit before returned.
        forward_peak: most bytes alive in its forward.
        backward_peak: most bytes alive in its backward.
        backward_growth: most bytes alive in its backward, gradients of its own parameters included.
        received: bytes that a stage receives which begins with this unit.
        before: the part of `kept` that was made before the unit began, behind the one before it.
    """

    forward: Work = Work()
    backward: Work = Work()
    attention: Work = Work()
    kept: float = 0.0
    attention_kept: float = 0.0
    gathered: float = 0.0
    matmuls: float = 0.0
    output: float = 0.0
    forward_peak: float = 0.0
    backward_peak: float = 0.0
    backward_growth: float = 0.0
    received: float = 0.0
    before: float = 0.0

    def toward(self, other: "Use", share: float) -> "Use":
        """The point at `share` of the way from here to the other; beyond 1 it is extrapolated."""
        found = []
        for field in dataclasses.fields(self):
            a, b = getattr(self, field.name), getattr(other, field.name)
            found.append(a.toward(b, share) if isinstance(a, Work) else a + (b - a) * share)
        return Use(*found)

    def times(self, factor: float) -> "Use":
        """The use for `factor` times as many tokens, where all costs grow evenly with them."""
        if factor == 1:
            return self
        found = []
        for field in dataclasses.fields(self):
            x = getattr(self, field.name)
            if isinstance(x, Work):
                products = (
                    p._replace(
                        batch=factor * p.batch, flops=factor * p.flops, moved=factor * p.moved
                    )
                    for p in x.products
                )
                found.append(Work(tuple(products), *(factor * n for n in _numbers(x))))
            else:
                found.append(factor * x)
        return Use(*found)
