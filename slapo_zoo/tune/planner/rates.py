"""How long a device takes for a matrix product, and a group of devices for a collective."""

import math
from functools import lru_cache

from slapo_zoo.language.products import Product
from slapo_zoo.tune.planner.hardware import Hardware

# (rows, columns, rate beside the largest) of the tiles that a GPU's library cuts a product into
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (256, 64, 0.85), (64, 256, 0.85),
         (128, 64, 0.75), (64, 128, 0.75), (64, 64, 0.55))  # fmt: skip
FUSED_ATTENTION = 0.6  # rate of a fused attention beside a large product


def product_seconds(hardware: Hardware, dtype: str, product: Product) -> float:
    """Return the seconds of one batch of matrix products, or of a fused attention: by flops or by bytes.

    On a GPU whole waves of tiles run, one tile on each multiprocessor; the best tile is taken. Before a
    tile's first product and after its last a multiprocessor fills and drains, as if the sum were longer.
    """
    rate, moved = hardware.flops(dtype), product.moved / hardware.bandwidth
    if not product.n:
        return max(product.flops / (rate * FUSED_ATTENTION), moved)
    if not hardware.multiprocessors:
        return max(product.flops / rate, moved)
    return max(_tiled(*product[:4], hardware.multiprocessors, hardware.fill) / rate, moved)


@lru_cache(maxsize=1 << 16)
def _tiled(batch: float, m: float, n: float, k: float, count: int, fill: float) -> float:
    """Operations that would take as long at the full rate."""
    return min(
        math.ceil(batch * math.ceil(m / rows) * math.ceil(n / columns) / count)
        * count * 2.0 * rows * columns * (k + fill) / share
        for rows, columns, share in TILES
    )  # fmt: skip


def group_rate(hardware: Hardware, ranks: int, stride: int = 1, cards: int | None = None) -> float:
    """Return the bytes per second of a ring of `ranks` devices that lie `stride` apart.

    Across nodes every node's share of the ring uses the network cards of its own devices, as the rings of
    NCCL do: with eight members in a node eight cards carry one ring. `cards`: at most so many.
    """
    if ranks * stride <= hardware.per_node:
        return hardware.link
    members = max(1, hardware.per_node // stride)
    return min(hardware.link, min(members, cards or members) * hardware.network)


def collective_seconds(
    hardware: Hardware, ranks: int, moved: float, count: float, stride: int = 1,
    cards: int | None = None,
) -> float:  # fmt: skip
    """Return the seconds of `count` collectives over a group.

    Args:
        hardware: the cluster.
        ranks: of the group.
        moved: bytes that a rank would send on a ring of very many ranks, all collectives together.
        count: of collectives.
        stride: distance of the group's neighbours.
        cards: of a node that carry a ring; None for one of each member.
    """
    if ranks == 1:
        return 0.0
    nodes = max(1, ranks * stride // hardware.per_node)
    inside = ranks if nodes == 1 else max(1, hardware.per_node // stride)
    hops = inside + hardware.node_hops * math.log2(nodes)
    wait = hardware.latency_s + hardware.hop_s * hops
    return count * wait + moved * (ranks - 1) / ranks / group_rate(hardware, ranks, stride, cards)
