"""Placements: the ranks together hold an axis once and in order, padded or replicated only on request."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slapo_zoo.parallel.placement import Placement, Run, TensorSpec

COUNTS = st.integers(1, 12)
RANKS = st.integers(1, 9)


@st.composite
def divided(draw, groups=True):
    """Return a placement, the size of its axis and a number of ranks that fit together."""
    n, unit = draw(RANKS), draw(st.integers(1, 5))
    many = draw(st.integers(1, 4)) if groups else 1
    sizes = tuple(unit * draw(st.integers(n, n + 12)) for _ in range(many))
    return Placement(0, groups=sizes if many > 1 else (), unit=unit), sum(sizes), n


def indices(runs):
    return [i for run in runs for i in range(*run)]


@settings(max_examples=200, deadline=None)
@given(divided())
def test_placement_shards_of_all_ranks_partition_the_axis(case):
    placement, size, n = case
    assert placement.problem(size, n) == ""
    held = [indices(placement.runs(size, n, r)) for r in range(n)]
    assert sorted(i for rank in held for i in rank) == list(range(size))
    for r, mine in enumerate(held):
        assert mine == sorted(mine)
        assert len(mine) == placement.local_size(size, n, r)
        assert placement.replicas(size, n, r) == 1
    most = max(map(len, held)) - min(map(len, held))
    assert most <= placement.unit * len(placement.groups or (size,))


@settings(max_examples=200, deadline=None)
@given(divided())
def test_placement_never_splits_a_head_and_gives_q_k_and_v_the_same_heads(case):
    placement, size, n = case
    start = 0
    for group in placement.groups or (size,):
        for r in range(n):
            runs = placement.runs(size, n, r)
            mine = [i - start for i in indices(runs) if start <= i < start + group]
            assert mine == list(range(mine[0], mine[-1] + 1))
            assert mine[0] % placement.unit == 0
            assert len(mine) % placement.unit == 0
            alone = Placement(0, unit=placement.unit).runs(group, n, r)
            assert mine == indices(alone)  # heads of q, k and v meet on one rank
        start += group


@settings(max_examples=200, deadline=None)
@given(COUNTS, st.integers(1, 4), RANKS)
def test_placement_with_padding_gives_every_rank_a_shard_of_equal_length(units, unit, n):
    """With more ranks than units the last ranks hold only padding."""
    placement, size = Placement(0, unit=unit, pad=True), units * unit
    assert placement.problem(size, n) == ""
    held = [indices(placement.runs(size, n, r)) for r in range(n)]
    assert [i for rank in held for i in rank] == list(range(size))
    lengths = {placement.local_size(size, n, r) for r in range(n)}
    (length,) = lengths
    assert length == -(-units // n) * unit
    assert all(len(rank) <= length for rank in held)
    assert all(rank[0] == r * length for r, rank in enumerate(held) if rank)


@settings(max_examples=200, deadline=None)
@given(COUNTS, st.integers(1, 4), RANKS)
def test_placement_replicates_kv_heads_on_neighbouring_ranks(units, unit, n):
    placement, size = Placement(0, unit=unit, replicate=True), units * unit
    assert placement.problem(size, n) == ""
    runs = [placement.runs(size, n, r) for r in range(n)]
    assert {i for mine in runs for i in indices(mine)} == set(range(size))
    assert runs == sorted(runs)  # holders of a unit are neighbours
    for r, mine in enumerate(runs):
        assert placement.replicas(size, n, r) == runs.count(mine)
        if units < n:
            assert len(indices(mine)) == unit
    if units >= n:
        assert runs == [Placement(0, unit=unit).runs(size, n, r) for r in range(n)]


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 6), st.integers(2, 6), st.integers(1, 3), RANKS)
def test_placement_keeps_query_heads_on_the_rank_of_their_kv_head(kv_heads, together, unit, n):
    """Each rank holds full groups of query heads, or an equal part of one group, with the KV head of the group."""
    queries = Placement(0, unit=unit, together=together)
    keys = Placement(0, unit=unit, replicate=True)
    size, kv_size = kv_heads * together * unit, kv_heads * unit
    if problem := queries.problem(size, n):
        assert kv_heads < n
        assert n % kv_heads or together % (n // kv_heads), problem
        return
    held = [indices(queries.runs(size, n, r)) for r in range(n)]
    assert [i for rank in held for i in rank] == list(range(size))
    for r, mine in enumerate(held):
        heads = sorted({i // unit for i in mine})
        kv = sorted({i // unit for i in indices(keys.runs(kv_size, n, r))})
        assert kv == sorted({head // together for head in heads})
        assert len(heads) % len(kv) == 0
        assert [h // together for h in heads] == [
            k for k in kv for _ in range(len(heads) // len(kv))
        ]


def test_placement_of_fused_grouped_query_qkv_keeps_kv_heads_with_their_query_heads():
    """Phi-3: [q | k | v] of 6 query heads over 3 KV heads, each of 2 columns."""
    fused = Placement(0, groups=(12, 6, 6), unit=2, together=2)
    assert [fused.runs(24, 2, r) for r in range(2)] == [
        [(0, 8), (12, 16), (18, 22)],
        [(8, 12), (16, 18), (22, 24)],
    ]


def test_placement_with_one_kv_head_shards_query_heads_and_kv_columns_separately():
    """Falcon-7B: 5 query heads of 4 columns, then k and v of the only KV head."""
    fused = Placement(0, unit=4, shared=8)
    assert fused.units(28) == [5]
    assert [fused.runs(28, 3, r) for r in range(3)] == [
        [(0, 8), (20, 23)],
        [(8, 16), (23, 26)],
        [(16, 20), (26, 28)],
    ]
    assert [fused.local_size(28, 3, r) for r in range(3)] == [11, 11, 6]


@pytest.mark.parametrize(
    ("placement", "size", "n", "problem"),
    [
        (Placement(0, shared=2), 9, 3, "the last 2 indices, which all ranks need, cannot be sharded over tp=3"),
        (Placement(0), 3, 4, "3 units of 1 cannot be sharded over tp=4"),
        (Placement(0, unit=6), 30, 6, "5 units of 6 cannot be sharded over tp=6"),
        (Placement(0, "dp"), 1, 2, "cannot be sharded over dp=2"),
        (Placement(0, unit=4), 30, 2, "(30,) are not multiples of unit 4"),
        (Placement(1, groups=(8, 8)), 24, 2, "axis 1 has size 24, but groups (8, 8) add up to 16"),
        (Placement(0, groups=(4, 1), unit=1), 5, 2, "1 units of 1 cannot be sharded"),
        (Placement(0, together=4), 6, 2, "found 6 query heads, expected a multiple of the 4"),
        (Placement(0, together=4), 8, 3, "2 KV heads of 4 query heads cannot be sharded over tp=3"),
        (Placement(0, groups=(4, 4), pad=True), 8, 2, "only an axis of one group can be padded"),
        (Placement(0, groups=(8, 2, 2), together=4), 12, 4, "2 units of 1 cannot be sharded over tp=4"),
        (Placement(0, groups=(8, 8, 8), together=4), 24, 2, "the groups after the first (k, v) have [8, 8] heads, expected 2"),
    ],
)  # fmt: skip
def test_placement_on_an_axis_that_tp_does_not_divide_is_refused(placement, size, n, problem):
    assert problem in placement.problem(size, n)


def test_placement_of_fused_qkv_shards_q_k_and_v_separately():
    """5 heads of 2 over 2 ranks: q, k and v of heads 0..2, then of heads 3..4."""
    placement = Placement(1, groups=(10, 10, 10), unit=2)
    assert placement.runs(30, 2, 0) == [Run(0, 6), Run(10, 16), Run(20, 26)]
    assert placement.runs(30, 2, 1) == [Run(6, 10), Run(16, 20), Run(26, 30)]
    assert placement.local_shape((7, 30), 2, 1) == (7, 12)


def test_tensor_spec_local_shape_is_full_when_unsharded_and_padded_when_pad_is_set():
    assert TensorSpec("w", (7, 4), "float32").local_shape(4, 3) == (7, 4)
    assert TensorSpec("w", (7, 4), "float32", Placement(0, pad=True)).local_shape(4, 3) == (2, 4)
