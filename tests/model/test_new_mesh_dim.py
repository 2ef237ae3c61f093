"""A new mesh dim, added by a field and an entry of `Mesh.DIMS`: training equals one process."""

import re
from dataclasses import dataclass

import pytest
import torch
import transformers

from parity import Case, batch_of, tiny_config
from slapo_zoo import (
    AutoScheduledModel,
    Mesh,
    MeshError,
    MeshSampler,
    emulate,
    load_checkpoint,
    save_checkpoint,
)
from slapo_zoo.model import loader
from slapo_zoo.parallel.mesh import MeshDim

CASES = [
    Case("GPT2LMHeadModel", ("tokens",), dropout=0.1, rows=8),
    Case("T5ForConditionalGeneration", ("tokens",), dropout=0.1, rows=8),
]
CLOSE = {"rtol": 1e-5, "atol": 1e-8}  # in fp64, but for the logits of the loss


@dataclass(frozen=True)
class WithX(Mesh):
    """Mesh whose dim `x` replicates parameters and shards the rows of a batch."""

    x: int = 1
    DIMS = (MeshDim("pp", "layers"), MeshDim("x", "rows"), *Mesh.DIMS[1:])


@pytest.fixture
def use(monkeypatch):
    """Let the loader make a mesh with `x` ranks on the new dim."""

    def with_x(x):
        def make(**sizes):
            rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
            return WithX(**sizes, rank=rank, x=x)

        monkeypatch.setattr(loader, "make_mesh", make)

    return with_x


def trained(case, own_loop=False, folder=None, **layout):
    """Losses, gradients and norm of the first step, and weights after two steps of AdamW."""
    config, batch = tiny_config(case)[0], batch_of(case)
    batch["labels"][: case.rows // 2, :3] = -100  # ranks have different numbers of targets
    layout = {"dp": 1, "dtype": torch.float64, "seed": 3, **layout}
    model = AutoScheduledModel.from_config(config, auto_class=case.cls, **layout).train()
    mine = next(iter(MeshSampler(range(case.rows), model.mesh, case.rows, shuffle=False)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    losses, first = [], None
    for _ in range(2):
        optimizer.zero_grad()
        part = {name: x[mine] for name, x in batch.items()}
        if own_loop:
            model(**part).loss.backward()
        else:
            losses.append(float(model.train_step(part)))
        if first is None:
            first = model.consolidated_state_dict(grads=True)
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
    if folder:
        save_checkpoint(model, folder, optimizer, step=2)
    return losses, first, float(norm), model.consolidated_state_dict()


def require_equal(found, expected):
    losses, grads, norm, weights = found
    assert losses == pytest.approx(expected[0], rel=1e-6)
    assert norm == pytest.approx(expected[2], rel=1e-6)
    for ours, plain in ((grads, expected[1]), (weights, expected[3])):
        assert ours.keys() == plain.keys()
        for name, tensor in plain.items():
            torch.testing.assert_close(ours[name], tensor, **CLOSE)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.cls)
def test_training_on_a_mesh_with_a_user_defined_dim_has_the_losses_of_one_process(
    case, use, tmp_path
):
    """Dropout, loss, gradients, norm and saved files equal one process, with ZeRO and with tp."""
    use(1)
    alone = trained(case, folder=tmp_path / "alone")
    layouts = [(1, 1, 2, 1), (2, 1, 2, 1), (1, 2, 2, 2)]
    for tp, dp, x, shards in layouts:
        use(x)
        folder, sizes = tmp_path / f"{tp}-{dp}-{x}-{shards}", (tp, 1, dp * x)
        found = emulate(trained, case, mesh=sizes, tp=tp, dp=dp, dp_shard=shards, folder=folder)
        require_equal(found[0], alone)
        assert all(each[0] == found[0][0] for each in found)  # the loss is that of the whole batch
        cls = getattr(transformers, case.cls)
        saved = cls.from_pretrained(folder).state_dict()
        for name, tensor in cls.from_pretrained(tmp_path / "alone").state_dict().items():
            torch.testing.assert_close(saved[name], tensor, **CLOSE)


def test_hand_written_loop_averages_gradients_over_dp_and_a_user_defined_mesh_dim(use):
    """The mean of the ranks' gradients, as DDP gives it: the same over dp 4 and over dp 2 x x 2."""
    use(1)
    expected = emulate(trained, CASES[0], True, mesh=(1, 1, 4), dp=4)[0]
    use(2)
    require_equal(emulate(trained, CASES[0], True, mesh=(1, 1, 4), dp=2)[0], expected)


def resumed(case, folder, rows, **layout):
    """The loss of the third step, from a checkpoint of the second."""
    layout = {"dtype": torch.float64, "seed": 5, **layout}
    model = AutoScheduledModel.from_config(tiny_config(case)[0], auto_class=case.cls, **layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    assert load_checkpoint(model.train(), folder, optimizer).step == 2
    mine = next(iter(MeshSampler(range(rows), model.mesh, rows, shuffle=False)))
    return float(model.train_step({name: x[mine] for name, x in batch_of(case).items()}))


def test_checkpoint_saved_with_a_user_defined_mesh_dim_resumes_with_and_without_the_dim(
    use, tmp_path
):
    """A checkpoint saved by ranks of `x` resumes in one process, and the other way round."""
    use(2)
    emulate(trained, CASES[0], mesh=(1, 1, 4), dp=2, dp_shard=2, folder=tmp_path)
    here = emulate(resumed, CASES[0], tmp_path, 8, mesh=(1, 1, 4), dp=2)
    use(1)
    alone = resumed(CASES[0], tmp_path, 8, dp=1)
    assert here == [pytest.approx(alone, rel=1e-6)] * 4


def test_mesh_dims_that_both_split_the_batch_split_it_into_the_product_of_their_sizes():
    """A role joins several dims under one name; its coordinates count the slowest dim first, and map back to ranks."""
    mesh = WithX(2, 1, 3, 0, x=2)
    assert mesh.named("batch") == mesh.named("loss") == "x+dp"
    assert Mesh(2, 2, 3).named("batch") == "dp"
    assert mesh.size("batch") == 6
    assert mesh.world_size == 12
    assert mesh.sizes == {"tp": 2, "pp": 1, "dp": 3, "x": 2}
    for rank in range(12):
        mine = mesh.seen_by(rank)
        assert mine.coord("batch") == mine.coord("x") * 3 + mine.coord("dp")
        assert mine.at(batch=mine.coord("batch")) == rank == mine.peers("batch")[mine.coord("loss")]
        assert mesh.ranks(batch=mine.coord("batch"), tp=mine.coord("tp")) == [rank]
    with pytest.raises(MeshError, match=re.escape("expected one of ('tp', 'pp', 'dp', 'x', 'batch', 'loss')")):  # fmt: skip
        mesh.size("ep")


def test_ranks_along_a_mesh_dim_that_shards_tokens_have_the_same_batch_coordinate():
    """Ranks along a dim that shards tokens sum the loss and read the same rows."""
    mesh = Mesh(1, 1, 2, 3, cp=2)
    assert (mesh.named("batch"), mesh.named("loss")) == ("dp", "dp+cp")
    assert (mesh.coord("batch"), mesh.coord("loss")) == (1, 3)
    assert mesh.ranks(batch=1) == [2, 3]
