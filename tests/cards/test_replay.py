"""Replay of a card: equal results on meshes that its constraints allow, an error with the reason elsewhere."""

import json
from dataclasses import replace
from pathlib import Path

import card_collection
import pytest
import torch
import transformers
from card_schema import build_schema
from jsonschema import Draft202012Validator
from jsonschema.validators import extend

from parity import Case, checkpoint, compare, references, scheduled, tiny_config
from releases import OLDER_ROWS, is_older
from slapo_zoo import AutoScheduledModel, Mesh, Schedule
from slapo_zoo.errors import CardError
from slapo_zoo.zoo import apply, cards
from slapo_zoo.zoo.argument_values import config_of
from slapo_zoo.zoo.cards import Program
from slapo_zoo.zoo.cards.card import read_card
from slapo_zoo.zoo.cards.make import make_program, zoo_card
from slapo_zoo.zoo.cards.schema import schema, validator
from slapo_zoo.zoo.outline import Outline
from slapo_zoo.zoo.table import families

CASES = {
    "GPT2LMHeadModel": Case("GPT2LMHeadModel", ("tokens",)),
    "T5ForConditionalGeneration": Case("T5ForConditionalGeneration", ("tokens",)),
}


def card_for(case, root, mesh, folder, **knobs):
    config = transformers.AutoConfig.from_pretrained(checkpoint(case, root))
    zoo_card(config, case.cls, mesh, "tiny", **knobs).write(folder)
    return str(folder)


def with_card(case, folder, layout, card):
    return scheduled(case, folder, layout, schedule=card, verify="off")


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("layout", [(2, 2, 1), (1, 2, 2)])
def test_schedule_card_made_for_tp4_pp2_trains_on_other_meshes_as_plain_transformers(
    name, layout, tmp_path, threads
):
    case = CASES[name]
    card = card_for(case, tmp_path, Mesh(tp=4, pp=2), tmp_path / "card")
    folder = checkpoint(case, tmp_path)
    truth, plains = references(case, folder)
    results = threads.run(with_card, 4, case, folder, layout, card)
    compare(results[0][0], plains, truth)


def refused(config, card, layout):
    tp, pp = layout
    with pytest.raises(CardError) as caught:
        AutoScheduledModel.from_config(config, tp=tp, pp=pp, schedule=card)
    return str(caught.value)


def test_mesh_that_violates_a_constraint_of_a_schedule_card_is_refused_on_every_rank(
    tmp_path, threads
):
    card = card_for(CASES["GPT2LMHeadModel"], tmp_path, Mesh(tp=4, pp=2), tmp_path / "card")
    config = transformers.AutoConfig.from_pretrained(checkpoint(CASES["GPT2LMHeadModel"], tmp_path))
    for said in threads.run(refused, 2, config, card, (2, 1)):
        assert "constraint 'stages == 2': the constraint does not hold: found stages = 1" in said


def test_schedule_card_refuses_another_model_size_or_class_unless_made_for_any_size(tmp_path):
    config = transformers.GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=65, architectures=["GPT2LMHeadModel"])  # fmt: skip
    larger = transformers.GPT2Config(**{**config.to_dict(), "n_embd": 64, "n_head": 8})
    exact, free = (zoo_card(config, None, Mesh(tp=2), "gpt2", any_size=a) for a in (False, True))
    exact.write(tmp_path / "exact")
    free.write(tmp_path / "free")
    with pytest.raises(CardError, match="made for a model with other modules or tensor shapes"):
        AutoScheduledModel.from_config(larger, schedule=str(tmp_path / "exact"))
    with pytest.raises(CardError, match="made for GPT2LMHeadModel"):
        AutoScheduledModel.from_config(config, auto_class="GPT2Model", schedule=tmp_path / "exact")
    steps = free.program.resolve(larger, {"tp": 2, "pp": 1, "dp": 1, "stages": 1})
    wanted = Outline(larger, None, Mesh(tp=2), torch.float32)
    assert str(Outline(larger, None, Mesh(tp=2), torch.float32, schedule=steps).schedule) == str(
        wanted.schedule
    )


@pytest.mark.one_in(3, 6)  # the test of committed cards makes and reads those of all families
@pytest.mark.parametrize("family", families())
def test_schedule_card_written_and_read_back_has_the_schedule_of_the_model_family(family, tmp_path):
    """The card of every family is written, read, resolved and replayed: the program stays the same."""
    config, head = config_of(family)
    mesh = Mesh(tp=2, pp=2)
    card = zoo_card(config, head, mesh, family)
    card.write(tmp_path)
    again = read_card(tmp_path)
    assert again == card
    assert again.program.hash == Program.parse(card.program.to_bytes()).hash
    sizes = {"tp": 2, "pp": 2, "dp": 1, "stages": 2}
    steps = again.program.resolve(config, sizes)
    outline = Outline(config, head, mesh, torch.float32)
    assert [(p, str(d)) for p, d in steps] == [(p, str(d)) for p, d in outline.schedule.history]


def test_schedule_card_that_names_a_kernel_installs_the_kernel_at_load(tmp_path):
    config, named = tiny_config(CASES["GPT2LMHeadModel"])[0], {"kernels": ["bias_gelu"]}
    zoo_card(config, "GPT2LMHeadModel", Mesh(), "tiny", **named).write(tmp_path)
    given = {"auto_class": "GPT2LMHeadModel", "verify": "off"}
    model = AutoScheduledModel.from_config(config, schedule=str(tmp_path), **given)
    assert ("**:NewGELUActivation", "replace(new='bias_gelu')") in [
        (p, str(d)) for p, d in model.schedule.history
    ]


def test_publishing_a_schedule_that_holds_a_python_function_is_refused():
    config = transformers.GPT2Config(n_layer=2, architectures=["GPT2LMHeadModel"])
    model = transformers.GPT2LMHeadModel(config)
    sch = Schedule(model, Mesh())
    sch["transformer"].hook("fwd_pre", print)
    with pytest.raises(CardError, match="a Python object, which JSON"):
        make_program(sch, config, type(model))


def test_committed_json_schema_of_schedule_files_equals_the_one_built_from_the_primitives(request):
    if request.config.getoption("update_golden"):
        file = Path(cards.__file__).with_name("schedule.schema.json")
        file.write_text(json.dumps(build_schema(), indent=1) + "\n", encoding="utf-8")
        schema.cache_clear()
    assert schema() == build_schema(), "on purpose? then run with --update-golden"


def test_schedule_card_hash_ignores_whitespace_and_key_order_of_the_json():
    config = transformers.GPT2Config(n_layer=2, architectures=["GPT2LMHeadModel"])
    program = zoo_card(config, None, Mesh(), "gpt2").program
    text = program.to_bytes()
    assert Program.parse(text.replace(b" ", b"\n ", 3)).hash == program.hash
    changed = text.replace(b'"axis": 0', b'"axis": 1', 1)
    assert changed != text
    assert Program.parse(changed).hash != program.hash


CARDS = Path(__file__).parents[2] / "hub_cards"


def without_cuts(program):
    """Return a program without the ends of its pipeline stages."""
    steps = tuple(step for step in program.steps if step[1] != "cut_pipeline_stage")
    assert len(steps) == len(program.steps) - 1
    return replace(program, steps=steps)


def test_schedule_cards_in_hub_cards_equal_those_generated_from_the_code(monkeypatch):
    """hub_cards/<family>: `python3 ci/run.py cards --verify` writes them, and runs what is new.

    Stages end by numbers of weights here, which takes no dry run; the test below compares where they end.
    """
    monkeypatch.setattr(apply, "unit_costs", lambda *_: [])
    wanted = dict(card_collection.cards())
    assert {path.name for path in CARDS.iterdir() if path.is_dir()} >= set(wanted)
    for family, card in wanted.items():
        if family in OLDER_ROWS and not is_older(family):
            continue  # its card is for the release in ci/constraints.txt
        found, told = read_card(CARDS / family), f"{family}: run `python3 ci/run.py cards`"
        assert without_cuts(found.program) == without_cuts(card.program), told
        assert found.mesh == card.mesh
        verdict = found.verify["verdict"]  # no card is published that was found wrong
        assert verdict == "unmeasured" or card_collection.is_verified(CARDS / family), family


@pytest.mark.one_in(4, 2)  # tests/zoo/test_golden.py has the cuts of all families
@pytest.mark.parametrize("family", families())
def test_pipeline_cuts_in_committed_schedule_cards_equal_those_of_the_code(family):
    if family in OLDER_ROWS and not is_older(family):
        pytest.skip("its card is for older releases of transformers")
    assert read_card(CARDS / family).program == card_collection.card_of(family).program


@pytest.mark.parametrize(
    "step",
    [
        ["a", "fork_rng", {}], ["a", "fork_rng", {"p": 1}], ["a", "shard", {}], ["a", "shard", {"param_name": 1}],
        ["a", "sync", {"mode": "fwd_post"}], ["a", "nobody", {}], ["a"], ["a", ["shard"], {}], {}, "a", None,
        ["a", "checkpoint", {"policy": 1.0}], ["a", "replace", {}],
    ],
    ids=str,
)  # fmt: skip
def test_fast_json_schema_check_accepts_the_same_documents_as_jsonschema(step):
    document = json.loads(
        Path(__file__).parents[2].joinpath("hub_cards/gpt2/schedule.json").read_text()
    )
    document["steps"].append(step)
    known = extend(Draft202012Validator, type_checker=validator().TYPE_CHECKER)(schema())
    assert validator().is_valid(document) == known.is_valid(document)
