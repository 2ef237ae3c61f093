"""Every step leaves a JSON line, and goes to the trackers that are named."""

import json
from pathlib import Path

import pytest
import torch

from cli_runs import failure, run, write_gpt2
from slapo_zoo.cli.training import records
from slapo_zoo.cli.training.options import ConfigError, TrainOptions
from slapo_zoo.model import step_meter
from slapo_zoo.pipeline.busy import Busy


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    write_gpt2(folder / "model")
    (folder / "text.txt").write_text("the cat sat on the mat and the dog ran away. " * 30)
    return ["train", folder / "model", "--data", folder / "text.txt", "--seq-len", 16,
            "--batch-size", 4, "--device", "cpu"]  # fmt: skip


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_training_log_has_one_line_per_step_after_a_kill_and_resume(job, tmp_path):
    path, kept = tmp_path / "logs" / "run.jsonl", tmp_path / "kept"
    more = ["--set", f"log_file={path}", "--checkpoint", kept, "--set", "eval_share=0.2", "--set", "eval_steps=2"]  # fmt: skip
    run(*job, "--max-steps", 2, *more)
    first = path.read_text()
    path.write_text(first + json.dumps({"step": 3, "loss": 9.9}) + '\n{"step": 4, "lo')  # killed
    run(*job, "--max-steps", 4, "--dp", 2, *more)
    assert path.read_text().startswith(first)
    found = lines(path)
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    names = {"step", "loss", "grad_norm", "lr", "seconds", "tokens", "tokens_per_s", "memory", "mfu", "bubble"}  # fmt: skip
    assert found[0].keys() == names
    assert found[1].keys() == found[3].keys() == names | {"eval_loss", "eval_accuracy"}
    assert {line["tokens"] for line in found} == {64}
    assert {line["mfu"] for line in found} == {None}, "no peak of this processor is known"
    assert all(line["loss"] < 9 and line["memory"] > 1e6 for line in found)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_train_command_prints_one_error_when_the_disk_of_its_log_file_is_full(job, capsys):
    said = failure(capsys, *job, "--max-steps", 1, "--set", "log_file=/dev/full")
    assert "error: disk: No space left on device\n  hint: make room there" in said


def test_tensorboard_files_contain_loss_and_learning_rate(job, tmp_path):
    run(*job, "--max-steps", 2, "--set", "report_to=[tensorboard]", "--output", tmp_path / "out")
    files = list((tmp_path / "out-logs").rglob("*tfevents*"))
    data = b"".join(file.read_bytes() for file in files)
    assert all(name in data for name in (b"loss", b"lr", b"tokens_per_s"))


@pytest.mark.parametrize(
    ("name", "said"),
    [("tensorbord", "report_to: tensorbord is not supported"), ("wandb", "requires wandb")],
)
def test_report_to_a_tracker_whose_package_is_missing_is_refused(name, said):
    with pytest.raises(ConfigError, match=said):
        records.check_trackers(TrainOptions("m", report_to=(name,)))


def test_model_flops_utilization_equals_flops_over_peak_flops(monkeypatch):
    from transformers import GPT2Config

    from slapo_zoo import AutoScheduledModel

    config = GPT2Config(n_embd=32, n_head=4, n_layer=2, n_positions=64, vocab_size=99)
    model = AutoScheduledModel.from_config(config)
    meter = step_meter.StepMeter(model)
    assert meter.peak == 0.0
    assert meter.parameters == model.num_parameters()
    meter.peak, meter.begin = 1e12, 0.0
    monkeypatch.setattr(step_meter.time, "perf_counter", lambda: 2.0)
    found = meter.measured({"input_ids": torch.zeros(4, 16)})
    assert found["tokens_per_s"] == 32
    assert found["mfu"] == pytest.approx(6 * meter.parameters * 32 / 1e12)


def test_logging_steps_option_writes_a_log_line_every_nth_step(job, capfd):
    run(*job, "--max-steps", 6, "--set", "logging_steps=2")
    found = [line for line in capfd.readouterr().out.splitlines() if line.startswith("training:")]
    assert [line.split()[2] for line in found] == ["2/6", "4/6", "6/6"]


def test_training_log_with_two_stages_and_one_micro_batch_has_a_bubble_of_at_least_half(
    job, tmp_path
):
    """With one micro-batch the two stages never compute at the same time, so the bubble is at least one half."""
    path = tmp_path / "run.jsonl"
    run(*job, "--max-steps", 2, "--pp", 2, "--set", "micro_batches=1", "--set", f"log_file={path}")
    assert all(0.5 <= line["bubble"] < 1 for line in lines(path))


def test_pipeline_bubble_in_the_training_log_is_the_mean_over_ranks(ranks):
    """The ranks wait 0.2 s of 1 s and 0.4 s of 0.9 s; the bubble is the mean over both."""
    for found in ranks.run(_waited, 2):
        assert found == [pytest.approx(0.7), None]


def _waited():
    busy, group = Busy(torch.device("cpu")), torch.distributed.group.WORLD
    rank = torch.distributed.get_rank()
    busy._actions, busy._steps = [(0.0, (0.2, 0.4)[rank])], [(0.0, (1.0, 0.9)[rank])]
    return [busy.bubble(group), busy.bubble(group)]


def test_training_progress_without_a_terminal_prints_a_line_at_intervals(monkeypatch, capsys):
    """Without a terminal a line is printed at least every PAUSE_S seconds."""
    clock = iter(range(0, 10_000, 20))
    monkeypatch.setattr("slapo_zoo.cli.training.records.time.monotonic", lambda: next(clock))
    with records.progress(1000) as on_step:
        for step in range(6):
            on_step(step, {"loss": 1.0, "grad_norm": 1.0})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines] == ["2/1000", "4/1000", "6/1000"]
