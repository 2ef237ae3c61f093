"""Plans of a card, simulated by the planner: defaults of the call where they fit, ignored with a message elsewhere."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import card_collection
import pytest
import transformers
from card_plan import with_plans

from slapo_zoo import AutoScheduledModel, Mesh, emulate, get_logger
from slapo_zoo.errors import CardError
from slapo_zoo.zoo.cards.card import read_card
from slapo_zoo.zoo.cards.make import zoo_card
from slapo_zoo.zoo.cards.plans import Plan, measured_knobs, plans_of
from slapo_zoo.zoo.tuned import machine_name, model_name, shape_name

CARDS = Path(__file__).parents[2] / "hub_cards"
TINY = {"n_embd": 32, "n_head": 4, "n_layer": 3, "vocab_size": 65, "n_positions": 32}


def tiny():
    return transformers.GPT2Config(**TINY, architectures=["GPT2LMHeadModel"])


def plan_of(**changes):
    values = {
        "size": "tiny", "model": shape_name(tiny()), "model_class": "GPT2LMHeadModel", "parameters": 40000, "device": "cpu",
        "gpus": 1, "rows": 8, "seq_len": 16, "knobs": {"tp": 1, "pp": 1, "dp": 1, "micro_batches": 4, "checkpoint_ratio": 1.0},
        "micro_batch_rows": 2, "step_s": 0.5, "tokens_per_s": 256.0, "memory_gib": 0.1, "mean_error": None,
    }  # fmt: skip
    return Plan(**values | changes)


def card_with(folder, *plans, **tuning):
    """Write the published card of GPT-2 with plans for a tiny model."""
    shutil.copytree(CARDS / "gpt2", folder)
    card = read_card(folder)
    replace(card, tuning=with_plans(tuning, list(plans))).write(folder)
    return str(folder)


@pytest.fixture
def said(caplog):
    logger = get_logger("slapo_zoo")
    logger.addHandler(caplog.handler)  # it does not propagate
    yield caplog
    logger.removeHandler(caplog.handler)


def built(card, **given):
    """Load a model with the card, without the verification that starts a process; return (micro-batches, recomputed blocks, layout)."""
    model = AutoScheduledModel.from_config(tiny(), schedule=card, verify="off", **given)
    again = sum(directive.name == "checkpoint" for _, directive in model.schedule.history)
    mesh = model.mesh
    return model._slapo.micro_batches, again, (mesh.tp, mesh.pp, mesh.dp)


def test_layout_plan_in_a_schedule_card_sets_only_arguments_that_the_user_left_out(tmp_path, said):
    card = card_with(tmp_path / "card", plan_of())
    assert built(card) == (4, 3, (1, 1, 1))
    assert "the card's plan (simulated for 1 x cpu, 8 rows a step) is taken" in said.text
    assert built(card, micro_batches=2, checkpoint_ratio=0.0) == (2, 0, (1, 1, 1))


def test_measured_plan_in_a_schedule_card_takes_precedence_over_a_simulated_plan(tmp_path, said):
    entry = {"point": {"micro_batches": 8, "batch_size": 16}, "rows_per_s": 3.0, "model": model_name(tiny()), "setting": {}}  # fmt: skip
    card = card_with(tmp_path / "card", plan_of(), **{machine_name("cpu"): {"-": entry}})
    assert built(card) == (8, 0, (1, 1, 1))
    assert "(measured)" in said.text


def test_plan_that_was_measured_with_cp_is_not_taken_for_a_mesh_without_it():
    """No plan names cp, so a load by such a plan would have another number of ranks."""
    measured = {"a": {"point": {"dp": 2, "cp": 2}, "rows_per_s": 9.0, "model": "gpt2 1a"},
                "b": {"point": {"dp": 2, "cp": 1}, "rows_per_s": 3.0, "model": "gpt2 1a"}}  # fmt: skip
    assert measured_knobs(measured, "gpt2 1a", 2) == {"tp": 1, "pp": 1, "dp": 2}
    del measured["b"]
    assert measured_knobs(measured, "gpt2 1a", 2) is None
    assert measured_knobs(measured, "gpt2 1a", 4) is None


def test_layout_plan_in_a_schedule_card_sets_the_same_mesh_on_all_ranks(tmp_path, ranks):
    plan = plan_of(
        gpus=2, knobs={"tp": 1, "pp": 2, "dp": 1, "micro_batches": 4, "pipeline_order": "gpipe"}
    )
    card = card_with(tmp_path / "card", plan)
    assert ranks.run(built, 2, card) == [(4, 0, (1, 2, 1))] * 2


OTHER = {
    "devices": ({"device": "a100"}, {}, "here are 1 ranks on"),
    "ranks": ({"gpus": 8}, {}, "here are 1 ranks on"),
    "model": ({"model": "gpt2 hidden_size=64"}, {}, "the model is gpt2 hidden_size=32"),
    "a layout of one's own": ({"knobs": {"tp": 1, "pp": 1, "dp": 2}}, {"dp": 1}, "dp=1 was asked for"),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHER)
def test_plan_in_a_schedule_card_for_another_model_or_device_is_ignored_with_a_message(
    case, tmp_path, said
):
    changes, given, words = OTHER[case]
    folder = tmp_path / "card"
    zoo_card(tiny(), None, Mesh(), "tiny").write(folder)
    card = read_card(folder)
    replace(card, tuning=with_plans({}, [plan_of(**changes)])).write(folder)
    assert built(str(folder), **given) == (None, 0, (1, 1, 1))
    assert "none of the card's plans is taken (tiny on " in said.text
    assert words in said.text


def test_plan_in_a_schedule_card_is_ignored_if_the_user_passes_cp(tmp_path, said):
    folder, plan = tmp_path / "card", plan_of(gpus=2, knobs={"tp": 1, "pp": 1, "dp": 2})
    zoo_card(tiny(), None, Mesh(), "tiny").write(folder)
    replace(read_card(folder), tuning=with_plans({}, [plan])).write(folder)
    assert emulate(built, str(folder), cp=2, mesh=(1, 1, 2)) == [(None, 0, (1, 1, 1))] * 2
    assert "cp=2 was asked for" in said.text


def test_plan_in_a_schedule_card_keeps_the_recomputation_of_its_schedule(tmp_path, said):
    """The plan sets layout and micro-batches; the program's own recomputation stays."""
    folder = tmp_path / "card"
    zoo_card(tiny(), None, Mesh(), "tiny", checkpoint_ratio=0.34).write(folder)
    replace(read_card(folder), tuning=with_plans({}, [plan_of()])).write(folder)
    assert built(str(folder)) == (4, 1, (1, 1, 1))


@pytest.mark.parametrize(
    "knobs",
    [{"trust_remote_code": True}, {"pipeline_order": "mine.csv"}, {"tp": 0}, {"kernels": "own"}, {"tp": True}],
    ids=str,
)  # fmt: skip
def test_plan_in_a_schedule_card_with_an_invalid_loader_option_is_refused(knobs, tmp_path):
    with pytest.raises(CardError, match="simulated"):
        card_with(tmp_path / "card", plan_of(knobs={"tp": 1, "pp": 1, "dp": 1} | knobs))


def test_repeated_plan_search_for_a_schedule_card_writes_identical_files(tmp_path, monkeypatch):
    monkeypatch.setattr(card_collection, "SIZES", {"gpt2": ("tiny", TINY)})
    monkeypatch.setattr(card_collection, "CLUSTERS", [("a100", 2, "bf16"), ("v100", 2, "fp16")])
    shutil.copytree(CARDS / "gpt2", tmp_path / "gpt2")
    program = (tmp_path / "gpt2" / "schedule.json").read_bytes()
    seen = []
    for _ in range(2):
        card_collection.tune("gpt2", tmp_path)
        seen.append([(tmp_path / "gpt2" / name).read_bytes() for name in ("tuning.json", "README.md")])  # fmt: skip
    assert seen[0] == seen[1]
    assert (tmp_path / "gpt2" / "schedule.json").read_bytes() == program
    found = json.loads(seen[0][0])["simulated"]
    assert found.keys() >= {"2 x a100", "2 x v100"}
    assert found["2 x a100"]["mean_error"] == 0.074
    assert found["2 x v100"]["knobs"]["precision"] == "fp16"
    assert b"Plans: simulated, not measured" in seen[0][1]


@pytest.mark.parametrize(
    "family", [f.name for f in sorted(CARDS.iterdir()) if (f / "tuning.json").exists()]
)
def test_mesh_of_a_published_plan_has_its_gpu_count_and_divides_its_batch(family):
    for plan in plans_of(read_card(CARDS / family).tuning):
        knobs = plan.knobs
        assert knobs["tp"] * knobs["pp"] * knobs["dp"] == plan.gpus
        assert plan.rows == knobs["dp"] * knobs["micro_batches"] * plan.micro_batch_rows
