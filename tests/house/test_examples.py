"""Every script of examples/ runs, and its saved model loads in plain transformers."""

import json
import math
import os
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import transformers

from engine_runs import CASES
from parity import checkpoint
from ranks import RankPool

ROOT = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted(ROOT.glob("*.py"))
ALWAYS = ("train_torch", "train_accelerate")  # tests/model has the engines of the others


@pytest.fixture(scope="module")
def ranks():
    """Return a separate rank pool, since DeepSpeed patches torch."""
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


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(path, marks=() if path.stem in ALWAYS else pytest.mark.slow)
        for path in EXAMPLES
    ],
    ids=lambda path: path.stem,
)
def test_example_script_runs_and_has_finite_losses(script, tmp_path, ranks):
    folder = checkpoint(CASES["gpt2"], tmp_path)
    losses = ranks.run(run, 4, script, folder, tmp_path, timeout=300)
    assert all(found == losses[0] for found in losses), "ranks tell different losses"
    assert len(losses[0]) == 4
    assert all(3 < loss < 7 for loss in losses[0])
    before = transformers.AutoModelForCausalLM.from_pretrained(folder)
    after = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    assert not torch.equal(before.lm_head.weight, after.lm_head.weight)


def test_dpo_example_has_equal_losses_on_all_ranks(tmp_path, ranks):
    folder = checkpoint(CASES["gpt2"], tmp_path)
    script = ROOT / "post_training" / "dpo.py"
    losses = ranks.run(run, 4, script, folder, tmp_path, timeout=300)
    assert all(found == losses[0] for found in losses)
    assert abs(losses[0][0] - math.log(2)) < 0.1  # the frozen copy says what the model says
    assert losses[0][-1] < losses[0][0] - 0.1
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained")


@pytest.mark.slow
def test_example_with_rewards_of_sampled_text_runs_under_torchrun_without_error(tmp_path):
    """Start the example by torchrun: its sampler is a process of its own, which imports its function by name."""
    folder = checkpoint(CASES["gpt2"], tmp_path)
    script = ROOT / "post_training" / "sampled_reward.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    made = subprocess.run(
        [*command, str(script), str(folder)], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    rewards = [json.loads(found) for found in re.findall(r"\[[0-9., e-]+\]", made.stdout)]
    assert len(rewards) == 2
    assert rewards[0] == rewards[1]
    assert sum(rewards[0][-2:]) > sum(rewards[0][:2]) + 0.1
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained")


def run_task(name, steps, out):
    os.chdir(out)
    return runpy.run_path(str(ROOT / "tasks" / name), run_name="example")["main"](steps=steps)


def learnt(name, found):
    """Return True where the task, run at full length, has reached the result that it shows."""
    return {"classify_bert.py": lambda accuracy: accuracy > 0.85,
            "pretrain_gpt2.py": lambda losses: losses[-1] < 3.6,
            "translate_t5.py": lambda said: said[1] > 0.7}[name](found)  # fmt: skip


TASKS = [("classify_bert.py", 2, 120, "code_or_comment", "AutoModelForSequenceClassification"),
         ("pretrain_gpt2.py", 4, 100, "python_docs", "AutoModelForCausalLM"),
         ("translate_t5.py", 2, 200, "error_names", "AutoModelForSeq2SeqLM")]  # fmt: skip


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "nprocs", "steps", "folder", "auto"), TASKS, ids=[t[0] for t in TASKS]
)
def test_example_script_has_equal_results_on_all_ranks_and_saves_a_transformers_checkpoint(
    name, nprocs, steps, folder, auto, whole, tmp_path, ranks
):
    found = ranks.run(run_task, nprocs, name, steps if whole else 4, tmp_path, timeout=300)
    assert all(other == found[0] for other in found), "ranks tell different results"
    assert not whole or learnt(name, found[0])
    _, info = getattr(transformers, auto).from_pretrained(
        tmp_path / folder, output_loading_info=True
    )
    assert not any(info.values())
    if name == "pretrain_gpt2.py":
        assert found[0][-1] < found[0][0]


NOTEBOOKS = {
    "emulate": lambda found: found["worst"] < 1e-4,
    "own_model": lambda found: found["worst"] < 1e-4 and "0.down" in found["said"],
    "trace": lambda found: (
        Path("trace.png").exists() and json.loads(Path("trace.json").read_text())
    ),
}


@pytest.mark.parametrize("name", [path.stem for path in sorted(ROOT.glob("*.ipynb"))])
def test_every_example_notebook_runs_without_error(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "notebook"}
    for cell in json.loads((ROOT / f"{name}.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), namespace)
    assert NOTEBOOKS[name](namespace)
