"""Verification of a card by its author, and before a replay."""

import dataclasses
import json

import pytest
import transformers

from slapo_zoo import AutoScheduledModel, Mesh
from slapo_zoo.cli.main import main
from slapo_zoo.errors import CardError
from slapo_zoo.zoo.cards.card import read_card
from slapo_zoo.zoo.cards.make import zoo_card

CONFIG = transformers.GPT2Config(
    n_embd=32, n_head=4, n_layer=2, vocab_size=65, n_positions=32, bos_token_id=0, eos_token_id=0,
    architectures=["GPT2LMHeadModel"],
)  # fmt: skip


def run(*arguments):
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    return stop.value.code


def broken(card):
    """Return a card without the feed-forward's all-reduce in the backward, with a matching hash and README."""
    steps = tuple(
        s
        for s in card.program.steps
        if not (s[0].endswith(".mlp") and s[2].get("mode") == "bwd_post")
    )
    assert len(steps) == len(card.program.steps) - 1
    return dataclasses.replace(card, program=dataclasses.replace(card.program, steps=steps))


def load(card, **options):
    try:
        model = AutoScheduledModel.from_config(CONFIG, tp=2, schedule=card, **options)
    except CardError as error:
        return str(error)
    return str(len(model.schedule.history))


def test_schedule_card_with_a_wrong_schedule_fails_verification_at_load_on_every_rank(
    tmp_path, threads
):
    broken(zoo_card(CONFIG, None, Mesh(2), "gpt2")).write(tmp_path / "card")
    for said in threads.run(load, 2, str(tmp_path / "card")):
        assert "the schedule of this card is wrong" in said
        assert "transformer.h.1.ln_2" in said
    assert all(said.isdigit() for said in threads.run(load_unverified, 2, str(tmp_path / "card")))


def load_unverified(card):
    return load(card, verify="off")


@pytest.mark.slow
def test_correct_schedule_card_loaded_with_verification_builds_the_model(tmp_path, ranks):
    zoo_card(CONFIG, None, Mesh(2), "gpt2").write(tmp_path / "card")
    assert all(said.isdigit() for said in ranks.run(load, 2, str(tmp_path / "card")))


def test_unknown_verification_level_is_refused(tmp_path):
    zoo_card(CONFIG, None, Mesh(1), "gpt2").write(tmp_path / "card")
    with pytest.raises(CardError, match="verify='fast'"):
        AutoScheduledModel.from_config(CONFIG, schedule=str(tmp_path / "card"), verify="fast")


def test_card_verify_command_writes_the_verdict_into_the_schedule_card(
    tmp_path, capsys, verify_here
):
    folder = tmp_path / "card"
    CONFIG.save_pretrained(tmp_path / "model")
    zoo_card(CONFIG, None, Mesh(2), "gpt2").write(folder)
    assert read_card(folder).verify == {"verdict": "unmeasured"}
    assert run("card", "verify", folder, "--model", tmp_path / "model") == 0
    card = read_card(folder)
    assert card.verify["verdict"] == "verified"
    assert card.verify["program"] == card.program.hash
    assert "verified: verified" in (folder / "README.md").read_text()
    assert "every gradient" in capsys.readouterr().out


@pytest.mark.slow
def test_verify_command_with_json_option_prints_model_and_verdict(capsys, verify_here):
    assert run("verify", "bert", "--tp", "2", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == "BertForPreTraining"
    assert found["verdict"] == "verified"
