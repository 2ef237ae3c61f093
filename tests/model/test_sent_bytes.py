"""Bytes that a step of dp_shard= sends, against torch's FSDP2; `ci/run.py bench zero` measures times."""

import importlib
import sys
from pathlib import Path

import pytest

CI = str(Path(__file__).resolve().parents[2] / "ci")


@pytest.fixture
def zero():
    sys.path.insert(0, CI)
    try:
        yield importlib.import_module("benchmarks.zero")
    finally:
        sys.path.remove(CI)


def test_dp_shard_step_sends_no_more_bytes_than_fsdp2(zero):
    for found in zero.on_ranks(zero.measured, zero.RANKS, 32, 3, "bf16", 0):
        (mine, _), (theirs, _) = found["ours"], found["FSDP2"]
        parameters = sum(p.numel() for p in zero.plain(zero.config_of(32, 3)).parameters())
        assert theirs > parameters * (2 + 4) / zero.RANKS  # counted at all
        assert mine <= zero.MOST_BYTES * theirs
