"""Training that receives a stop signal: it finishes the step, saves, and prints how to resume."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from cli_runs import END, failure, tokenizer
from slapo_zoo.cli.main import main
from slapo_zoo.cli.training import run as training
from slapo_zoo.cli.training.options import TrainOptions
from slapo_zoo.cli.training.run import StoppedError, check_finite
from slapo_zoo.errors import SlapoError
from slapo_zoo.weights import history, staging
from slapo_zoo.weights.history import keep_newest, latest, place_of, steps_in

SIZE = ["--seq-len", "16", "--batch-size", "4", "--device", "cpu"]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    from transformers import GPT2Config, GPT2LMHeadModel

    folder, words = tmp_path_factory.mktemp("job"), tokenizer(eos_token=END)
    config = GPT2Config(
        n_embd=32, n_head=4, n_layer=2, n_positions=64, vocab_size=len(words), bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    for part in (GPT2LMHeadModel(config), words):
        part.save_pretrained(folder / "model")
    (folder / "text.txt").write_text("the cat sat on the mat and the dog ran away. " * 60)
    return ["train", str(folder / "model"), "--data", str(folder / "text.txt"), *SIZE]


def run(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert not ended.value.code


def state_of(folder):
    return json.loads((folder / "training_state.json").read_text())


def asked_to_stop(job, out, number, *more):
    """Start a long training, send a signal once it has saved; return its output and exit status."""
    command = [sys.executable, "-m", "slapo_zoo.cli.main", *job, "--max-steps", "100000"]
    command += ["--checkpoint", str(out), "--save-steps", "2", *more]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    child = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 100
    while not (out / "training_state.json").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    child.send_signal(number)
    text = child.communicate(timeout=100)[1].decode()
    return text, child.returncode


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("number", "code", "more"),
    [
        (signal.SIGTERM, 75, ()),
        (signal.SIGINT, 130, ("--tp", "2")),
        pytest.param(signal.SIGUSR1, 75, ("--tp", "2"), marks=pytest.mark.slow),
    ],
)
def test_stop_signal_makes_training_finish_the_step_and_save_a_checkpoint(
    job, tmp_path, number, code, more
):
    text, found = asked_to_stop(job, tmp_path / "out", number, *more)
    assert found == code, text
    step = state_of(tmp_path / "out")["step"]
    assert f"stopped after step {step} of 100000" in text
    assert f"the same command resumes from {tmp_path / 'out'}" in text


def test_stop_signal_without_checkpoint_option_reports_that_nothing_was_saved():
    stopped = StoppedError(signal.SIGTERM, 3, TrainOptions("m", max_steps=9))
    assert stopped.code == 75
    assert "nothing was saved" in str(stopped)


def test_symlink_last_in_the_checkpoint_folder_points_to_the_newest_step_folder(
    job, tmp_path, capsys
):
    out = tmp_path / "out"
    more = ["--checkpoint", str(out), "--save-steps", "1", "--save-total-limit", "2"]
    run(*job, "--max-steps", "4", *more)
    assert [path.name for path in steps_in(out)] == ["step-00000003", "step-00000004"]
    assert os.readlink(out / "last") == "step-00000004"
    run(*job, "--max-steps", "5", "--checkpoint", str(out), "--learning-rate", "0.5")
    assert os.readlink(out / "last") == "step-00000005"
    said = capsys.readouterr().out
    assert "4 of 5 steps are done" in said
    assert "learning rate: 0.0001 in the checkpoint, 0.5 from now on" in said
    assert state_of(out / "last")["optimizer"]["groups"][0]["options"]["lr"] == 0.5


def test_train_command_refuses_to_resume_with_other_training_text(job, tmp_path, capfd):
    out = tmp_path / "out"
    run(*job, "--max-steps", "1", "--checkpoint", str(out))
    text = Path(job[3]).read_text()
    other = tmp_path / "other.txt"
    other.write_text(text.replace("the dog ran", "the cat sat"))
    changed = [str(other) if arg == job[3] else arg for arg in job]
    error = failure(capfd, *changed, "--max-steps", "2", "--checkpoint", str(out))
    assert "the checkpoint was trained with other data" in error


@pytest.mark.parametrize(
    ("loss", "norm", "stops"),
    [(1.0, 1.0, False), (math.nan, 1.0, True), (1.0, math.inf, True), (1.0, math.nan, True)],
)
def test_train_command_stops_with_an_error_when_loss_or_gradient_norm_is_nan(loss, norm, stops):
    options = TrainOptions("m", checkpoint="out")
    if not stops:
        check_finite(3, loss, norm, options)
        return
    with pytest.raises(SlapoError, match=r"in step 3.*\n.*what was saved before is in out"):
        check_finite(3, loss, norm, options)


def test_train_command_with_nan_loss_does_not_overwrite_the_last_checkpoint(
    job, tmp_path, monkeypatch, capfd
):
    out = tmp_path / "out"
    run(*job, "--max-steps", "2", "--checkpoint", str(out))
    good = (out / "model.safetensors").read_bytes()
    making = training.make_engine

    def broken(model, *rest):
        with torch.no_grad():
            next(model.parameters()).fill_(math.nan)
        return making(model, *rest)

    monkeypatch.setattr(training, "make_engine", broken)
    monkeypatch.setattr(training.Run, "begin", lambda self: 2)
    error = failure(capfd, *job, "--max-steps", "9", "--checkpoint", str(out))
    assert "found loss nan" in error
    assert (out / "model.safetensors").read_bytes() == good


def make(folder, step):
    folder.mkdir(parents=True)
    (folder / "training_state.json").write_text(str(step))
    (folder / "config.json").write_text("{}")


def test_newest_step_folder_is_found_when_the_symlink_last_is_missing(tmp_path):
    for step in (9, 10, 100):
        make(place_of(tmp_path, step, 3), step)
        keep_newest(tmp_path, place_of(tmp_path, step, 3), 3)
    assert latest(tmp_path).name == "step-00000100"
    (tmp_path / "last").unlink()
    assert latest(tmp_path).name == "step-00000100"
    assert history.is_history(tmp_path)


def test_checkpoint_of_a_save_killed_between_two_renames_is_restored(tmp_path, monkeypatch):
    """Without RENAME_EXCHANGE, as on NFS, the checkpoint that was moved away is found and restored."""
    make(tmp_path / "out", 4)
    monkeypatch.setattr(staging, "_renameat2", lambda *_: False)
    renaming, calls = os.rename, []

    def rename(one, other):
        calls.append(one)
        if len(calls) >= 2:
            raise KeyboardInterrupt  # as a kill: nothing is undone, since no rename runs any more
        renaming(one, other)

    one = staging.Staging(tmp_path / "out")
    one.create()
    make(one.path / "x", 5)
    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        one.publish()
    monkeypatch.setattr(os, "rename", renaming)
    os.close(one._lock)
    assert not (tmp_path / "out").exists()
    assert latest(tmp_path / "out") == tmp_path / "out"
    assert (tmp_path / "out" / "training_state.json").read_text() == "4"


def test_temporary_folder_of_a_running_save_is_kept_on_a_filesystem_without_locks(
    tmp_path, monkeypatch
):
    def none(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(staging.fcntl, "flock", none)
    one, other = staging.Staging(tmp_path / "out"), staging.Staging(tmp_path / "out")
    one.create()
    other.create()
    assert one.path.exists()
    day = time.time() - staging.LEFT_S - 1
    os.utime(one.path, (day, day))
    third = staging.Staging(tmp_path / "out")
    third.create()
    assert not one.path.exists()
    assert other.path.exists()
    for left in (one, other, third):
        left.discard()
