"""Cost of one unit of a model in a training step, as plain numbers that scale with the rows."""

from typing import NamedTuple

from torch.utils._pytree import tree_map

from slapo_zoo.language.products import Product


class Work(NamedTuple):
    """Work of a device in the forward or backward of one unit.

    Args:
        products: matrix products and attentions.
        moved: bytes that all other operations read and write when run one by one.
        ops: number of operations that write memory.
        fused: bytes read and written when chains of element-wise operations are fused.
        launches: number of kernels when fused.
        comm: bytes that a rank sends over tp, in a ring of many ranks.
        collectives: number of collectives over tp.
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
        """Return the sum of two pieces of work that run one after the other."""
        return Work(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, factor: float) -> "Work":
        """Return work of the same kind for `factor` times as many tokens."""
        products = (
            p._replace(batch=factor * p.batch, flops=factor * p.flops, moved=factor * p.moved)
            for p in self.products
        )
        return Work(tuple(products), *(factor * n for n in self[1:]))


class Use(NamedTuple):
    """Cost of one call of a unit on one tp rank, for one micro-batch.

    Peaks are bytes above what was alive when the forward of the unit began (in the backward, also above
    the gradients of parameters).

    Args:
        forward: work of the forward.
        backward: work of the backward.
        attention: the part of the forward that is softmax(q k') v.
        kept: bytes that the forward keeps for the backward.
        attention_kept: the part of `kept` between q, k, v and the output of attention.
        gathered: bytes that the forward gathered over tp for sequence parallelism.
        matmuls: bytes of the outputs of matrix products and fused attention.
        output: bytes that the unit returns and no unit before returned.
        forward_peak: peak bytes in the forward.
        backward_peak: peak bytes in the backward.
        backward_growth: peak bytes in the backward, gradients of the unit's own parameters included.
        received: bytes that a stage that begins with this unit receives from the stage before.
        before: the part of `kept` that was made after the previous unit and before this one.
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
        """Interpolate linearly between two costs: self at share 0, other at 1; extrapolate beyond 1."""
        return tree_map(lambda a, b: a + (b - a) * share, self, other)

    def times(self, factor: float) -> "Use":
        """Return the cost for `factor` times as many tokens, if all costs grow in proportion."""
        if factor == 1:
            return self
        return Use(*(x.times(factor) if isinstance(x, Work) else factor * x for x in self))
