"""Ranks killed in the middle of a save: the old checkpoint stays, the other ranks raise."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shards import assert_same, model
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.placement import TensorSpec
from slapo_zoo.weights.folder import open_checkpoint
from slapo_zoo.weights.save import save_folder
from slapo_zoo.weights.staging import bring_back

SEED, POINTS = 11, 12
PROGRAM = Path(__file__).with_name("crash_ranks.py")


def old_checkpoint(out, value):
    specs = [TensorSpec("old", (2,), "float32")]
    save_folder(out, specs, {"old": torch.full((2,), value)}, Mesh())


def check(out, victim):
    """Check that the other ranks raise and the old checkpoint is complete; return the files left by the save."""
    for rank in set(range(4)) - {victim}:
        text = Path(f"{out}-error-{rank}").read_text()
        assert text.startswith("RankError: rank "), text
        assert "lost contact with " in text
    assert load_file(out / "model.safetensors")["old"].tolist() == [1, 1]
    assert {path.name for path in out.iterdir()} == {"model.safetensors", "checksums.json"}
    return partial(out)


def partial(out):
    return list(out.parent.glob(f".{out.name}.partial-*"))


def run_cases(cases, **variables):
    """Save over an old checkpoint in each folder; a rank is killed on the way."""
    command = [sys.executable, str(PROGRAM)]
    for out, (victim, where) in cases.items():
        old_checkpoint(out, 1.0)
        command += [str(out), str(victim), where]
    paths = [str(PROGRAM.parents[1] / "support"), str(PROGRAM.parents[2])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}
    subprocess.run(command, check=True, timeout=500, capture_output=True, env=env)


KILLED = {"a": (1, "write"), "b": (0, "finish")}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the folder of a whole save (dry) and of two with a killed rank; a program for all of them imports torch once."""
    folder = tmp_path_factory.mktemp("saved")
    run_cases({folder / "dry" / "out": (0, "0"), **{folder / name: KILLED[name] for name in KILLED}})  # fmt: skip
    return folder


def test_rank_killed_during_a_save_leaves_the_older_checkpoint(saved):
    for name, (victim, _) in KILLED.items():
        out = saved / name
        left = check(out, victim)
        assert len(left) == (victim == 0)  # the next save removes what only rank 0 could
        old_checkpoint(out, 0.0)
        assert not partial(out)
        assert load_file(out / "model.safetensors")["old"].tolist() == [0, 0]


def test_save_killed_at_any_point_leaves_a_complete_checkpoint(saved, tmp_path):
    """Kill random ranks at 12 points of a save: the folder holds the complete old or new checkpoint."""
    kill_at(tmp_path, POINTS, saved)


@pytest.mark.slow
@pytest.mark.parametrize("variables", [{}, {"NO_EXCHANGE": "1"}], ids=["exchange", "renames"])
def test_save_killed_fifty_times_leaves_a_complete_checkpoint(tmp_path, variables):
    run_cases({tmp_path / "dry" / "out": (0, "0")}, **variables)
    kill_at(tmp_path, 50, tmp_path, **variables)


def kill_at(tmp_path, count, saved, **variables):
    """Kill ranks at `count` points; `saved` has the counts of calls of a whole save."""
    calls = [int((saved / "dry" / f"out-calls-{rank}").read_text()) for rank in range(4)]
    draw = random.Random(SEED)
    victims = [draw.randrange(4) for _ in range(count - 4)]
    points = [draw.randint(1, calls[rank]) for rank in victims]
    points += [calls[0] - n for n in (1, 3, 6, 12)]  # about the swap, which rank 0 does last
    # a folder for each: a save looks at what lies beside its target, and that counts
    cases = {
        tmp_path / str(i) / "out": (rank, str(point))
        for i, (rank, point) in enumerate(zip([*victims, 0, 0, 0, 0], points, strict=True))
    }
    run_cases(cases, **variables)
    for out in cases:
        bring_back(out)
    outcomes = {out: whole(out) for out in cases}
    assert set(outcomes.values()) == {"old", "new"}, outcomes
    for out in cases:
        old_checkpoint(out, 0.0)
        assert not partial(out)
        assert load_file(out / "model.safetensors")["old"].tolist() == [0, 0]


def whole(out):
    """Return which checkpoint the folder holds completely; anything else fails."""
    with open_checkpoint(out) as folder:
        found = {key: folder.view(key).clone() for key in folder.key_to_file}
    if list(found) == ["old"]:
        assert found["old"].tolist() == [1, 1]
        return "old"
    assert_same(found, model()[1])
    return "new"
