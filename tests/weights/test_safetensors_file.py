"""Tensor views over a mapped file: every dtype, odd shapes, odd offsets, lifetimes."""

import json

import pytest
import torch
from safetensors.torch import save_file

from slapo_zoo.weights.safetensors_file import DTYPES, SafetensorsFile


def raw_file(path, code, values):
    """Write a file by hand, since the library does not write every dtype of the format."""
    size = values.numel() * values.itemsize
    header = {"x": {"dtype": code, "shape": list(values.shape), "data_offsets": [0, size]}}
    text = json.dumps(header).encode()
    data = bytes(values.reshape(-1).view(torch.uint8).tolist())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize("code", DTYPES)
def test_safetensors_of_every_dtype_are_read_at_any_alignment(tmp_path, code):
    values = torch.arange(48, dtype=torch.uint8)
    values = values % 2 if code == "BOOL" else values
    values = values.view(DTYPES[code]).reshape(2, -1)
    path = tmp_path / "x.safetensors"
    raw_file(path, code, values)
    with SafetensorsFile(path) as file:
        found = file.view("x")
        assert found.dtype == DTYPES[code]
        assert torch.equal(found.view(torch.uint8), values.view(torch.uint8))


def test_files_written_by_the_safetensors_library_are_read_with_equal_values(tmp_path):
    tensors = {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "flags": torch.tensor([True, False, True]),
        "half": torch.randn(3, 5).bfloat16(),
        "deep": torch.randn(2, 3, 4, 5),
        "größe": torch.arange(5),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    with SafetensorsFile(tmp_path / "x.safetensors") as file:
        assert file.metadata == {"format": "pt"}
        assert file.entries.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert file.entries[name].shape == tuple(tensor.shape)
            assert torch.equal(file.view(name), tensor)


def test_safetensors_file_without_tensors_has_no_entries(tmp_path):
    save_file({}, tmp_path / "x.safetensors")
    with SafetensorsFile(tmp_path / "x.safetensors") as file:
        assert file.entries == {}


def test_tensor_views_outlive_the_closed_file_and_never_write_to_it(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"x": torch.ones(5000)}, path)
    before = path.read_bytes()
    file = SafetensorsFile(path)
    view = file.view("x")
    file.close()
    view.zero_()
    assert view.sum() == 0
    assert path.read_bytes() == before
