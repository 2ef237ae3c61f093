"""Cost of one unit of a model in a training step, as plain numbers that scale with the rows."""

from typing import NamedTuple

from torch.utils._pytree import tree_map

from slapo_zoo.language.products import Product


class Work(NamedTuple):
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
        return Work(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, factor: float) -> "Work":
        """Return work of the same kind for `factor` times as many tokens."""
        products = (
            p._replace(batch=factor * p.batch, flops=factor * p.flops, moved=factor * p.moved)
            for p in self.products
        )
        return Work(tuple(products), *(factor * n for n in self[1:]))


class Use(NamedTuple):
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
        return tree_map(lambda a, b: a + (b - a) * share, self, other)

    def times(self, factor: float) -> "Use":
        """The use for `factor` times as many tokens, where all costs grow evenly with them."""
        if factor == 1:
            return self
        return Use(*(x.times(factor) if isinstance(x, Work) else factor * x for x in self))
