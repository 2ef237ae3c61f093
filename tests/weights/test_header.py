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
    "empty": (b"", "truncated", "found 0 bytes"),
    "seven bytes": (GOOD[:7], "truncated", "expected at least 8"),
    "header cut": (GOOD[:20], "truncated", "for the header alone"),
    "data cut": (GOOD[:-1], "truncated", "'a'"),
    "left over": (GOOD + b"x", "left over"),
    "huge header": ((10**9).to_bytes(8, "little") + b"x" * 50, "1000000000", "100000000"),
    "lfs pointer": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
    "zip": (b"PK\x03\x04" + b"\0\0\x08\x08" + b"\0" * 40, "pickle"),
    "page": (b"<!DOCTYPE html><html></html>", "web page"),
    "no json": (packed(b"{nonsense"), "not JSON"),
    "no utf-8": (packed(b'{"\xff": 1}'), "not JSON"),
    "deep json": (packed(b"[" * 100_000), "not JSON"),
    "list": (packed(b"[1, 2]"), "expected an object"),
    "twice": (
        packed(b'{"a":%s,"a":%s}' % ((json.dumps(entry()).encode(),) * 2)),
        "'a'",
        "found twice",
    ),
    "metadata": (packed({"__metadata__": {"x": 1}, "a": entry()}), "__metadata__"),
    "fields": (packed({"a": {"dtype": "F32"}}), "'a'", "data_offsets"),
    "no entry": (packed({"a": 3}), "'a'", "data_offsets"),
    "dtype": (packed({"a": entry("Q4")}), "'a'", "'Q4'", "BF16"),
    "dtype kind": (packed({"a": entry(["F32"])}), "'a'", "found dtype"),
    "negative": (packed({"a": entry(shape=(-2,))}), "'a'", "found shape"),
    "true": (packed({"a": entry(shape=(True, 2))}), "'a'", "found shape"),
    "overflow": (packed({"a": entry(shape=(2**40, 2**40, 0), offsets=(0, 0))}), "found shape"),
    "backwards": (packed({"a": entry(offsets=(8, 0))}), "'a'", "[8, 0]"),
    "one offset": (packed({"a": entry(offsets=(8,))}), "'a'", "data_offsets"),
    "length lies": (packed({"a": entry(shape=(3,))}), "found 8 bytes, expected 12"),
    "dtype lies": (packed({"a": entry("F16")}), "found 8 bytes, expected 4"),
    "overlap": (
        packed({"a": entry(), "b": entry(offsets=(4, 12))}, b"\0" * 12),
        "'b'",
        "lies over 'a'",
    ),
    "same place": (packed({"a": entry(), "b": entry()}), "lies over"),
    "hole": (
        packed({"a": entry(), "b": entry(offsets=(12, 20))}, b"\0" * 20),
        "'b'",
        "leaves a hole after 'a'",
    ),
    "hole in front": (packed({"a": entry(offsets=(4, 12))}, b"\0" * 12), "leaves a hole"),
    "beyond": (packed({"a": entry(offsets=(8, 16))}), "'a'", "truncated"),
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
