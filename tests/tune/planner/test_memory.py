"""Predicted against measured memory on this machine; the wide grid is `ci/run.py bench memory`."""

import importlib
import sys
from pathlib import Path

import pytest

CI = str(Path(__file__).resolve().parents[3] / "ci")


@pytest.fixture(scope="module")
def memory():
    sys.path.insert(0, CI)
    try:
        yield importlib.import_module("benchmarks.memory")
    finally:
        sys.path.remove(CI)


def check(rows):
    beyond = [row for row in rows if row["beyond"]]
    assert not beyond, beyond


@pytest.mark.slow
def test_memory_predicted_by_the_planner_for_gpt2_matches_measured_memory(memory):
    check(
        memory.cells(
            "gpt2", "small", {"1": memory.LAYOUTS["1"]}, {"blocks": {"checkpoint_ratio": 1.0}}
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "bert", "t5", "opt", "llama"])
def test_memory_predicted_by_the_planner_for_every_family_matches_measured_memory(memory, family):
    check(memory.cells(family, "small", memory.LAYOUTS, memory.RECOMPUTE))
