"""Training goes on where it stopped: bit for bit on the same mesh, within rounding on another."""

import json
from functools import partial

import pytest
import torch
from safetensors import safe_open
from transformers import GPT2LMHeadModel

from parity import EPS, FLOOR, LEARNING_RATE, Case, batch_of, checkpoint, own_error
from slapo_zoo import AutoScheduledModel
from slapo_zoo.errors import WeightsError
from slapo_zoo.resume import load_checkpoint, save_checkpoint

ROWS, STEPS = 4, 4
DROPOUT = Case("GPT2LMHeadModel", ("tokens",), dropout=0.1)
PLAIN = Case("GPT2LMHeadModel", ("tokens",))


def start(folder, layout, case=DROPOUT):
    tp, pp, dp = layout
    model = AutoScheduledModel.from_pretrained(
        folder, tp=tp, pp=pp, dp=dp, seed=3, auto_class=case.cls
    ).train()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, eps=EPS)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, total_iters=3)
    return model, optimizer, scheduler


def train(model, optimizer, scheduler, case, steps):
    mesh, losses = model.mesh, []
    part = slice(mesh.coord("dp") * ROWS // mesh.dp, (mesh.coord("dp") + 1) * ROWS // mesh.dp)
    for step in steps:
        batch = {k: v[part] for k, v in batch_of(case, step).items()}
        losses.append(float(model.train_step(batch)))
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return losses


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def stop_and_go(source, out, layout, case=DROPOUT):
    """Without a stop, and with one: losses, weights and optimizer must not differ by a bit."""
    whole = start(source, layout, case)
    losses = train(*whole, case, range(STEPS))
    first = start(source, layout, case)
    torch.manual_seed(17)
    before = train(*first, case, range(STEPS // 2))
    save_checkpoint(first[0], out, *first[1:], step=2, data_position={"epoch": 1}, extra=(1, "x"))
    drawn = torch.rand(3)
    second = start(source, layout, case)
    resumed = load_checkpoint(second[0], out, *second[1:])
    assert (resumed.step, resumed.data_position, resumed.extra) == (2, {"epoch": 1}, (1, "x"))
    assert torch.equal(torch.rand(3), drawn)
    after = train(*second, case, range(STEPS // 2, STEPS))
    assert before + after == losses
    expected = weights(whole[0])
    for name, tensor in weights(second[0]).items():
        assert torch.equal(tensor, expected[name]), name
    states = [list(one[1].state.values()) for one in (whole, second)]
    for one, other in zip(*states, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert whole[2].state_dict() == second[2].state_dict()
    return losses


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tmp_path_factory.mktemp("source")


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 2, 1), (2, 1, 2)], ids=str)
def test_bit_for_bit_on_the_same_mesh(ranks, source, tmp_path, layout):
    folder = checkpoint(DROPOUT, source)
    size = layout[0] * layout[1] * layout[2]
    ranks.run(stop_and_go, size, folder, tmp_path / "out", layout)
    again = GPT2LMHeadModel.from_pretrained(tmp_path / "out")  # plain transformers reads it
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert torch.equal(again.transformer.wte.weight, file.get_tensor("transformer.wte.weight"))


def first_half(folder, out, layout, case):
    state = start(folder, layout, case)
    losses = train(*state, case, range(STEPS // 2))
    save_checkpoint(state[0], out, *state[1:], step=2, max_shard_size="20KB")
    return losses


def second_half(folder, out, layout, case):
    state = start(folder, layout, case)
    step = load_checkpoint(state[0], out, *state[1:]).step
    losses = train(*state, case, range(step, STEPS))
    return losses, state[0].consolidated_state_dict()


def both_halves(ranks, folder, out, one, other, case):
    sizes = [tp * pp * dp for tp, pp, dp in (one, other)]
    before = ranks.run(first_half, sizes[0], folder, out, one, case)[0]
    after, found = ranks.run(second_half, sizes[1], folder, out, other, case)[0]
    return before + after, found


def uninterrupted(folder, case, cls, dtype, attention):
    """Plain transformers with the same optimizer and scheduler."""
    torch.manual_seed(0)
    model = cls.from_pretrained(folder, dtype=dtype, attn_implementation=attention).train()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, eps=EPS)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, total_iters=3)
    for step in range(STEPS):
        model(**batch_of(case, step)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return {name: p.detach() for name, p in model.named_parameters()}


MOVES = [((2, 2, 1), (1, 1, 1)), ((1, 1, 1), (2, 2, 1)), ((2, 1, 2), (1, 2, 1)), ((1, 2, 1), (4, 1, 1))]


@pytest.mark.parametrize(("one", "other"), MOVES, ids=str)
def test_on_another_mesh(ranks, source, tmp_path, one, other):
    folder = checkpoint(PLAIN, source)
    _, found = both_halves(ranks, folder, tmp_path / "out", one, other, PLAIN)
    runs = [
        uninterrupted(folder, PLAIN, GPT2LMHeadModel, dtype, kind)
        for dtype, kind in ((torch.float64, "sdpa"), (torch.float32, "sdpa"), (torch.float32, "eager"))
    ]
    truth, plains = runs[0], runs[1:]
    worst = max(own_error(plains, truth, lambda run: run[name]) for name in truth)  # noqa: B023
    for name, want in truth.items():
        error = float((found[name].double() - want).abs().max())
        assert error <= 2 * worst + FLOOR, f"{name}: error {error:.2e}, plain {worst:.2e}"
