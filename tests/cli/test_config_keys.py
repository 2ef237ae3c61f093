"""Keys of a configuration that no other test runs: each has the effect that docs/training.md says."""

import json

import datasets
import pytest
import torch
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM, get_scheduler

from cli_runs import run, sentences, write_gpt2, write_t5
from slapo_zoo.cli.training.inputs import read_inputs
from slapo_zoo.cli.training.options import make_options, read_config, read_sets
from slapo_zoo.cli.training.trainer_arguments import parameter_groups

CONFIGS = """---
configs:
- config_name: one
  data_files: [{split: train, path: one.jsonl}]
- config_name: two
  data_files: [{split: train, path: two.jsonl}, {split: held, path: held.jsonl}]
---
"""
SIZE = ("batch_size=4", "device=cpu", "max_steps=3", "seq_len=32")


def trained(folder, *sets):
    """The log of a run, and the words for its keys."""
    words = [word for one in (*SIZE, *sets) for word in ("--set", one)]
    run("train", folder / "model", *words, "--set", f"log_file={folder / 'log.jsonl'}")
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_train_command_with_optimizer_and_lr_options_has_the_losses_of_a_plain_torch_loop(tmp_path):
    """Losses, norms and rates are those of a plain loop with the same AdamW and schedule."""
    write_gpt2(tmp_path / "model")
    (tmp_path / "text.txt").write_text(". ".join(sentences(60)))
    rates = {"adam_beta1": 0.5, "adam_beta2": 0.8, "adam_epsilon": 1e-4, "weight_decay": 0.1}
    sets = [f"{name}={value}" for name, value in rates.items()]
    sets += ["lr_scheduler_type=cosine_with_min_lr", "lr_scheduler_kwargs={min_lr: 0.004}", "warmup_steps=1"]  # fmt: skip
    sets += ["learning_rate=1e-2", "max_grad_norm=0.5", "document_masks=false", "seed=5"]
    sets += [f"data={tmp_path / 'text.txt'}", f"logging_dir={tmp_path / 'board'}"]
    found = trained(tmp_path, *sets, "report_to=tensorboard", "load.resid_pdrop=0", "load.embd_pdrop=0", "load.attn_pdrop=0")  # fmt: skip
    assert list((tmp_path / "board").rglob("*tfevents*"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    options = make_options({"model": str(tmp_path / "model")}, read_sets([*SIZE, *sets]))
    batches = read_inputs(options, model.config).batches
    optimizer = torch.optim.AdamW(parameter_groups(model.parameters(), 0.1), lr=1e-2, betas=(0.5, 0.8), eps=1e-4)  # fmt: skip
    schedule = get_scheduler(
        "cosine_with_min_lr", optimizer, 1, 3, scheduler_specific_kwargs={"min_lr": 4e-3}
    )
    for step, line in enumerate(found):
        batch = batches.part(step)
        assert batch.keys() == {"input_ids", "labels"}  # without masks between documents
        loss = model(**batch).loss
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 0.5)
        want = {"loss": loss.detach(), "grad_norm": norm, "lr": schedule.get_last_lr()[0]}
        assert {name: line[name] for name in want} == pytest.approx(
            {name: float(value) for name, value in want.items()}, rel=1e-5
        )
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def test_train_command_obeys_options_for_data_config_split_and_target_length(
    tmp_path, capfd, monkeypatch
):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write_t5(tmp_path / "model")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "README.md").write_text(CONFIGS)
    for name, count in {"one": 8, "two": 12, "held": 10}.items():
        rows = [{"source": one, "target": one.title()} for one in sentences(count)]
        datasets.Dataset.from_list(rows).to_json(tmp_path / "data" / f"{name}.jsonl")
    sets = [f"data={tmp_path / 'data'}", "data_config=two", "eval_split=held", "task=seq2seq", "eval_steps=3"]  # fmt: skip
    whole = trained(tmp_path, *sets, "target_len=16")
    assert "12 rows of up to 32 tokens, 10 to evaluate on" in capfd.readouterr().out
    short = trained(tmp_path, *sets, "target_len=8", "eval_batches=1")
    assert [one["tokens"] - two["tokens"] for one, two in zip(whole, short, strict=True)] == [32] * 3  # fmt: skip
    few = trained(tmp_path, *sets, "target_len=16", "eval_batches=1")
    assert [line["loss"] for line in few] == [line["loss"] for line in whole]
    assert few[-1]["eval_loss"] != whole[-1]["eval_loss"]


def test_numbers_with_an_exponent_are_read_as_numbers_in_every_config_key(tmp_path):
    """YAML 1.1 reads 4e-3, without a point, as text."""
    text = "lr_scheduler_kwargs: {min_lr: 4e-3, power: -1E2}\ncolumns: {text: 1e3x}\nlearning_rate: 1e-4"
    (tmp_path / "run.yaml").write_text(text)
    assert read_config(tmp_path / "run.yaml") == {
        "lr_scheduler_kwargs": {"min_lr": 0.004, "power": -100.0},
        "columns": {"text": "1e3x"}, "learning_rate": 1e-4,
    }  # fmt: skip
    assert read_sets(["lr_scheduler_kwargs.min_lr=4e-3"]) == {
        "lr_scheduler_kwargs": {"min_lr": 0.004}
    }


def test_tilde_in_paths_of_a_train_config_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert read_sets(["output=~/run", "task=null"]) == {"output": "/home/me/run", "task": None}
