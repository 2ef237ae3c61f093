"""Saving from many ranks: bit-equal files, and one failure stops all."""

import errno
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from shards import assert_same, cut, local_tensors, model
from slapo_zoo.errors import RankError, WeightsError
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.weights.folder import open_checkpoint
from slapo_zoo.weights.load_memory import Target
from slapo_zoo.weights.load_rank_slices import load_tensors
from slapo_zoo.weights.save import save_folder


def save(folder, tp, pp, dp, **options):
    mesh = Mesh(tp, pp, dp, rank=dist.get_rank())
    specs, full = model(pp)
    save_folder(folder, specs, local_tensors(specs, full, mesh), mesh, **options)
    return mesh, specs, full


def save_and_load(folder, tp, pp, dp):
    save(folder, tp, pp, dp)
    other = Mesh(tp=pp, pp=tp, dp=dp, rank=dist.get_rank())  # another mesh reads it
    specs, full = model(other.pp)
    specs = [spec for spec in specs if spec.stage == other.coord("pp")]
    expected = {spec.name: cut(full[spec.name], spec.placement, other) for spec in specs}
    targets = {
        s.name: Target(torch.empty_like(expected[s.name]), s.shape, s.placement) for s in specs
    }
    with open_checkpoint(folder) as opened:
        load_tensors(targets, opened, {name: name for name in targets}, other)
    assert_same({name: target.tensor for name, target in targets.items()}, expected)


@pytest.mark.parametrize(("tp", "pp", "dp"), [(2, 2, 1), (2, 1, 2), (1, 2, 1)])
def test_weight_files_saved_by_many_ranks_equal_those_of_one_rank(ranks, tmp_path, tp, pp, dp):
    ranks.run(save_and_load, tp * pp * dp, tmp_path / "out", tp, pp, dp)
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), model()[1])
    one = tmp_path / "one"
    specs, full = model(1)
    save_folder(one, specs, full, Mesh())
    found, expected = (
        (path / "model.safetensors").read_bytes() for path in (tmp_path / "out", one)
    )
    assert found == expected


def save_on_a_full_disk(folder):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    pwrite = os.pwrite
    if dist.get_rank() == 3:
        os.pwrite = full
    try:
        save(folder, 2, 2, 1, max_shard_size=300)
    except (WeightsError, RankError) as error:
        return type(error).__name__, str(error)
    finally:
        os.pwrite = pwrite


def test_full_disk_on_one_rank_stops_the_save_on_all_ranks(ranks, tmp_path):
    ranks.run(save, 4, tmp_path / "out", 2, 2, 1)
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    errors = ranks.run(save_on_a_full_disk, 4, tmp_path / "out")
    assert [kind for kind, _ in errors] == ["RankError"] * 3 + ["WeightsError"]
    assert all("No space left on device" in text for _, text in errors)
    assert all(text.startswith("rank 3: save_folder") for _, text in errors[:3])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


def save_other_specs(folder):
    mesh = Mesh(tp=2, rank=dist.get_rank())
    specs, full = model(1)
    specs = specs[: len(specs) - mesh.rank]
    local = {spec.name: cut(full[spec.name], spec.placement, mesh) for spec in specs}
    with pytest.raises(WeightsError, match=r"ranks \[1\] differ from rank 0 in names"):
        save_folder(folder, specs, local, mesh)


def test_save_by_ranks_that_hold_different_models_is_refused(ranks, tmp_path):
    ranks.run(save_other_specs, 2, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def extras(path, save):
    raise LookupError("no tokenizer")


def save_with_failing_extras(folder):
    error = LookupError if dist.get_rank() == 0 else RankError
    with pytest.raises(error, match="no tokenizer"):
        save(folder, 2, 1, 1, write_extras=extras)


def test_failing_callback_for_extra_files_on_one_rank_stops_the_save_on_all_ranks(ranks, tmp_path):
    ranks.run(save_with_failing_extras, 2, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def save_elsewhere(folder):
    """Save with a folder of rank 1 that is not rank 0's."""
    if dist.get_rank() == 1:
        opened = Path.open
        Path.open = lambda self, *args, **kw: opened(self.parent / "unseen" / "x", *args, **kw)
    try:
        save(folder, 2, 1, 1)
    except (WeightsError, RankError) as error:
        return str(error)
    finally:
        if dist.get_rank() == 1:
            Path.open = opened


def test_save_into_a_folder_that_ranks_do_not_share_is_refused(ranks, tmp_path):
    errors = ranks.run(save_elsewhere, 2, tmp_path / "out")
    assert all("do all ranks see it" in text for text in errors)
    assert not list(tmp_path.iterdir())
