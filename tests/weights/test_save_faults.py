"""Saves that are interrupted, on file systems with limits, and of values that may not replace an older checkpoint."""

import errno
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import GPT2Config

from shards import assert_same, local_tensors, model
from slapo_zoo import AutoScheduledModel, load_checkpoint, save_checkpoint
from slapo_zoo.errors import RankError, WeightsError
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.placement import TensorSpec
from slapo_zoo.weights import adapter_files, staging
from slapo_zoo.weights.save import save_folder


def save_one(folder, value=1.0):
    specs = [TensorSpec("w", (2, 3), "float32")]
    save_folder(folder, specs, {"w": torch.full((2, 3), value)}, Mesh())


def value_in(folder):
    return load_file(folder / "model.safetensors")["w"][0, 0].item()


def test_save_interrupted_between_two_renames_puts_the_older_checkpoint_back(tmp_path, monkeypatch):
    """Without renameat2 Ctrl-C may come between two renames."""
    save_one(tmp_path / "out")
    rename, calls = os.rename, []

    def second(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        rename(*args)

    monkeypatch.setattr(staging, "_renameat2", lambda *_: False)
    monkeypatch.setattr(os, "rename", second)
    with pytest.raises(KeyboardInterrupt):
        save_one(tmp_path / "out", 2.0)
    assert os.listdir(tmp_path) == ["out"]
    assert value_in(tmp_path / "out") == 1


def test_save_on_a_file_system_that_cannot_flush_a_folder_succeeds(tmp_path, monkeypatch):
    fsync = os.fsync

    def files_alone(fileno):
        if os.path.isdir(f"/proc/self/fd/{fileno}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(fileno)

    monkeypatch.setattr(os, "fsync", files_alone)
    save_one(tmp_path / "out")
    save_one(tmp_path / "out", 2.0)
    assert value_in(tmp_path / "out") == 2


@pytest.mark.parametrize(("dtype", "value"), [("float8_e4m3fn", 2.0), ("float64", 1e300)])
def test_finite_weights_of_any_float_dtype_replace_an_older_checkpoint(tmp_path, dtype, value):
    specs = [TensorSpec("w", (3,), dtype)]
    for one in (value, value, float("nan")):
        local = {"w": torch.full((3,), one, dtype=torch.float64).to(getattr(torch, dtype))}
        if one == value:
            save_folder(tmp_path / "out", specs, local, Mesh())
    with pytest.raises(WeightsError, match="found NaN or infinity in 1 tensors"):
        save_folder(tmp_path / "out", specs, local, Mesh())


def test_adapter_with_nan_does_not_replace_an_older_adapter_unless_allowed(tmp_path):
    def save(value, **options):
        full = {"a": torch.full((2,), value)}
        folder, config = tmp_path / "adapter", lambda path: (path / adapter_files.CONFIG).touch()
        adapter_files.save_adapter_files(Mesh(), folder, full, config, **options)
        return load_file(folder / adapter_files.TENSORS)["a"][0]

    save(1.0)
    with pytest.raises(WeightsError, match="found NaN or infinity in 1 tensors"):
        save(float("nan"))
    assert save(float("nan"), check_finite=False).isnan()


@pytest.mark.parametrize("folder", [None, 3, "a\0b"])
def test_value_that_is_no_path_is_refused_by_saves_and_loads(folder):
    scheduled = AutoScheduledModel.from_config(
        GPT2Config(n_layer=1, n_embd=4, n_head=1, vocab_size=8)
    )
    use = (
        save_checkpoint,
        load_checkpoint,
        type(scheduled).save_pretrained,
        type(scheduled).load_adapter,
    )
    for call in use:
        with pytest.raises(WeightsError, match="cannot be used as a folder"):
            call(scheduled, folder)
    with pytest.raises(WeightsError, match="cannot be used as a folder"):
        adapter_files.save_adapter_files(Mesh(), folder, {}, lambda _: None)


def save_with_a_lost_folder(folder):
    resolve, mesh = Path.resolve, Mesh(tp=2, rank=dist.get_rank())
    specs, full = model(1)
    local = local_tensors(specs, full, mesh)

    def lost(*args):
        raise OSError(errno.ESTALE, "Stale file handle")

    Path.resolve = lost if dist.get_rank() == 1 else resolve
    try:
        save_folder(folder, specs, local, mesh)
    except (WeightsError, RankError) as error:
        found = str(error)
    finally:
        Path.resolve = resolve
    save_folder(folder, specs, local, mesh)  # the ranks still agree on the next step
    return found


def test_folder_that_one_rank_cannot_reach_stops_the_save_on_all_ranks(ranks, tmp_path):
    errors = ranks.run(save_with_a_lost_folder, 2, tmp_path / "out")
    assert all("Stale file handle" in text for text in errors)
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), model()[1])
