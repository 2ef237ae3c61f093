"""Seconds of a matrix product on a device, and of a collective over a group of devices."""

import math
from functools import lru_cache

from slapo_zoo.language.tape import Product
from slapo_zoo.tune.planner.hardware import Hardware

# (rows, columns, rate relative to the largest) of the tiles into which a GPU's library splits a product
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (256, 64, 0.85), (64, 256, 0.85),
         (128, 64, 0.75), (64, 128, 0.75), (64, 64, 0.55))  # fmt: skip
# rate of a fused attention relative to a large product, where operations that a causal one skips are counted
FUSED_ATTENTION = 0.6
UNSKIPPED = (
    0.5  # factor of that rate with cp: queries have a mask over all keys, and none is skipped
)


def product_seconds(hardware: Hardware, dtype: str, product: Product) -> float:
    """Return the seconds of a batch of matrix products or of a fused attention: limited by flops or by bytes.

    On a GPU the product runs as waves of tiles, one tile per multiprocessor, in the best tile shape;
    `hardware.fill` is the extra time of a tile.
    """
    rate, moved = hardware.flops(dtype), product.moved / hardware.bandwidth
    if not product.n:
        share = FUSED_ATTENTION * (UNSKIPPED if product.k > product.m else 1.0)
        return max(product.flops / (rate * share), moved)
    if not hardware.multiprocessors:
        return max(product.flops / rate, moved)
    return max(_tiled(*product[:4], hardware.multiprocessors, hardware.fill) / rate, moved)


@lru_cache(maxsize=1 << 16)
def _tiled(batch: float, m: float, n: float, k: float, count: int, fill: float) -> float:
    """Return the operations of `batch` products [m, k] x [k, n], counted so that tiles and waves which are not full
    cost as much as full ones.

    `count` is the number of multiprocessors, `fill` the extra inner size per tile. The best tile shape is taken.
    """
    return min(
        math.ceil(batch * math.ceil(m / rows) * math.ceil(n / columns) / count)
        * count * 2.0 * rows * columns * (k + fill) / share
        for rows, columns, share in TILES
    )  # fmt: skip


def group_rate(hardware: Hardware, ranks: int, stride: int = 1, cards: int | None = None) -> float:
    """Return the bytes per second of a ring of `ranks` devices whose ranks are `stride` apart.

    Across nodes the ranks of a node share its network cards, of which at most `cards` are used (None: one per
    rank), as in NCCL's rings.
    """
    if ranks * stride <= hardware.per_node:
        return hardware.link
    members = max(1, hardware.per_node // stride)
    return min(hardware.link, min(members, cards or members) * hardware.network)


def collective_seconds(
    hardware: Hardware, ranks: int, moved: float, count: float, stride: int = 1,
    cards: int | None = None,
) -> float:  # fmt: skip
    """Return the seconds of `count` collectives over a group of `ranks` devices that are `stride` ranks apart.

    `moved` is the bytes that a rank sends in all these collectives, in a ring of many ranks. `cards` is the
    number of network cards per node that carry the ring; None: one per rank of the node.
    """
    if ranks == 1:
        return 0.0
    nodes = max(1, ranks * stride // hardware.per_node)
    inside = ranks if nodes == 1 else max(1, hardware.per_node // stride)
    hops = inside + hardware.node_hops * math.log2(nodes)
    wait = hardware.latency_s + hardware.hop_s * hops
    return count * wait + moved * (ranks - 1) / ranks / group_rate(hardware, ranks, stride, cards)


def exchange_seconds(hardware: Hardware, ranks: int, moved: float, stride: int = 1) -> float:
    """Return the seconds of all-to-alls over `ranks` devices that are `stride` ranks apart, without the time to start.

    `moved` is the bytes that a rank resharded in them: it keeps one of `ranks` equal parts, and sends each other part to
    its rank, over a link within the node and over its network card beyond.
    """
    inside = min(ranks, max(1, hardware.per_node // stride))
    away = (ranks - inside) / ranks / hardware.network if ranks > inside else 0.0
    return moved * max((inside - 1) / ranks / hardware.link, away)
