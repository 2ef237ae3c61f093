"""Killed ranks and stop signals during an evaluation."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli_runs import write_gpt2

JOB = ["--seq-len", "16", "--batch-size", "4", "--device", "cpu", "--learning-rate", "0.001"]
EVALUATED = ["--set", "eval_steps=1", "--set", "log_file=log.jsonl"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("evaluated")
    write_gpt2(place / "model")
    (place / "text.txt").write_text("the cat sat on the mat and the dog ran away. " * 60)
    (place / "short.txt").write_text("to be or not to be " * 20)
    (place / "long.txt").write_text("to be or not to be " * 3000)  # seconds for one evaluation
    return place


def start(folder, place, *more):
    place.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "slapo_zoo.cli.main", "train", str(folder / "model"), *JOB]
    command += ["--data", str(folder / "text.txt"), *EVALUATED, *more]
    return subprocess.Popen(
        command, cwd=place, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finished(folder, place, *more):
    """Step --> loss, as its log has them."""
    child = start(folder, place, "--set", f"eval_data={folder / 'short.txt'}", *more)
    said = child.communicate(timeout=200)[1]
    assert child.returncode == 0, said
    lines = map(json.loads, (place / "log.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}


def ranks_of(launcher):
    return list(map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "says"),
    [(signal.SIGKILL, 2, "killed by SIGKILL"), (signal.SIGTERM, 75, "the same command resumes")],
)
def test_train_command_stopped_during_evaluation_saves_and_resumes_on_another_layout(
    folder, tmp_path, number, code, says
):
    """A killed rank ends all ranks at once; a stop signal lets the evaluation finish and saves its result."""
    expected = finished(folder, tmp_path / "whole", "--max-steps", "5")
    place, keep = tmp_path / "cut", ("--checkpoint", "saved", "--save-steps", "1")
    long = ("--set", f"eval_data={folder / 'long.txt'}", "--max-steps", "99")
    child = start(folder, place, *keep, *long, "--tp", "2")
    try:
        deadline = time.monotonic() + 120
        while not (place / "saved" / "training_state.json").exists():
            assert time.monotonic() < deadline
            assert child.poll() is None
            time.sleep(0.05)
        time.sleep(0.7)  # the step after it takes less: this is its evaluation
        child_or_rank = ranks_of(child.pid)[-1] if number == signal.SIGKILL else child.pid
        os.kill(child_or_rank, number)
        said = child.communicate(timeout=100)[1]
    finally:
        child.kill()
    assert child.returncode == code, said
    assert says in said
    assert "Traceback" not in said
    found = finished(folder, place, *keep, "--max-steps", "5", "--pp", "2")
    assert found == pytest.approx(expected, rel=1e-4)
