"""Sampling: tp and pp peers read the same samples, dp peers different ones, also after a resume."""

import pytest
import torch

from parity import Case, batch_of, tiny_config
from slapo_zoo import AutoScheduledModel, Mesh, SlapoError
from slapo_zoo.model.dp.sampler import MeshSampler, broadcast_batch


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


def test_dp_sampler_gives_each_dp_rank_its_slice_of_the_batches_of_one_process():
    whole = read(Mesh(), 12)
    meshes = [Mesh(tp=2, pp=2, dp=2, rank=rank) for rank in range(8)]
    parts = [read(mesh, 12) for mesh in meshes]
    for mesh, mine in zip(meshes, parts, strict=True):
        half = slice(2 * mesh.coord("dp"), 2 * mesh.coord("dp") + 2)
        assert mine == [rows[half] for rows in whole]
    assert len({tuple(map(tuple, part)) for part in parts}) == 2


def test_dp_sampler_yields_every_sample_once_per_epoch_in_a_new_order():
    rows = read(Mesh(), 10)
    first, second = ([i for batch in part for i in batch] for part in (rows[:5], rows[5:]))
    assert len(set(first)) == len(set(second)) == 20
    assert first != second


@pytest.mark.parametrize("first", [3, 5, 7])
def test_dp_sampler_resumed_on_another_mesh_continues_with_the_next_sample(first):
    whole = read(Mesh(), 10)
    assert read(Mesh(), 10 - first, first) == whole[first:]
    assert read(Mesh(dp=2, rank=1), 10 - first, first) == [rows[2:] for rows in whole[first:]]


def test_sampler_batch_size_that_dp_does_not_divide_is_refused():
    with pytest.raises(SlapoError, match="expected a multiple of dp=2"):
        MeshSampler(range(9), Mesh(dp=2), batch_size=3)
    with pytest.raises(SlapoError, match="fewer than one batch"):
        MeshSampler(range(3), Mesh(), batch_size=4)


@pytest.mark.parametrize("state", [None, {"step": 3}, {"rows": 8, "seed": 0}])
def test_sampler_state_that_a_sampler_did_not_return_is_refused(state):
    sampler = MeshSampler(range(9), Mesh(), batch_size=3)
    with pytest.raises(SlapoError, match="expected step and seed"):
        sampler.load_state_dict(state)


def broadcast(layout):
    tp, pp, dp = layout
    mesh = Mesh(tp, pp, dp, torch.distributed.get_rank())
    batch = None
    if mesh.coord("tp") == mesh.coord("pp") == 0:
        ids = torch.arange(6).reshape(2, 3) + 10 * mesh.coord("dp")
        batch = {"input_ids": ids.t(), "weights": torch.rand(2), "name": f"dp{mesh.coord('dp')}"}
    return mesh.coord("dp"), broadcast_batch(batch, mesh)


def test_broadcast_batch_gives_all_tp_and_pp_ranks_of_a_dp_replica_the_same_batch(ranks):
    for dp, batch in ranks.run(broadcast, 4, (2, 1, 2)) + ranks.run(broadcast, 4, (2, 2, 1)):
        assert torch.equal(batch["input_ids"], torch.arange(6).reshape(2, 3).t() + 10 * dp)
        assert batch["name"] == f"dp{dp}"
        assert batch["weights"].shape == (2,)


def encoded(model, batch):
    """Replace the encoder's inputs by its outputs, a tuple that micro-batches do not slice by rows."""
    with torch.no_grad():
        outputs = model.get_encoder()(batch["input_features"])[:1]
    return {"encoder_outputs": outputs, "labels": batch["labels"]}


def one_row_of_positions(model, batch):
    return {**batch, "position_ids": torch.arange(batch["input_ids"].shape[1])}


def weights_of_classes(model, batch):
    return {**batch, "of_classes": torch.ones(99)}


WITHOUT_ROWS = {
    "encoder_outputs": (Case("WhisperForConditionalGeneration", ("tokens",)), encoded),
    "position_ids": (Case("GPT2LMHeadModel", ("tokens",)), one_row_of_positions),
    "of_classes": (Case("GPT2LMHeadModel", ("tokens",)), weights_of_classes),
}


@pytest.mark.parametrize("name", WITHOUT_ROWS)
def test_train_step_with_micro_batches_refuses_inputs_whose_first_axis_is_not_the_batch(name):
    """Without the error Whisper's loss would silently mix rows."""
    case, change = WITHOUT_ROWS[name]
    config, _ = tiny_config(case)
    model = AutoScheduledModel.from_config(config, auto_class=case.cls).train()
    batch = change(model, batch_of(case))
    own = {"loss_fn": lambda output, batch: output.loss} if name == "of_classes" else {}
    with pytest.raises(SlapoError, match=f"4 rows are split into 2 micro-batches, but {name}"):
        model.train_step(batch, micro_batches=2, **own)
    assert model.train_step(batch, micro_batches=1, **own) > 0
