"""The mesh: ranks and coordinates, the process groups of every rank, and invalid meshes."""

import itertools
import pickle
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ranks import COLLECTIVE_TIMEOUT_S
from slapo_zoo import Mesh, MeshError, SlapoError

MESH_DIMS = [dim.name for dim in Mesh.DIMS]

SIZES = [(1, 1, 1), (2, 1, 1), (3, 2, 1), (2, 2, 2), (4, 1, 3), (1, 5, 2)]


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize(("tp", "pp", "dp"), SIZES)
def test_mesh_maps_every_rank_to_distinct_coordinates_with_tp_fastest_and_back(tp, pp, dp, cp):
    """tp varies fastest, then cp, dp and pp; every rank has coordinates of its own."""
    seen = {}
    for rank in range(tp * pp * dp * cp):
        mesh = Mesh(tp, pp, dp, rank, cp=cp)
        coords = tuple(mesh.coord(mesh_dim) for mesh_dim in MESH_DIMS)
        assert mesh.at() == mesh.at(**dict(zip(MESH_DIMS, coords, strict=True))) == rank
        seen[coords] = rank
    order = itertools.product(range(pp), range(dp), range(cp), range(tp))
    assert list(seen) == list(order)


@pytest.mark.parametrize(("tp", "pp", "dp"), SIZES)
def test_mesh_peers_along_each_dim_partition_all_ranks(tp, pp, dp):
    world = Mesh(tp, pp, dp).world_size
    for mesh_dim in MESH_DIMS:
        groups = {tuple(Mesh(tp, pp, dp, rank).peers(mesh_dim)) for rank in range(world)}
        assert sorted(rank for group in groups for rank in group) == list(range(world))
        for rank in range(world):
            mesh = Mesh(tp, pp, dp, rank)
            peers = mesh.peers(mesh_dim)
            assert peers[mesh.coord(mesh_dim)] == rank
            assert len(peers) == mesh.size(mesh_dim)
    assert [Mesh(tp, pp, dp, 0).peers("tp")] == [list(range(tp))]  # neighbours


def groups_of(tp, pp, dp):
    """Return, for each mesh dim, the sum of the ranks in this rank's group, and its ranks."""
    mesh, found = Mesh(tp, pp, dp, dist.get_rank()), {}
    for mesh_dim in MESH_DIMS:
        group = mesh.group(mesh_dim)
        if group is None:
            found[mesh_dim] = None
            continue
        total = torch.tensor([mesh.rank])
        dist.all_reduce(total, group=group)
        assert mesh.group(mesh_dim) is group  # made once
        assert replace(mesh).group(mesh_dim) is group  # for all models: each has memory on a GPU
        assert dist.get_rank(group) == mesh.coord(mesh_dim)
        found[mesh_dim] = (total.item(), dist.get_process_group_ranks(group))
    return found


@pytest.mark.parametrize(("tp", "pp", "dp"), [(2, 2, 1), (2, 1, 2), (1, 2, 2), (4, 1, 1)])
def test_mesh_process_group_of_each_dim_contains_the_peers_of_the_rank(tp, pp, dp, ranks):
    for rank, found in enumerate(ranks.run(groups_of, 4, tp, pp, dp)):
        mesh = Mesh(tp, pp, dp, rank)
        for mesh_dim in MESH_DIMS:
            peers = mesh.peers(mesh_dim)
            want = (sum(peers), peers) if len(peers) > 1 else None
            assert found[mesh_dim] == want


def timeouts():
    """Return the timeout of each group of a mesh, and that of the default process group."""
    mesh, cpu = Mesh(2, 2, 1, dist.get_rank()), torch.device("cpu")
    groups = [dist.group.WORLD, mesh.group("tp"), mesh.group("pp")]
    return [group._get_backend(cpu).options._timeout for group in groups]


def test_process_groups_of_a_mesh_have_the_timeout_of_the_default_group(ranks):
    """torch's own default would be 30 minutes."""
    for world, tp, pp in ranks.run(timeouts, 4):
        assert world == tp == pp == timedelta(seconds=COLLECTIVE_TIMEOUT_S)


@pytest.mark.parametrize(
    ("arguments", "what", "problem"),
    [
        ({"tp": 0}, "tp", "found 0, expected an integer of at least 1"),
        ({"pp": -1}, "pp", "found -1, expected an integer of at least 1"),
        ({"dp": 2.0}, "dp", "found 2.0, expected an integer"),
        ({"tp": "2"}, "tp", "found '2', expected an integer"),
        ({"tp": None}, "tp", "found None, expected an integer"),
        ({"tp": 2, "rank": 2}, "rank", "found 2, expected 0..1"),
        ({"rank": -1}, "rank", "found -1, expected 0..0"),
    ],
)
def test_invalid_mesh_sizes_and_ranks_are_refused(arguments, what, problem):
    with pytest.raises(MeshError) as caught:
        Mesh(**arguments)
    assert (caught.value.where, caught.value.what) == ("mesh", what)
    assert problem in caught.value.problem
    assert caught.value.hint


def test_mesh_refuses_unknown_dim_names_and_missing_process_groups():
    with pytest.raises(MeshError, match="expected one of") as caught:
        Mesh().size("ep")
    assert "mesh_dim='ep'" in str(caught.value)
    with pytest.raises(MeshError, match="no process group") as caught:
        Mesh(tp=2).group("tp")
    assert "torchrun" in caught.value.hint
    assert Mesh(tp=2).group("pp") is None  # a dim of size 1 needs no group


def test_slapo_error_keeps_its_fields_where_what_problem_and_hint_when_pickled():
    error = MeshError("mesh", "rank", "found 2, expected 0..1", "do this")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is MeshError
    assert isinstance(again, SlapoError)
    assert isinstance(again, ValueError)
    parts = (again.where, again.what, again.problem, again.hint)
    assert parts == ("mesh", "rank", "found 2, expected 0..1", "do this")
    assert str(again) == str(error)
