"""Sums between ranks that are threads of one process have gloo's bits, and end when a rank fails or does not come."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from slapo_zoo.parallel.collectives import all_reduce_
from slapo_zoo.parallel.ranks.emulation import HostedRanks
from slapo_zoo.parallel.thread_sums import Meeting

# Fewer elements than ranks, lengths that do not divide, and more than one of gloo's segments.
LENGTHS = (1, 2, 7, 9, 588, 100_003, 2_500_000)
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def sums(rank, size, count):
    """Sum random tensors of all LENGTHS and DTYPES over the first `count` ranks and over all ranks."""
    group, found = dist.new_group(range(count)), []
    for number, (length, dtype) in enumerate((n, t) for n in LENGTHS for t in DTYPES):
        for of in (group, dist.group.WORLD) if rank < count else (dist.group.WORLD,):
            x = torch.randn(length, generator=torch.Generator().manual_seed(size * number + rank))
            found.append(all_reduce_((3 * x).to(dtype), of))
    return found


@pytest.mark.parametrize(("size", "count"), [(3, 2), (5, 4)])
def test_all_reduce_between_emulated_ranks_is_bit_equal_to_gloo(size, count):
    with HostedRanks(dist.HashStore(), range(size), size) as host:
        by_gloo = host.run(sums, size, count)
    with (
        HostedRanks(dist.HashStore(), range(size), size, stays=True) as host,
        patch.object(dist, "all_reduce", side_effect=AssertionError("gloo was called")),
    ):
        found = host.run(sums, size, count)
    for one, other in zip(found, by_gloo, strict=True):
        assert len(one) == len(other) >= len(LENGTHS) * len(DTYPES)
        assert all(map(torch.equal, one, other))


def failing(rank):
    if rank == 1:
        raise ValueError("rank 1 fails")
    return all_reduce_(torch.ones(3), dist.group.WORLD)


def test_failing_emulated_rank_stops_the_all_reduce_of_its_peers():
    with HostedRanks(dist.HashStore(), range(3), 3, timeout_s=500.0, stays=True) as host:
        for _ in range(2):
            with pytest.raises(ValueError, match="rank 1 fails"):
                host.run(failing)


def test_all_reduce_between_emulated_ranks_raises_when_a_peer_is_late():
    with pytest.raises(RuntimeError, match="Timed out waiting 50ms"):
        Meeting(2, 0.05).sum_(torch.ones(3), 0)
