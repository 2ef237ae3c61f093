"""Learning rates, parameter groups, evaluation, best checkpoint and early stop, on every layout and after a resume."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from cli_runs import run, write_gpt2
from slapo_zoo.cli.training.options import ConfigError, TrainOptions
from slapo_zoo.cli.training.records import Best
from slapo_zoo.cli.training.trainer_arguments import make_schedule, optimizer_of, parameter_groups

SCHEDULES = {"linear": {}, "cosine": {"num_cycles": 1.5}, "constant": {}, "polynomial": {"power": 2.0},
             "cosine_with_min_lr": {"min_lr_rate": 0.1}, "inverse_sqrt": {}}  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
def test_learning_rates_of_six_lr_scheduler_types_equal_those_of_transformers(name):
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    real = "constant_with_warmup" if name == "constant" else name
    scheduler = get_scheduler(real, optimizer, 2, 9, scheduler_specific_kwargs=SCHEDULES[name])
    options = TrainOptions(
        "m",
        learning_rate=0.3,
        lr_scheduler_type=name,
        lr_scheduler_kwargs=SCHEDULES[name],
        warmup_steps=2,
        max_steps=9,
    )
    for step in range(9):
        resumed = make_schedule(options, done=step)
        assert resumed.get_last_lr() == pytest.approx([optimizer.param_groups[0]["lr"]])
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("name", ["linaer", "reduce_lr_on_plateau"])
def test_unknown_lr_scheduler_type_raises(name):
    with pytest.raises(ConfigError, match=f"lr_scheduler_type={name}"):
        make_schedule(TrainOptions("m", lr_scheduler_type=name))


@pytest.mark.parametrize("words", ["momentum=x", "nesterov=true"])
def test_optimizer_arguments_that_sgd_refuses_raise_a_config_error(words):
    options = TrainOptions("m", optim="sgd", trainer={"optim_args": words})
    with pytest.raises(ConfigError, match=r"optim_args: .*\n  hint: write e\.g\. momentum"):
        optimizer_of(options, "cpu")


def test_weight_decay_applies_to_matrices_and_not_to_biases_and_norms():
    model = torch.nn.Sequential(torch.nn.Embedding(3, 4), torch.nn.Linear(4, 2), torch.nn.LayerNorm(2))  # fmt: skip
    decays, others = parameter_groups(model.parameters(), 0.1)
    assert decays["weight_decay"] == 0.1
    assert others["weight_decay"] == 0.0
    assert [p.ndim for p in decays["params"]] == [2, 2]
    assert [p.ndim for p in others["params"]] == [1, 1, 1]


def test_best_checkpoint_is_chosen_by_metric_and_ties_are_broken_by_loss():
    best = Best("loss")
    found = [best.judge(step, {"loss": loss}) for step, loss in enumerate([3.0, 2.0, 2.0, 2.5])]
    assert found == [True, True, False, False]
    assert not Best("loss").judge(1, {"loss": float("nan")})
    again = Best("loss")
    again.restore(best.state())
    assert (again.value, again.step, again.since) == (2.0, 1, 2)
    other = Best("accuracy")
    other.restore(best.state())
    assert (other.value, other.since) == (None, 0)
    tied = Best("accuracy")
    marks = [(0.5, 0.9), (1.0, 0.7), (1.0, 0.1), (1.0, 0.2)]
    found = [tied.judge(i, {"accuracy": a, "loss": b}) for i, (a, b) in enumerate(marks)]
    assert found == [True, True, True, False]
    assert str(tied) == "step 2, accuracy 1, loss 0.1"
    resumed = Best("accuracy")
    resumed.restore(tied.state())
    assert not resumed.judge(4, {"accuracy": 1.0, "loss": 0.1})
    most = Best("accuracy")
    assert [most.judge(0, {"accuracy": x}) for x in (0.5, 0.4, 0.6)] == [True, False, True]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    write_gpt2(folder / "model")
    (folder / "text.txt").write_text("the cat sat on the mat and the dog ran away. " * 30)
    (folder / "held.txt").write_text("the dog sat on the cat and ran. " * 5)
    keys = {
        "model": str(folder / "model"), "data": str(folder / "text.txt"), "seq_len": 16,
        "eval_data": str(folder / "held.txt"), "eval_steps": 1, "learning_rate": 3e-2, "batch_size": 4,
        "lr_scheduler_type": "cosine", "warmup_steps": 2, "weight_decay": 0.1, "device": "cpu",
        "max_steps": 6, "save_steps": 3,
    }  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(keys))
    return folder


def evaluations(text):
    return [line for line in text.splitlines() if line.startswith("evaluation:")]


def state_of(folder):
    return json.loads((folder / "training_state.json").read_text())


def test_training_with_evaluation_resumed_on_another_layout_equals_an_uninterrupted_run(
    job, tmp_path, capfd
):
    """The resumed run has the losses, evaluations, best checkpoint and final weights of an uninterrupted one."""
    run("train", "--config", job / "run.yaml", "--save-total-limit", 9, "--checkpoint", tmp_path / "one", "--dp", 2,
        "--set", f"best={tmp_path / 'best'}")  # fmt: skip
    whole = capfd.readouterr().out
    kept = tmp_path / "one" / "step-00000003"
    assert yaml.safe_load((kept / "run.yaml").read_text())["lr_scheduler_type"] == "cosine"
    shutil.copytree(kept, tmp_path / "two")
    run("train", "--config", kept / "run.yaml", "--checkpoint", tmp_path / "two", "--tp", 2, "--dp", 1,
        "--set", f"best={tmp_path / 'best2'}", "--set", "save_total_limit=null")  # fmt: skip
    rest = capfd.readouterr().out
    assert len(evaluations(whole)) == 6
    assert evaluations(rest) == evaluations(whole)[3:]
    ends = [state_of(tmp_path / "one" / "last"), state_of(tmp_path / "two")]
    (first, second) = (end["extra"]["best"] for end in ends)
    assert first == pytest.approx(second)
    assert first["value"] is not None
    one, two = (
        load_file(f / "model.safetensors") for f in (tmp_path / "one/last", tmp_path / "two")
    )
    # the gradient of a key's bias is 0, and Adam makes steps of its rounding
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-4, atol=1e-4)


def test_evaluation_loss_of_the_train_command_equals_that_of_transformers(job, tmp_path, capfd):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    best = tmp_path / "best"
    run("train", "--config", job / "run.yaml", "--dp", 2, "--max-steps", 2, "--set", "lr_scheduler_type=linear",
        "--set", f"best={best}", "--set", "eval_steps=2")  # fmt: skip
    (line,) = evaluations(capfd.readouterr().out)
    model, words = AutoModelForCausalLM.from_pretrained(best), AutoTokenizer.from_pretrained(best)
    ids = [*words((job / "held.txt").read_text())["input_ids"], words.eos_token_id]
    rows = torch.tensor(ids[: len(ids) // 16 * 16]).view(-1, 16)
    assert len(rows) % 4, "the last batch is a short one"
    with torch.no_grad():
        loss = float(model.eval()(input_ids=rows, labels=rows).loss)
    assert f"loss {loss:.4f}" in line


def test_early_stopping_ends_training_when_loss_stops_improving(job, tmp_path, capfd):
    run("train", "--config", job / "run.yaml", "--learning-rate", 10, "--max-steps", 50, "--checkpoint", tmp_path / "c",
        "--set", "warmup_steps=0", "--set", "patience=2")  # fmt: skip
    found = evaluations(capfd.readouterr().out)
    state = state_of(tmp_path / "c")
    assert len(found) == state["step"] < 50
    assert state["extra"]["best"]["since"] == 2
    run("train", "--config", job / "run.yaml", "--learning-rate", 10, "--max-steps", 50, "--checkpoint", tmp_path / "c",
        "--set", "patience=2")  # fmt: skip
    assert not evaluations(capfd.readouterr().out), "it stays ended"


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(
            ("--optim", "sgd"), marks=pytest.mark.slow
        ),  # the test above resumes AdamW, the one below trains SGD
        pytest.param(("--optim", "adamw_torch", "--adam-beta2", 0.9), marks=pytest.mark.slow),
    ],
)
def test_training_with_sgd_or_adamw_resumed_on_another_layout_equals_an_uninterrupted_run(
    more, job, tmp_path
):
    def losses(steps, name, *layout):
        log = ("--log-file", f"{tmp_path / name}.jsonl", "--checkpoint", tmp_path / name)
        run("train", "--config", job / "run.yaml", "--max-steps", steps, "--set", "eval_data=null", *COMMON, *log, *more, *layout)  # fmt: skip
        lines = (tmp_path / f"{name}.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

    whole = losses(4, "whole")
    losses(2, "parts", "--tp", 2)
    assert losses(4, "parts", "--dp", 2) == pytest.approx(whole, rel=1e-5)
    assert len(set(whole)) == 4


def test_sgd_momentum_and_eval_delay_options_take_effect_equally_on_every_layout(job, tmp_path):
    """Momentum changes the third loss; the first evaluation comes after `eval_delay` steps."""

    def log(name, *more):
        place = f"{tmp_path / name}.jsonl"
        sets = ("--optim", "sgd", "--max-steps", 3, "--log-file", place, "--set", "eval_delay=2")
        run("train", "--config", job / "run.yaml", *COMMON, *sets, *more)
        return [json.loads(line) for line in Path(place).read_text().splitlines()]

    plain = log("plain")
    momentum = ("--set", "optim_args=momentum=0.9,nesterov=true")
    one, two = log("one", *momentum), log("two", *momentum, "--tp", 2)
    assert ["eval_loss" in line for line in one] == [False, True, True]
    assert [line["loss"] for line in two] == pytest.approx([x["loss"] for x in one], rel=1e-5)
    assert one[0]["loss"] == plain[0]["loss"]
    assert abs(one[2]["loss"] - plain[2]["loss"]) > 1e-4


COMMON = ("--lr-scheduler-type", "constant", "--warmup-steps", 0, "--learning-rate", 1e-2)
