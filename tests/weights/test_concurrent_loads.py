"""Loads during saves: each reads one complete save, never a mixture."""

import threading
import time

import pytest
import torch
from safetensors.torch import save_file
from transformers import GPT2Config

from slapo_zoo import AutoScheduledModel, load_checkpoint, save_checkpoint
from slapo_zoo.errors import WeightsError
from slapo_zoo.weights import folder as folders
from slapo_zoo.weights import snapshot
from slapo_zoo.weights.staging import Staging

CONFIG = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 32, "n_positions": 16}


def tiny(**mesh):
    model = AutoScheduledModel.from_config(GPT2Config(**CONFIG), **mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for p in model.parameters():
        optimizer.state[p] = {
            "step": torch.tensor(0.0), "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }  # fmt: skip
    return model, optimizer


def set_all(model, optimizer, value):
    """Set weights, moments and steps to the number of the save."""
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(value)
            for kept in optimizer.state[p].values():
                kept.fill_(value)


def values(model, optimizer, resumed):
    found = {float(resumed.step), float(resumed.data_position["at"])}
    for p in model.parameters():
        found |= {float(p.detach().min()), float(p.detach().max())}
        found |= {float(kept.min()) for kept in optimizer.state[p].values()}
    return found


class Writer:
    """Thread that saves in a loop, each save with another number."""

    def __init__(self, out, first=1):
        self.out, self.number, self.done = out, first, threading.Event()
        self.made = tiny()
        self.thread = threading.Thread(target=self.work)

    def save(self):
        set_all(*self.made, self.number)
        place = {"at": self.number}
        save_checkpoint(
            self.made[0], self.out, self.made[1], step=self.number, data_position=place,
            max_shard_size="5KB",
        )  # fmt: skip
        self.number += 1

    def work(self):
        while not self.done.is_set():
            self.save()

    def __enter__(self):
        self.save()
        self.thread.start()
        return self

    def __exit__(self, *exc):
        self.done.set()
        self.thread.join()


def test_load_concurrent_with_a_save_reads_all_weights_from_one_complete_save(
    tmp_path, monkeypatch
):
    """A new save is published after the load has read the state: the load reads all of the new save."""
    writer = Writer(tmp_path / "out")
    writer.save()
    model, optimizer = tiny()
    opening, turns = folders.CheckpointFolder.open_all, []

    def open_all(self):
        turns.append(1)
        if len(turns) == 2:  # the weights are open, the optimizer is next
            writer.save()
        return opening(self)

    monkeypatch.setattr(folders.CheckpointFolder, "open_all", open_all)
    found = values(model, optimizer, load_checkpoint(model, tmp_path / "out", optimizer))
    assert found == {2.0}


def test_from_pretrained_during_a_save_reads_config_and_weights_of_the_same_save(
    tmp_path, monkeypatch
):
    sizes = []

    def save(layers):
        config = GPT2Config(**CONFIG | {"n_layer": layers})
        AutoScheduledModel.from_config(config).save_pretrained(tmp_path / "out")

    save(2)
    opening = folders.CheckpointFolder.open_all

    def open_all(self):
        if not sizes:
            sizes.append(3)
            save(3)  # config.json of two layers was read already
        return opening(self)

    monkeypatch.setattr(folders.CheckpointFolder, "open_all", open_all)
    model = AutoScheduledModel.from_pretrained(tmp_path / "out")
    assert (model.config.n_layer, len(model.h)) == (3, 3)


def test_load_of_a_continuously_replaced_folder_raises(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "TRIES", 3)
    writer = Writer(tmp_path / "out")
    writer.save()
    opening = folders.CheckpointFolder.open_all

    def open_all(self):
        writer.save()
        return opening(self)

    monkeypatch.setattr(folders.CheckpointFolder, "open_all", open_all)
    model, optimizer = tiny()
    with pytest.raises(WeightsError, match="the folder was replaced 3 times while it was read"):
        load_checkpoint(model, tmp_path / "out", optimizer)


def test_load_of_a_folder_that_may_not_be_read_names_the_cause(tmp_path, monkeypatch):
    def denied(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(snapshot.os, "open", denied)
    with pytest.raises(WeightsError, match="cannot be read: Permission denied"):
        load_checkpoint(tiny()[0], tmp_path)


def race(out, writers, loads):
    """Count the loads that found numbers of several saves, of `loads` or more until two saves were met."""
    started, mixed, found = [Writer(out, 1 + 1_000_000 * n) for n in range(writers)], 0, set()
    model, optimizer = tiny()
    for one in started:
        one.__enter__()
    try:
        done, end = 0, time.monotonic() + 120
        while done < loads or (len(found) < 2 and time.monotonic() < end):
            done += 1
            seen = values(model, optimizer, load_checkpoint(model, out, optimizer))
            mixed += len(seen) != 1
            found |= seen
    finally:
        for one in started:
            one.__exit__()
    return mixed, len(found)


@pytest.mark.parametrize(
    ("writers", "loads"), [(2, 20), pytest.param(1, 40, marks=pytest.mark.slow)]
)
def test_several_loads_concurrent_with_saves_each_read_one_complete_save(tmp_path, writers, loads):
    mixed, saves = race(tmp_path / "out", writers, loads)
    assert mixed == 0
    assert saves > 1  # they did meet


@pytest.mark.slow
@pytest.mark.parametrize("writers", [1, 2])
def test_five_hundred_loads_concurrent_with_saves_each_read_one_complete_save(tmp_path, writers):
    mixed, saves = race(tmp_path / "out", writers, 500)
    print(f"{writers} writers: {mixed} of 500 loads mixed, {saves} saves seen")
    assert mixed == 0


def save_and_load(out, rounds):
    """Return the numbers that each load of this rank found."""
    model, optimizer = tiny(tp=2)
    found = []
    for _ in range(rounds):
        found.append(values(model, optimizer, load_checkpoint(model, out, optimizer)))
    return found


def test_all_ranks_load_the_same_complete_save_while_another_save_is_written(ranks, tmp_path):
    with Writer(tmp_path / "out"):
        found = ranks.run(save_and_load, 2, tmp_path / "out", 15)
    assert found[0] == found[1]
    assert all(len(seen) == 1 for seen in found[0])


def test_concurrent_saves_keep_the_user_files_of_the_folder(tmp_path):
    """Each save makes a temporary folder while others remove old ones; files of the user are kept in every save."""
    out, failed = tmp_path / "out", []
    kept = {f"notes/{n}.txt": f"mine {n}" for n in range(20)}
    (out / "notes").mkdir(parents=True)
    save_file({"w": torch.zeros(1)}, out / "model.safetensors")
    for name, text in kept.items():
        (out / name).write_text(text)

    def publish():
        for _ in range(60):
            staging = Staging(out)
            try:
                staging.create()
                save_file({"w": torch.zeros(1)}, staging.path / "model.safetensors")
                staging.publish()
            except OSError as error:
                failed.append(error)
            finally:
                staging.discard()

    writers = [threading.Thread(target=publish) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert not failed
    assert {name: (out / name).read_text() for name in kept} == kept
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
