"""Loaded slices equal a slow reference, and nothing changes where something does not fit."""

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from shards import COLUMNS, SPLIT, VOCAB, cut, local_tensors, model
from slapo_zoo.errors import WeightsError
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.placement import Placement
from slapo_zoo.weights.folder import open_checkpoint
from slapo_zoo.weights.ledger import AnonymousPeak, anonymous_bytes
from slapo_zoo.weights.load_memory import Target
from slapo_zoo.weights.load_rank_slices import load_tensors, parse_size


@st.composite
def placed(draw):
    """Return a shape, a placement that fits it, and a mesh."""
    n, unit = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    units = st.integers(1, 5)
    kind = draw(st.sampled_from(["plain", "groups", "pad", "replicate"]))
    counts = [draw(units) for _ in range(draw(st.integers(1, 3)) if kind == "groups" else 1)]
    if kind in ("plain", "groups"):
        counts = [max(count, n) for count in counts]
    sizes = tuple(count * unit for count in counts)
    shape = [draw(st.integers(1, 3)) for _ in range(draw(st.integers(1, 3)))]
    axis = draw(st.integers(0, len(shape) - 1))
    shape[axis] = sum(sizes)
    groups = sizes if kind == "groups" else ()
    placement = Placement(axis, "tp", groups, unit, kind == "pad", kind == "replicate")
    return tuple(shape), placement, Mesh(tp=n, rank=draw(st.integers(0, n - 1)))


@settings(max_examples=80, deadline=None)
@given(placed())
def test_loaded_shard_equals_the_slice_of_the_full_tensor(case):
    shape, placement, mesh = case
    full = torch.randn(shape)
    expected = cut(full, placement, mesh)
    with tempfile.TemporaryDirectory() as name:
        save_file({"w": full}, Path(name, "model.safetensors"))
        local = torch.full(expected.shape, torch.nan)
        with open_checkpoint(name) as folder:
            targets = {"x": Target(local, shape, placement)}
            loaded = load_tensors(targets, folder, {"x": "w"}, mesh)
    assert torch.equal(local, expected)
    assert loaded.tensors == 1
    size, n, r = shape[placement.axis], mesh.tp, mesh.rank
    held = sum(run.stop - run.start for run in placement.runs(size, n, r))
    assert loaded.bytes_read == full.nbytes // size * held


@pytest.mark.parametrize("mesh", [Mesh(2, 2, rank=r) for r in range(4)], ids=lambda m: m.rank)
def test_load_of_every_kind_of_sharding_gives_the_slices_of_the_full_tensors(tmp_path, mesh):
    specs, full = model()
    save_file(full, tmp_path / "model.safetensors")
    expected = local_tensors(specs, full, mesh)
    by_name = {spec.name: spec for spec in specs}
    targets = {
        name: Target(torch.empty_like(tensor), by_name[name].shape, by_name[name].placement)
        for name, tensor in expected.items()
    }
    with open_checkpoint(tmp_path) as folder:
        load_tensors(targets, folder, {name: name for name in targets}, mesh)
    for name, target in targets.items():
        assert torch.equal(target.tensor, expected[name]), name


def test_loaded_tensors_are_cast_to_the_parameter_dtype(tmp_path):
    full = torch.randn(4, 6)
    save_file({"w": full}, tmp_path / "model.safetensors")
    local = torch.nn.Parameter(torch.empty(4, 3, dtype=torch.bfloat16))
    with open_checkpoint(tmp_path) as folder:
        target = Target(local, (4, 6), COLUMNS)
        loaded = load_tensors({"w": target}, folder, {"w": "w"}, Mesh(tp=2, rank=1))
    assert torch.equal(local, full[:, 3:].bfloat16())
    assert loaded.bytes_read == 4 * 3 * 4


def test_load_with_several_errors_reports_all_and_changes_no_parameter(tmp_path):
    tensors = {"a": torch.ones(4), "b": torch.ones(3, 2), "q": torch.ones(2).to(torch.int8)}
    save_file(tensors, tmp_path / "model.safetensors")
    locals_ = {name: torch.zeros(2) for name in "abcqls"}
    targets = {name: Target(local, (2,)) for name, local in locals_.items()}
    targets["a"] = Target(locals_["a"], (4,), SPLIT)
    targets["l"] = Target(locals_["l"], (4,), VOCAB)
    targets["s"] = Target(torch.zeros(3), (4,), SPLIT)
    source = {"a": "a", "b": "b", "q": "q", "l": "a", "s": "a"}
    with open_checkpoint(tmp_path) as folder, pytest.raises(WeightsError) as caught:
        load_tensors(targets, folder, source, Mesh(tp=2))
    text = str(caught.value)
    assert "4 of 6 tensors do not fit" in text
    assert "b (key b): found shape [3, 2], expected [2]" in text
    assert "c: missing, expected shape [2]" in text
    assert "q (key q): found dtype torch.int8, expected one that fits torch.float32" in text
    assert "s (key a): found a local tensor of [3], expected [2]" in text
    assert all(local.sum() == 0 for local in locals_.values())


def test_load_error_lists_all_tensor_axes_that_the_mesh_does_not_divide(tmp_path):
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    targets = {f"t{i}": Target(torch.zeros(1), (3,), SPLIT) for i in range(30)}
    with open_checkpoint(tmp_path) as folder, pytest.raises(WeightsError) as caught:
        load_tensors(targets, folder, dict.fromkeys(targets, "a"), Mesh(tp=4))
    assert "cannot be sharded over tp=4" in str(caught.value)
    assert "... and 10 more" in str(caught.value)


@pytest.mark.parametrize("axis", [0, 1])
def test_load_of_a_shard_allocates_no_extra_copy_in_memory(tmp_path, axis):
    if not anonymous_bytes():
        pytest.skip("this kernel does not tell anonymous memory")
    placement, mesh = Placement(axis), Mesh(tp=4, rank=1)
    for size in (16, 8192):  # the first: what a first call imports
        save_file({"w": torch.ones(size, 4096)}, tmp_path / "model.safetensors")
        local = torch.zeros(placement.local_shape((size, 4096), 4, 1))
        with open_checkpoint(tmp_path) as folder, AnonymousPeak() as peak:
            load_tensors({"w": Target(local, (size, 4096), placement)}, folder, {"w": "w"}, mesh)
        assert local.min() == 1
    assert peak.growth < 24 * 2**20  # the slice has 32 MiB, the tensor 128


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8])
@pytest.mark.parametrize("axis", [0, 1])
def test_tensors_of_8_bit_dtypes_load_bit_equal(tmp_path, dtype, axis):
    full = torch.arange(24, dtype=torch.uint8).view(4, 6).view(dtype)
    save_file({"w": full}, tmp_path / "model.safetensors")
    placement, mesh = Placement(axis), Mesh(tp=2, rank=1)
    local = torch.empty(placement.local_shape((4, 6), 2, 1), dtype=dtype)
    with open_checkpoint(tmp_path) as folder:
        load_tensors({"w": Target(local, (4, 6), placement)}, folder, {"w": "w"}, mesh)
    expected = full.view(torch.uint8).chunk(2, axis)[1]
    assert torch.equal(local.view(torch.uint8), expected)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_load_with_check_finite_warns_of_tensors_with_nan_or_infinity(tmp_path, value, recwarn):
    save_file({"a": torch.ones(2), "b": torch.full((3,), value)}, tmp_path / "model.safetensors")
    targets = {name: Target(torch.zeros(n), (n,)) for name, n in (("a", 2), ("b", 3))}
    source = {"a": "a", "b": "b"}
    with open_checkpoint(tmp_path) as folder:
        load_tensors(targets, folder, source, Mesh())
        assert not recwarn.list
        with pytest.warns(UserWarning, match=r"1 of 2 tensors hold NaN or infinity: b"):
            load_tensors(targets, folder, source, Mesh(), check_finite=True)
    assert not targets["b"].tensor.isfinite().any()  # loaded all the same


class Terminal:
    def __init__(self):
        self.text = ""

    def isatty(self):
        return True

    def write(self, text):
        self.text += text

    def flush(self):
        pass


@pytest.mark.parametrize("rank", [0, 1])
def test_load_shows_a_progress_bar_on_rank_0_in_a_terminal(tmp_path, monkeypatch, rank):
    save_file({"w": torch.ones(4)}, tmp_path / "model.safetensors")
    monkeypatch.setattr("slapo_zoo.weights.ledger.LEAST", 1)
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    with open_checkpoint(tmp_path) as folder:
        target = Target(torch.zeros(4), (4,))
        load_tensors({"w": target}, folder, {"w": "w"}, Mesh(tp=2, rank=rank))
    assert ("loading" in terminal.text) == (rank == 0)


def test_load_shows_no_progress_bar_in_a_log_file(tmp_path, monkeypatch, capsys):
    save_file({"w": torch.ones(4)}, tmp_path / "model.safetensors")
    monkeypatch.setattr("slapo_zoo.weights.ledger.LEAST", 1)
    with open_checkpoint(tmp_path) as folder:
        load_tensors({"w": Target(torch.zeros(4), (4,))}, folder, {"w": "w"}, Mesh())
    assert capsys.readouterr() == ("", "")


def test_parse_size_converts_byte_units_and_refuses_words():
    assert [parse_size(size, "x") for size in ("8GB", "2 GiB", "100b", 5, None)] == [
        8 * 10**9, 2 * 2**30, 100, 5, None,
    ]  # fmt: skip
    with pytest.raises(WeightsError, match="found 'much'"):
        parse_size("much", "max_load_memory")
