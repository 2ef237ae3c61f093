"""Headers of safetensors files: a mistake raises one error before a tensor is mapped."""

import json

import pytest

from slapo_zoo.errors import WeightsError
from slapo_zoo.weights.safetensors_file import SafetensorsFile


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def packed(header, data=b"\0" * 8):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def refused(path, content, *texts):
    path.write_bytes(content)
    with pytest.raises(WeightsError) as caught:
        SafetensorsFile(path)
    for text in (str(path), *texts):
        assert text in str(caught.value)


GOOD = packed({"a": entry()})
BAD = {
    "empty": (b"", "found 0 bytes"),
    "header cut": (GOOD[:20], "found 20 bytes", "invalid header length"),
    "data cut": (GOOD[:-1], "file not fully covered"),
    "left over": (GOOD + b"x", "file not fully covered"),
    "huge header": ((10**9).to_bytes(8, "little") + b"x" * 50, "header too large"),
    "lfs pointer": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
    "zip": (b"PK\x03\x04" + b"\0\0\x08\x08" + b"\0" * 40, "pickle"),
    "page": (b"<!DOCTYPE html><html></html>", "web page"),
    "no json": (packed(b"{nonsense"), "invalid JSON"),
    "deep json": (packed(b"[" * 100_000), "invalid JSON"),
    "dtype": (packed({"a": entry("F4", (16,))}), "'a'", "found dtype F4", "BF16"),
    "overflow": (packed({"a": entry(shape=(2**40, 2**40, 0), offsets=(0, 0))}), "overflow"),
    "length lies": (packed({"a": entry(shape=(3,))}), "invalid shape"),
    "overlap": (packed({"a": entry(), "b": entry(offsets=(4, 12))}, b"\0" * 12), "`b`"),
    "hole": (packed({"a": entry(), "b": entry(offsets=(12, 20))}, b"\0" * 20), "`b`"),
}


@pytest.mark.parametrize("case", BAD, ids=str)
def test_invalid_safetensors_headers_are_refused(tmp_path, case):
    content, *texts = BAD[case]
    refused(tmp_path / "bad.safetensors", content, *texts)


def test_safetensors_header_truncated_anywhere_is_refused(tmp_path):
    for length in range(len(GOOD)):
        refused(tmp_path / "bad.safetensors", GOOD[:length])


def test_valid_safetensors_header_is_read(tmp_path):
    path = tmp_path / "good.safetensors"
    path.write_bytes(GOOD)
    with SafetensorsFile(path) as file:
        assert file.view("a").tolist() == [0, 0]


def test_absent_safetensors_file_is_refused(tmp_path):
    with pytest.raises(WeightsError, match="cannot be opened"):
        SafetensorsFile(tmp_path / "none")
