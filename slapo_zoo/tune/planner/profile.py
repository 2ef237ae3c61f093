"""Profile of a model: the cost of a training step of each block, embedding and head, as numbers that scale with rows.

`profiling.py` measures these costs on fake tensors; the forecasts of memory and time use them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.utils._pytree import tree_map

from slapo_zoo.language.tape import Product

ROWS = (2, 4)  # row counts of the two profiles; with one row some operations run differently


class Work(NamedTuple):
    """Work that a device does in the forward or backward of one unit (a block, an embedding, a head).

    Args:
        products: the matrix products and attentions, with their sizes.
        moved: bytes that all other operations read and write when run one by one.
        ops: number of operations that write memory.
        fused: bytes read and written when chains of element-wise operations are fused.
        launches: number of kernels when fused.
        comm: bytes that a rank sends over tp in a ring of many ranks; with n ranks it sends (n - 1) / n of them.
        collectives: number of collectives over tp.
        cut_comm: bytes that a rank sends over cp in a ring of many ranks; with n ranks it sends (n - 1) / n of them.
        cut_collectives: number of collectives over cp.
        exchanged: the part of `cut_comm` that all-to-alls send, each rank to every other.
    """

    products: tuple[Product, ...] = ()
    moved: float = 0.0
    ops: float = 0.0
    fused: float = 0.0
    launches: float = 0.0
    comm: float = 0.0
    collectives: float = 0.0
    cut_comm: float = 0.0
    cut_collectives: float = 0.0
    exchanged: float = 0.0

    @property
    def flops(self) -> float:
        """Return the floating-point operations of all matrix products."""
        return sum(product.flops for product in self.products)

    def plus(self, other: "Work") -> "Work":
        """Return the sum of this work and `other`, field by field, for work that runs one after the other."""
        return Work(
            self.products + other.products, *map(sum, zip(self[1:], other[1:], strict=True))
        )

    def times(self, factor: float) -> "Work":
        """Return this work for `factor` times as many tokens: every amount is multiplied by `factor`."""
        products = (
            p._replace(batch=factor * p.batch, flops=factor * p.flops, moved=factor * p.moved)
            for p in self.products
        )
        return Work(tuple(products), *(factor * n for n in self[1:]))


class Use(NamedTuple):
    """Cost of one call of a unit (a block, an embedding, a head) on one tp rank, for one micro-batch.

    Args:
        forward: work of the forward: matrix products, bytes moved, kernel launches, bytes sent.
        backward: work of the backward.
        attention: the part of the forward that is softmax(q k') v.
        kept: bytes that the forward keeps for the backward.
        attention_kept: the part of `kept` between q, k, v and the output of attention.
        gathered: bytes that the forward gathered over tp for sequence parallelism.
        matmuls: bytes of the outputs of matrix products and fused attention.
        output: bytes of the tensors that the unit returns, without those that an earlier unit returned too.
        forward_peak: most bytes in use in the forward, above what was in use when it began.
        backward_peak: most activation bytes in use in the backward, above the same level.
        backward_growth: most bytes in use in the backward, above the same level, with gradients of its own parameters.
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
        """Interpolate each number of the costs: `share` 0 gives this cost, 1 gives `other`; above 1 extrapolates."""
        return tree_map(lambda a, b: a + (b - a) * share, self, other)

    def times(self, factor: float) -> "Use":
        """Return the cost for `factor` times as many tokens, if all costs grow in proportion."""
        if factor == 1:
            return self
        forward, backward, attention = (work.times(factor) for work in self[:3])
        return Use(forward, backward, attention, *(factor * x for x in self[3:]))


@dataclass(frozen=True)
class Unit:
    """Costs of one call of a unit (a block, an embedding, a head) on one tp rank.

    Args:
        name: path of the module.
        few: operations and bytes, a `Use`, for a micro-batch of ROWS[0] (2) rows.
        many: the same for a micro-batch of ROWS[1] (4) rows.
        parameters: bytes of the parameters that only this unit has.
        largest: bytes of the largest of these parameters.
        is_block: whether the unit is a block, after which a stage may end and which may be recomputed.
    """

    name: str
    few: Use
    many: Use
    parameters: int = 0
    largest: int = 0
    is_block: bool = False

    def at(self, rows: int) -> Use:
        """Return the cost of this block, embedding or head for a micro-batch of `rows` rows."""
        return self.few.toward(self.many, (rows - ROWS[0]) / (ROWS[1] - ROWS[0]))


@dataclass(frozen=True)
class Profile:
    """Costs of every unit (block, embedding, head) of a model on one tp rank.

    Args:
        units: the calls of units, in the order of the forward.
        shared: (bytes, names of units) of each parameter that several units share.
        seq_len: tokens of a row.
        itemsize: bytes of a parameter's element.
        total_parameters: number of parameters of the whole model, tied ones counted once.
    """

    units: list[Unit]
    shared: list[tuple[int, frozenset[str]]]
    seq_len: int
    itemsize: int
    total_parameters: int
    cache: dict[Any, Any] = field(default_factory=dict, compare=False)

    def uses(self, rows: int) -> list[Use]:
        """Return the cost of every block, embedding and head for a micro-batch of `rows` rows."""
        if rows not in self.cache:
            alike = {(id(unit.few), id(unit.many)): unit for unit in self.units}
            found = {key: unit.at(rows) for key, unit in alike.items()}
            self.cache[rows] = [found[id(unit.few), id(unit.many)] for unit in self.units]
        return self.cache[rows]


@dataclass(frozen=True)
class Recompute:
    """Policy for the activations of each unit (a block, an embedding, a head): keep, recompute or offload them.

    Args:
        blocks: names of the blocks that are recomputed with `policy`.
        policy: what those blocks keep: "" nothing, "save_matmuls" outputs of matrix products, "attention" all but what
            lies between q, k, v and the output of attention, "offload" everything in host memory, "sharded" only a tp
            shard of their input.
        regathered: share (0 to 1) of `Use.gathered` that the backward gathers again and the forward need not keep.
        each: unit --> its own policy instead of `policy`: "keep" (all), "recompute" (as ""), or one of those above.
        shares: number of tp ranks over which "sharded" divides a block's input.
    """

    blocks: frozenset[str] = frozenset()
    policy: str = ""
    regathered: float = 0.0
    each: Mapping[str, str] = field(default_factory=dict)
    shares: int = 1

    def of(self, name: str) -> str:
        """Return the policy of module `name`: "keep", "recompute", "save_matmuls", "attention", "offload" or "sharded".
        The class says what each keeps; "keep" is all, "recompute" nothing.
        """
        found = self.policy if name in self.blocks else "keep"
        return self.each.get(name, found) or "recompute"

    def held(self, unit: Unit, use: Use) -> float:
        """Return the device bytes that `unit`, a block, embedding or head of cost `use`, keeps for its backward."""
        kept = use.kept - self.regathered * use.gathered
        policy = self.of(unit.name)
        if policy in ("keep", "offload"):
            return kept if policy == "keep" else use.before
        if policy == "attention":
            return kept - use.attention_kept
        return min(kept, use.before + use.output + use.matmuls * (policy == "save_matmuls"))

    def elsewhere(self, units: Sequence[Unit], uses: Sequence[Use]) -> list[float]:
        """Return for each of `units` (block, embedding, head) the bytes of its saved input that this rank does not
        keep, as under the policy "sharded" other tp ranks do; 0 under other policies. `uses` are the units' costs, in
        order.
        """
        outputs = (u.output for n, u in zip(units, uses, strict=True) if n.is_block)
        hidden = min(outputs, default=0.0)
        share = hidden * (1 - 1 / self.shares)
        return [share * (self.of(unit.name) == "sharded") for unit in units]
