"""Saving from one rank: files that are written, and files that stay untouched."""

import errno
import json
import os

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from shards import assert_same, local_tensors, model, single
from slapo_zoo.errors import WeightsError
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.placement import Placement, TensorSpec
from slapo_zoo.weights import adapter_files, staging
from slapo_zoo.weights.file_layout import plan_layout
from slapo_zoo.weights.folder import open_checkpoint
from slapo_zoo.weights.safetensors_file import SafetensorsFile
from slapo_zoo.weights.save import save_folder
from slapo_zoo.weights.write import write_tensors

ONE = [TensorSpec("w", (2, 3), "float32")]


def save_one(folder, value=1.0, **options):
    save_folder(folder, ONE, {"w": torch.full((2, 3), value)}, Mesh(), **options)


def value_in(folder):
    return load_file(folder / "model.safetensors")["w"][0, 0].item()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_small_model_is_saved_into_one_file(tmp_path):
    one = single()
    local = {
        name: tensor.requires_grad_(tensor.is_floating_point()) for name, tensor in one.full.items()
    }
    save_folder(tmp_path / "new" / "out", one.specs, local, one.mesh)
    assert names(tmp_path / "new") == ["out"]
    assert names(tmp_path / "new" / "out") == ["checksums.json", "model.safetensors"]
    assert_same(load_file(tmp_path / "new" / "out" / "model.safetensors"), one.full)


def test_saved_weight_files_equal_those_of_the_safetensors_library(tmp_path):
    full = {name: torch.randn(3, 5) for name in ("h.10.w", "h.2.w", "é")}
    full |= {"flags": torch.tensor([True] * 3), "half": torch.ones(3).half()}
    specs = [TensorSpec(n, tuple(t.shape), str(t.dtype).split(".")[1]) for n, t in full.items()]
    save_folder(tmp_path / "out", specs, full, Mesh())
    with SafetensorsFile(tmp_path / "out" / "model.safetensors") as file:
        save_file(full, tmp_path / "theirs", metadata=file.metadata)
    ours, theirs = ((tmp_path / name).read_bytes() for name in ("out/model.safetensors", "theirs"))
    end = 8 + int.from_bytes(ours[:8], "little")
    assert json.loads(ours[8:end]) == json.loads(theirs[8:end])  # its metadata have no order
    assert (ours[:8], ours[end:]) == (theirs[:8], theirs[end:])


def test_large_model_is_saved_into_several_files_with_an_index(tmp_path):
    one = single()
    save_folder(tmp_path / "out", one.specs, one.full, one.mesh, max_shard_size=200)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 2
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in one.full.values())
    assert set(names(tmp_path / "out")) == {
        *files,
        "model.safetensors.index.json",
        "checksums.json",
    }
    assert_same({k: v for f in files for k, v in load_file(tmp_path / "out" / f).items()}, one.full)
    with open_checkpoint(tmp_path / "out") as folder:
        assert_same({key: folder.view(key) for key in one.full}, one.full)


def test_second_save_replaces_weight_files_and_keeps_other_files(tmp_path):
    out = tmp_path / "out"
    one = single()
    save_folder(out, one.specs, one.full, one.mesh, max_shard_size=200)
    (out / "config.json").write_text("old")
    (out / "README.md").write_text("mine")
    (out / "pytorch_model.bin").write_text("stale weights")
    (out / "training_args.bin").write_text("mine too")
    (out / "runs" / "deep").mkdir(parents=True)
    (out / "runs" / "deep" / "model.safetensors").write_text("another checkpoint")
    (out / "link").symlink_to("README.md")
    os.mkfifo(out / "pipe")
    out.chmod(0o750)
    log = (out / "runs" / "log").open("a")

    save_one(out, write_extras=lambda path, _: (path / "config.json").write_text("new"))
    with log:
        log.write("goes on")
    assert names(out) == [
        "README.md", "checksums.json", "config.json", "link", "model.safetensors", "pipe", "runs", "training_args.bin",
    ]  # fmt: skip
    assert (out / "config.json").read_text() == "new"
    assert (out / "link").read_text() == "mine"
    assert (out / "runs" / "deep" / "model.safetensors").read_text() == "another checkpoint"
    assert (out / "runs" / "log").read_text() == "goes on"
    assert out.stat().st_mode & 0o777 == 0o750
    assert names(tmp_path) == ["out"]
    assert value_in(out) == 1


def fail(path, save):
    (path / "config.json").write_text("half")
    raise KeyError("broken tokenizer")


def test_save_whose_callback_for_extra_files_fails_keeps_the_old_folder(tmp_path):
    save_one(
        tmp_path / "out", write_extras=lambda path, _: (path / "config.json").write_text("old")
    )
    with pytest.raises(KeyError, match="broken tokenizer"):
        save_one(tmp_path / "out", 2.0, write_extras=fail)
    assert value_in(tmp_path / "out") == 1
    assert (tmp_path / "out" / "config.json").read_text() == "old"
    assert names(tmp_path) == ["out"]


def test_save_callback_for_extra_files_that_changes_weight_files_is_refused(tmp_path):
    def overwrite(path, save):
        save_file({"other": torch.ones(1)}, path / "model.safetensors")

    changed = r"write_extras changed the weight files: tensors \['other', 'w'\] are missing"
    with pytest.raises(WeightsError, match=changed):
        save_one(tmp_path / "out", write_extras=overwrite)
    assert names(tmp_path) == []


@pytest.mark.parametrize("function", ["pwrite", "posix_fallocate"])
def test_save_on_a_full_disk_leaves_the_older_checkpoint(tmp_path, monkeypatch, function):
    save_one(tmp_path / "out")

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, function, full)
    with pytest.raises(WeightsError, match=r"No space left on device; expected .* bytes") as caught:
        save_one(tmp_path / "out", 2.0)
    assert "save to another folder on another disk" in str(caught.value)
    assert value_in(tmp_path / "out") == 1
    assert names(tmp_path) == ["out"]


def test_save_writes_correct_files_despite_short_writes_and_missing_fallocate(
    tmp_path, monkeypatch
):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, place: pwrite(fd, data[:3], place))
    monkeypatch.delattr(os, "posix_fallocate")
    one = single()
    save_folder(tmp_path / "out", one.specs, one.full, one.mesh)
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), one.full)


@pytest.mark.parametrize("has_renameat2", [True, False])
def test_temporary_folders_of_killed_saves_are_removed(tmp_path, monkeypatch, has_renameat2):
    if not has_renameat2:
        monkeypatch.setattr(staging, "_renameat2", lambda path, target: False)
    save_one(tmp_path / "out")
    for name in (".out.partial-0123abcd", ".out.previous-0123abcd"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").touch()
    others = [".out.partial-notes", ".output.partial-0123abcd", "out.partial-0123abcd"]
    for name in others:
        (tmp_path / name).mkdir()
    save_one(tmp_path / "out", 2.0)
    assert names(tmp_path) == sorted([*others, "out"])
    assert value_in(tmp_path / "out") == 2


def test_save_after_an_interrupted_rename_restores_the_files_of_the_older_checkpoint(tmp_path):
    """Without renameat2 a kill may come between two renames: the old files are restored."""
    save_one(tmp_path / "out")
    (tmp_path / "out" / "README.md").write_text("mine")
    (tmp_path / "out").rename(tmp_path / ".out.previous-0123abcd")
    save_one(tmp_path / "out", 2.0)
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "README.md").read_text() == "mine"


def test_temporary_folder_of_a_running_save_is_not_removed(tmp_path):
    alive = staging.Staging(tmp_path / "out")
    alive.create()
    save_one(tmp_path / "out")
    assert alive.path.exists()
    alive.discard()
    assert names(tmp_path) == ["out"]


def test_save_into_a_folder_of_unrelated_files_is_refused(tmp_path):
    (tmp_path / "thesis").mkdir()
    save_one(tmp_path / "thesis")  # empty: fine
    (tmp_path / "thesis" / "model.safetensors").rename(tmp_path / "thesis" / "chapter1.tex")
    (tmp_path / "thesis" / "checksums.json").unlink()
    with pytest.raises(WeightsError, match=r"no checkpoint of this kind \(chapter1.tex\)"):
        save_one(tmp_path / "thesis")
    assert names(tmp_path / "thesis") == ["chapter1.tex"]
    with pytest.raises(WeightsError, match="found a file, expected a folder"):
        save_one(tmp_path / "thesis" / "chapter1.tex")
    with pytest.raises(WeightsError, match="cannot be replaced"):
        save_one("/")
    assert names(tmp_path) == ["thesis"]


def test_save_into_the_working_directory_is_refused(tmp_path, monkeypatch):
    save_one(tmp_path / "out")
    monkeypatch.chdir(tmp_path / "out")
    with pytest.raises(WeightsError, match="working directory"):
        save_one(".")


def test_save_into_a_symlinked_folder_keeps_the_symlink(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "latest").symlink_to("real")
    save_one(tmp_path / "latest")
    assert (tmp_path / "latest").is_symlink()
    assert value_in(tmp_path / "real") == 1


@pytest.mark.parametrize(
    ("specs", "local", "problem"),
    [
        ([*ONE, *ONE], {"w": torch.ones(2, 3)}, "found 2 tensors with 1 names"),
        ([], {}, "found 0 tensors"),
        (ONE, {}, "missing on rank 0"),
        (ONE, {"w": torch.ones(3, 2)}, r"shape \[3, 2\], expected torch.float32 of shape \[2, 3\]"),
        (ONE, {"w": torch.ones(2, 3).half()}, "found torch.float16"),
        (ONE, {"w": torch.ones(2, 3), "x": torch.ones(1)}, "without a spec"),
        ([TensorSpec("w", (1,), "float33")], {"w": torch.ones(1)}, "float33"),
        ([TensorSpec("w", (1,), "float32", None, 1)], {"w": torch.ones(1)}, "expected 0..0"),
    ],
)
def test_save_of_tensors_that_do_not_match_their_specs_is_refused_before_writing(
    tmp_path, specs, local, problem
):
    with pytest.raises(WeightsError, match=problem):
        save_folder(tmp_path / "out", specs, local, Mesh())
    assert names(tmp_path) == []


@pytest.mark.parametrize("size", ["5 potatoes", True, None])
def test_invalid_max_shard_size_is_refused(tmp_path, size):
    with pytest.raises(WeightsError, match="max_shard_size"):
        save_one(tmp_path / "out", max_shard_size=size)


def test_adapter_save_on_a_full_disk_is_refused_and_leaves_no_folder(tmp_path, monkeypatch):
    def full(*_args, **_named):
        raise SafetensorError("Error while serializing: No space left on device")

    monkeypatch.setattr(adapter_files, "save_file", full)
    with pytest.raises(WeightsError, match="No space left on device"):
        adapter_files.save_adapter_files(Mesh(), tmp_path / "adapter", {}, lambda _path: None)
    assert names(tmp_path) == []


def test_ranks_of_any_mesh_together_write_every_tensor_element_once():
    """The ranks of any mesh together write each element of each tensor exactly once."""
    from slapo_zoo.weights.write import shares

    for sizes in ((1, 1, 1), (2, 1, 1), (3, 2, 1), (2, 2, 2), (4, 1, 2)):
        specs, _ = model(sizes[1])
        for spec in specs:
            size = spec.shape[spec.placement.axis] if spec.placement else 1
            if spec.placement and spec.placement.problem(size, sizes[0]):
                continue
            ranks = range(sizes[0] * sizes[1] * sizes[2])
            found = [s for rank in ranks for s in shares(spec, Mesh(*sizes, rank=rank))]
            assert sorted(i for s in found for i in range(s.start, s.stop)) == [*range(size)]


def test_save_on_a_mesh_without_process_group_raises(tmp_path):
    specs, full = model()
    mesh = Mesh(tp=2, pp=2)
    with pytest.raises(ValueError, match="found no process group, expected tp\\*pp\\*dp = 4"):
        save_folder(tmp_path / "out", specs, local_tensors(specs, full, mesh), mesh)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_save_that_fails_at_any_write_call_keeps_the_old_checkpoint(tmp_path, monkeypatch, code):
    """Whichever call fails, the folder holds the old or the new checkpoint, and no other files."""
    one, calls = single(), []
    originals = {
        name: getattr(os, name) for name in ("pwrite", "posix_fallocate", "fsync", "rename")
    }

    def failing(name, at):
        def call(*args):
            calls.append(name)
            if len(calls) == at:
                raise OSError(code, os.strerror(code))
            return originals[name](*args)

        return call

    at, outcomes, texts = 0, [], []
    while at <= len(calls):
        at += 1
        calls.clear()
        save_one(tmp_path / "out")
        with monkeypatch.context() as patched:
            for name in originals:
                patched.setattr(os, name, failing(name, at))
            try:
                save_folder(tmp_path / "out", one.specs, one.full, one.mesh, max_shard_size=200)
                outcomes.append("done")
            except WeightsError as error:
                outcomes.append(calls[-1])
                texts.append(str(error))
        assert names(tmp_path) == ["out"]
        with open_checkpoint(tmp_path / "out") as folder:
            found = {key: folder.view(key).clone() for key in folder.key_to_file}
        if list(found) == ["w"]:
            assert found["w"][0, 0] == 1
        else:
            assert_same(found, one.full)
    assert all(os.strerror(code) in text for text in texts)
    assert outcomes.count("done") == 1
    assert {"pwrite", "posix_fallocate", "fsync"} <= set(outcomes)


def test_save_into_a_circular_symlink_is_refused(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(WeightsError, match=r"expected a folder|cannot be used as a folder"):
        save_one(tmp_path / "a")
    save_one(tmp_path / "out")
    (tmp_path / "out" / "circle").symlink_to("circle")
    save_one(tmp_path / "out", 2.0)
    assert value_in(tmp_path / "out") == 2
    assert (tmp_path / "out" / "circle").is_symlink()


def test_save_on_a_rank_flushes_only_file_pages_written_by_that_rank(tmp_path, monkeypatch):
    """Flushing a page shared with another rank would wait for that rank, or read the page back."""
    specs = [
        TensorSpec("columns", (512, 8192), "float32", Placement(1)),
        TensorSpec("rows", (512, 8192), "float32", Placement(0)),
    ]
    layout = plan_layout(specs, "1GB", {"format": "pt"})
    ((name, header),) = layout.headers.items()
    (tmp_path / name).write_bytes(header.ljust(layout.sizes[name]))
    asked = []
    monkeypatch.setattr(
        os, "posix_fadvise", lambda _, start, count, __: asked.append((start, count))
    )
    half = 512 * 8192 * 4 // 2
    for rank in range(2):
        local = {"columns": torch.ones(512, 4096), "rows": torch.ones(256, 8192)}
        write_tensors(tmp_path, layout.slots, specs, local, Mesh(tp=2, rank=rank))
    begin = layout.slots["rows"].start
    assert asked == [(begin, half), (begin + half, half)]
    assert all((tensor == 1).all() for tensor in load_file(tmp_path / name).values())
