"""Peers of tp and pp read the same samples, dp peers different ones, also after a resume."""

import pytest
import torch

from slapo_zoo import Mesh, SlapoError
from slapo_zoo.model.sampler import MeshSampler, broadcast_batch


def read(mesh, steps, first=0):
    """The indices of some steps, epochs over, by a DataLoader."""
    sampler = MeshSampler(range(22), mesh, batch_size=4, seed=3)
    sampler.load_state_dict({"step": first, "seed": 3})
    found = []
    while len(found) < steps:
        for batch in torch.utils.data.DataLoader(range(22), batch_sampler=sampler):
            found.append(batch.tolist())
            if len(found) == steps:
                break
    return found


def test_parts_make_the_batches_of_one_process():
    whole = read(Mesh(), 12)
    meshes = [Mesh(tp=2, pp=2, dp=2, rank=rank) for rank in range(8)]
    parts = [read(mesh, 12) for mesh in meshes]
    for mesh, mine in zip(meshes, parts, strict=True):
        half = slice(2 * mesh.coord("dp"), 2 * mesh.coord("dp") + 2)
        assert mine == [rows[half] for rows in whole]
    assert len({tuple(map(tuple, part)) for part in parts}) == 2


def test_every_row_once_per_epoch_in_an_order_of_its_own():
    rows = read(Mesh(), 10)
    first, second = ([i for batch in part for i in batch] for part in (rows[:5], rows[5:]))
    assert len(set(first)) == len(set(second)) == 20
    assert first != second


@pytest.mark.parametrize("first", [3, 5, 7])
def test_resumes_at_the_right_sample_on_another_mesh(first):
    whole = read(Mesh(), 10)
    assert read(Mesh(), 10 - first, first) == whole[first:]
    assert read(Mesh(dp=2, rank=1), 10 - first, first) == [rows[2:] for rows in whole[first:]]


def test_uneven_batches_are_refused():
    with pytest.raises(SlapoError, match="expected a multiple of dp=2"):
        MeshSampler(range(9), Mesh(dp=2), batch_size=3)
    with pytest.raises(SlapoError, match="fewer than one batch"):
        MeshSampler(range(3), Mesh(), batch_size=4)


def broadcast(layout):
    tp, pp, dp = layout
    mesh = Mesh(tp, pp, dp, torch.distributed.get_rank())
    batch = None
    if mesh.coord("tp") == mesh.coord("pp") == 0:
        ids = torch.arange(6).reshape(2, 3) + 10 * mesh.coord("dp")
        batch = {"input_ids": ids.t(), "weights": torch.rand(2), "name": f"dp{mesh.coord('dp')}"}
    return mesh.coord("dp"), broadcast_batch(batch, mesh)


def test_inputs_are_broadcast_on_request(ranks):
    for dp, batch in ranks.run(broadcast, 4, (2, 1, 2)) + ranks.run(broadcast, 4, (2, 2, 1)):
        assert torch.equal(batch["input_ids"], torch.arange(6).reshape(2, 3).t() + 10 * dp)
        assert batch["name"] == f"dp{dp}"
        assert batch["weights"].shape == (2,)
