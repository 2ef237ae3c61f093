"""A rank that is killed in the middle of a save: the old folder stays, the others say so."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from slapo_zoo.mesh import Mesh
from slapo_zoo.placement import TensorSpec
from slapo_zoo.weights.save import save_folder

PROGRAM = Path(__file__).with_name("crash_ranks.py")


def old_checkpoint(out, value):
    specs = [TensorSpec("old", (2,), "float32")]
    save_folder(out, specs, {"old": torch.full((2,), value)}, Mesh())


def check(out, victim):
    """The survivors know, and the old checkpoint is whole; return what the save left behind."""
    for rank in set(range(4)) - {victim}:
        text = Path(f"{out}-error-{rank}").read_text()
        assert text.startswith("RankError: rank "), text
        assert "lost contact with another rank" in text
    assert load_file(out / "model.safetensors")["old"].tolist() == [1, 1]
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    return partial(out)


def partial(out):
    return list(out.parent.glob(f".{out.name}.partial-*"))


def test_a_killed_rank(tmp_path):
    cases = {tmp_path / "a": (1, "write"), tmp_path / "b": (0, "finish")}
    command = [sys.executable, str(PROGRAM)]
    for out, (victim, where) in cases.items():
        old_checkpoint(out, 1.0)
        command += [str(out), str(victim), where]
    paths = [str(PROGRAM.parents[1]), str(PROGRAM.parents[2])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run(command, check=True, timeout=120, capture_output=True, env=env)
    for out, (victim, _) in cases.items():
        left = check(out, victim)
        assert len(left) == (victim == 0)  # the next save removes what only rank 0 could
        old_checkpoint(out, 0.0)
        assert not partial(out)
        assert load_file(out / "model.safetensors")["old"].tolist() == [0, 0]
