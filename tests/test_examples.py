"""Every script of examples/ runs on 4 ranks, and what it saves loads in plain transformers."""

import os
import runpy
import warnings
from pathlib import Path

import pytest
import torch
import transformers

from engine_runs import CASES
from parity import checkpoint
from ranks import RankPool

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.fixture(scope="module")
def ranks():
    """A pool of its own: DeepSpeed patches torch."""
    pool = RankPool()
    yield pool
    pool.close()


def run(script, folder, out):
    os.chdir(out)
    warnings.simplefilter("ignore")
    found = runpy.run_path(str(script), run_name="example")["main"](folder)
    if "megatron" in script.name:
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
    if "accelerate" in script.name or "trainer" in script.name:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(True)
    return found


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_example(script, tmp_path, ranks):
    folder = checkpoint(CASES["gpt2"], tmp_path)
    losses = ranks.run(run, 4, script, folder, tmp_path, timeout=300)
    assert all(found == losses[0] for found in losses), "ranks tell different losses"
    assert len(losses[0]) == 4
    assert all(3 < loss < 7 for loss in losses[0])
    before = transformers.AutoModelForCausalLM.from_pretrained(folder)
    after = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    assert not torch.equal(before.lm_head.weight, after.lm_head.weight)
