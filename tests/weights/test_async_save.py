"""Asynchronous saves: training goes on, the state at the call is written, errors are raised."""

import errno
import threading
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from slapo_zoo import AutoScheduledModel, async_save_checkpoint, load_checkpoint, save_checkpoint
from slapo_zoo.errors import RankError, WeightsError
from slapo_zoo.model.checkpoints import training_checkpoint
from slapo_zoo.parallel.ranks.process_group import shutdown_distributed
from slapo_zoo.weights import save

WRITE = save.write_tensors  # ranks that are threads replace it at once


def make(tp, pp, dp=1):
    from transformers import GPT2Config

    config = GPT2Config(n_embd=16, n_head=4, n_layer=2, n_positions=16, vocab_size=30)
    model = AutoScheduledModel.from_config(
        config, tp=tp, pp=pp, dp=dp, auto_class="GPT2LMHeadModel"
    )
    return model.train(), torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model, optimizer, steps=1):
    ids = (torch.arange(24).view(2, 12) + model.mesh.coord("dp")) % 30  # copies see other rows
    for _ in range(steps):
        model.train_step({"input_ids": ids, "labels": ids})
        optimizer.step()
        optimizer.zero_grad()


@contextmanager
def instead(function):
    """`save.write_tensors` replaced; a worker of the pool keeps its modules, so put it back."""
    save.write_tensors = lambda *args: function(WRITE, *args)
    try:
        yield
    finally:
        save.write_tensors = WRITE


def trains_on(out, tp, pp, dp):
    model, optimizer = make(tp, pp, dp)
    train(model, optimizer)
    save_checkpoint(model, out / "sync", optimizer, step=1)
    trained = threading.Event()

    def late(write, *args):
        assert trained.wait(60)
        return write(*args)

    with instead(late):
        saving = async_save_checkpoint(model, out / "async", optimizer, step=1)
        model.config.n_embd = 99  # later changes of the config are not saved either
        train(model, optimizer, 2)  # its collectives run while those of the save are under way
        was_done = saving.done()
        trained.set()
        saving.result(60)
    changed = model.consolidated_state_dict()
    return was_done, changed


@pytest.mark.parametrize(
    ("tp", "pp", "dp"),
    [(1, 1, 1), (2, 2, 1), (1, 1, 2), pytest.param(2, 1, 1, marks=pytest.mark.slow)],
    ids=str,
)
def test_async_save_writes_the_weights_held_when_it_was_called(ranks, tmp_path, tp, pp, dp):
    was_done, changed = ranks.run(trains_on, tp * pp * dp, tmp_path, tp, pp, dp)[0]
    assert not was_done
    names = [{path.name for path in (tmp_path / kind).iterdir()} for kind in ("sync", "async")]
    assert names[0] == names[1]
    for name in names[0]:
        assert (tmp_path / "sync" / name).read_bytes() == (tmp_path / "async" / name).read_bytes()
    written = load_file(tmp_path / "async" / "model.safetensors")
    assert not torch.equal(written["transformer.wte.weight"], changed["transformer.wte.weight"])


def saved_in_emulation(out):
    model, optimizer = make(2, 1)
    saving = async_save_checkpoint(model, out, optimizer, step=1)
    return saving.done(), load_checkpoint(model, out, optimizer).step


def test_async_save_of_emulated_ranks_is_done_when_it_returns(threads, tmp_path):
    assert threads.run(saved_in_emulation, 2, tmp_path / "out") == [(True, 1)] * 2


def full(write, *args):
    if dist.get_rank() == 1:
        raise OSError(errno.ENOSPC, "No space left on device", "x")
    return write(*args)


def fails(out, ask):
    model, optimizer = make(2, 1)
    save_checkpoint(model, out, optimizer, step=1)
    train(model, optimizer)
    with instead(full):
        saving = async_save_checkpoint(model, out, optimizer, step=2)
        errors = [saving.exception(60)] if ask else []
        train(model, optimizer)
        if not ask:
            with pytest.raises((WeightsError, RankError)) as caught:
                save_checkpoint(model, out, optimizer, step=3)
            errors = [caught.value]
    step = load_checkpoint(model, out, optimizer).step  # the old folder, whole
    save_checkpoint(model, out, optimizer, step=4)
    return type(errors[0]), str(errors[0]), step, load_checkpoint(model, out, optimizer).step


@pytest.mark.parametrize(("kind", "ask"), [("ranks", True), ("ranks", False), ("threads", False)])
def test_failed_async_save_raises_and_keeps_the_old_checkpoint(request, tmp_path, kind, ask):
    found = request.getfixturevalue(kind).run(fails, 2, tmp_path / "out", ask)
    assert [kind for kind, *_ in found] == [RankError, WeightsError]
    for _, text, before, after in found:
        assert "No space left" in text
        assert (before, after) == (1, 4)
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def shut_down(out):
    model, optimizer = make(2, 1)
    async_save_checkpoint(model, out, optimizer, step=1)
    async_save_checkpoint(model, out, optimizer, step=2)  # waits for the first
    shutdown_distributed()
    return (out / "training_state.json").exists()


def test_process_group_shutdown_waits_for_a_running_async_save(ranks, tmp_path):
    assert ranks.run(shut_down, 2, tmp_path / "out") == [True, True]
    model, _ = make(1, 1)
    assert load_checkpoint(model, tmp_path / "out").step == 2


def test_async_save_into_a_relative_folder_is_written_below_the_directory_of_the_call(
    tmp_path, monkeypatch
):
    model, _ = make(1, 1)
    moved = threading.Event()
    monkeypatch.chdir(tmp_path)

    def late(*args, **options):
        assert moved.wait(60)
        save.save_folder(*args, **options)

    monkeypatch.setattr(training_checkpoint, "save_folder", late)
    saving = async_save_checkpoint(model, "out")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    moved.set()
    saving.result(60)
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_async_save_of_unsupported_state_raises_at_the_call(tmp_path):
    model, optimizer = make(1, 1)
    with pytest.raises(WeightsError, match="extra"):
        async_save_checkpoint(model, tmp_path / "out", optimizer, extra=len)
    assert not list(tmp_path.iterdir())
