"""`slapo-zoo tune`: a real model in worker processes, and the files written."""

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import GPT2Config

from slapo_zoo import AutoScheduledModel
from slapo_zoo.cli.main import main
from slapo_zoo.tune.database import Scope
from slapo_zoo.tune.outcome import OK, WRONG, Outcome
from slapo_zoo.tune.trial import Job, differs
from slapo_zoo.tune.tuning_job import points_for
from slapo_zoo.tune.tuning_report import record
from slapo_zoo.zoo import tuned


def cli(*words):
    with pytest.raises(SystemExit) as caught:
        main(list(map(str, words)))
    return caught.value.code or 0


def test_tuned_configuration_whose_loss_differs_from_the_plain_schedule_is_reported():
    job = Job("gpt2", {}, probe=2.0)
    assert differs(2.0001, job) == ""
    assert "the plain schedule's 2" in differs(2.1, job)
    assert "nan" in differs(float("nan"), Job("gpt2", {}))
    assert differs(2.05, Job("gpt2", {}, probe=2.0, dtype="bfloat16")) == ""


def test_fastest_tuned_configuration_of_each_device_is_written_to_tuning_json(tmp_path):
    card = tmp_path / "gpt2"
    shutil.copytree(Path(__file__).parents[2] / "hub_cards" / "gpt2", card)
    scope = Scope("a cpu x2", "gpt2 1a", versions={"torch": "2"}, setting={"seq_len": 16})
    record(card, scope, {"batch_size": 4}, Outcome(OK, 3.0, 10, 5))
    record(card, Scope("another", "gpt2 1a"), {"batch_size": 8}, Outcome(OK, 4.0, 10, 5))
    found = json.loads((card / "tuning.json").read_text())
    assert found["a cpu x2"]["seq_len=16"]["point"] == {"batch_size": 4}
    assert found["another"]["-"]["rows_per_s"] == 4.0


def test_values_from_tuning_apply_only_to_the_size_dtype_and_device_that_were_tuned(
    tmp_path, monkeypatch
):
    """The tuned attention and kernels apply; another size, dtype or device keeps the defaults."""
    card = tmp_path / "gpt2"
    shutil.copytree(Path(__file__).parents[2] / "hub_cards" / "gpt2", card)
    monkeypatch.setattr(tuned, "CARDS", tmp_path)
    config = GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=96, bos_token_id=1, eos_token_id=2,
                        architectures=["GPT2LMHeadModel"])  # fmt: skip

    def built(config=config, **options):
        model = AutoScheduledModel.from_config(config, seed=0, **options)
        seam = model.transformer.h[0].attn.core_attn
        used = {choice.kernel for choice in model.schedule.kernels if choice.accepted}
        return used, seam.name, [c.reason for c in model.schedule.kernels]

    before = built()
    assert before[1] == "sdpa"
    assert before[0] != {"layer_norm"}
    scope = Scope(
        tuned.cpu_name(), tuned.model_name(config), setting={"dtype": "float32", "seq_len": 8}
    )
    point = {"attention": "eager", "kernels": "layer_norm", "batch_size": 4}
    record(card, scope, point, Outcome(OK, 3.0, 10, 5))
    used, backend, reasons = built()
    assert (used, backend) == ({"layer_norm"}, "eager")
    assert any("'layer_norm' fastest" in reason for reason in reasons)
    assert built(kernels="reference")[:2] == (set(), "sdpa")
    assert built(attention="sdpa")[:2] == ({"layer_norm"}, "sdpa")
    assert built(dtype="bfloat16")[1] == "sdpa"
    other = copy.deepcopy(config)
    other.n_embd = 64
    assert built(other)[1] == "sdpa"
    record(
        card,
        replace(scope, device="another machine"),
        {"attention": "eager"},
        Outcome(OK, 9.0, 1, 5),
    )
    assert built()[0] == {"layer_norm"}


TINY = (
    "n_layer=1",
    "n_embd=32",
    "n_head=2",
    "vocab_size=128",
    "n_positions=32",
    "loss_type=ForCausalLMLoss",
)


@pytest.mark.slow
def test_tune_command_without_symbol_options_searches_the_family_defaults(tmp_path, capsys):
    changes = [word for field in TINY for word in ("--change", field)]
    words = ("tune", "gpt2", *changes, "--seq", 16, "--steps", 1, "--evaluations", 1)
    assert cli(*words, "--db", tmp_path / "db.jsonl") == 0
    assert "ok: 1" in capsys.readouterr().out


@pytest.mark.slow
def test_tune_command_measures_configurations_in_worker_processes(tmp_path, capsys):
    changes = [word for field in TINY for word in ("--change", field)]
    words = ("tune", "gpt2", *changes, "--seq", 16, "--symbol", "batch_size=2,4", "--symbol",
             "kernels=,layer_norm", "--steps", 1, "--search", "exhaustive")  # fmt: skip
    assert cli(*words, "--db", tmp_path / "db.jsonl") == 0
    out = capsys.readouterr().out
    assert out.count(" ok ") >= 4
    assert cli("tune", "gpt2", *changes, "--symbol", "colour=1") == 2
    assert "no such symbol" in capsys.readouterr().err
    assert WRONG not in out


@pytest.mark.slow
def test_tune_command_measures_configurations_with_cp_on_their_ranks(capsys):
    changes = [word for field in TINY for word in ("--change", field)]
    words = ("tune", "gpt2", *changes, "--seq", 16, "--gpus", 2, "--symbol", "batch_size=2", "--symbol", "cp=2",
             "--symbol", "cp_attention=gather,ring", "--symbol", "dp_shard=1,2", "--dtype", "bf16", "--steps", 1)  # fmt: skip
    assert cli(*words, "--search", "exhaustive") == 0
    assert "4 evaluations" in (out := capsys.readouterr().out)
    assert "ok: 4" in out


def test_given_mesh_sizes_limit_the_tried_layouts_and_their_product_is_the_number_of_ranks():
    found = points_for(4, {"dp": [2, 4], "cp": [1, 2]})
    assert sorted((p["tp"], p["pp"], p["dp"], p["cp"]) for p in found) == [
        (1, 1, 2, 2), (1, 1, 4, 1), (1, 2, 2, 1), (2, 1, 2, 1),
    ]  # fmt: skip
