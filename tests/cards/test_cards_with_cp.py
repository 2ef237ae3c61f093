"""Cards and context parallelism: a card's directives are the same for every cp, which is chosen at the load."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from cut_rows import case_of, require_equal, rows_of, trained
from parity import Case, checkpoint, saved_names, tiny_config
from slapo_zoo import AutoScheduledModel, Mesh, SlapoError, emulate
from slapo_zoo.cli.main import main
from slapo_zoo.errors import CardError
from slapo_zoo.zoo.cards.card import read_card
from slapo_zoo.zoo.cards.make import zoo_card


def published(case, place, **layout):
    """Publish the schedule of a live model into a folder, and return the folder."""
    config = tiny_config(case)[0]
    model = AutoScheduledModel.from_config(
        config, auto_class=case.cls, kernels="reference", **layout
    )
    return model.push_schedule_to_hub(place)


def made(case, folder, mesh, **knobs):
    """Write the zoo's card for a case's tiny model, and return its folder."""
    zoo_card(tiny_config(case)[0], case.cls, mesh, "tiny", **knobs).write(folder)
    return str(folder)


def of_plain(case, mask, folder):
    """Losses, first gradients, last norm and weights of plain transformers, as `trained` returns them."""
    model = getattr(transformers, case.cls).from_pretrained(folder, dtype=torch.float64).train()
    cached = {"use_cache": False} if case.cls.endswith(("ForCausalLM", "LMHeadModel")) else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    losses, first = [], None
    for step in range(2):
        optimizer.zero_grad()
        loss = model(**rows_of(case, mask, step), **cached).loss
        loss.backward()
        losses.append(float(loss.detach()))
        first = first or {name: p.grad.clone() for name, p in saved_names(model)}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return losses, first, float(norm), {name: p.detach() for name, p in saved_names(model)}


# class, kind of rows, sizes and options of the author's model, sizes of the reader's
CELLS = [
    ("GPT2LMHeadModel", "packed", {"cp": 2}, {"cp": 2}),
    ("BertForMaskedLM", "left", {"cp": 2}, {"cp": 2}),
    ("GPT2LMHeadModel", "padded", {"tp": 2}, {"tp": 2, "cp": 2}),
    ("BertForMaskedLM", "padded", {"cp": 2}, {"cp": 4}),
    ("BertForMaskedLM", "padded", {"tp": 2, "cp": 2}, {"tp": 2, "cp": 2}),
    ("GPT2LMHeadModel", "bare", {"tp": 2, "cp": 2, "sequence_parallel": True}, {"tp": 2, "cp": 2}),
    ("GPT2LMHeadModel", "padded", {"pp": 2, "cp": 2, "checkpoint_ratio": 1.0}, {"pp": 2, "cp": 2}),
    ("T5ForConditionalGeneration", "padded", {"cp": 2}, {"cp": 2, "dp": 2}),
    ("GPT2LMHeadModel", "padded", {"cp": 2}, {"cp": 2, "cp_attention": "ring"}),
]  # fmt: skip


def on_mesh(work, *args, sizes, **options):
    """Run `work` on every rank of the mesh of `sizes`, whose other entries are options of the loader."""
    ranks = sizes.get("dp", 1) * sizes.get("cp", 1)
    mesh = sizes.get("tp", 1), sizes.get("pp", 1), ranks
    return emulate(work, *args, mesh=mesh, **{"dp": 1, **sizes}, **options)


@pytest.mark.parametrize(
    ("cls", "mask", "of", "on"),
    [
        pytest.param(*cell, marks=pytest.mark.slow if i not in (0, 2) else ())
        for i, cell in enumerate(CELLS)
    ],
)
def test_model_loaded_from_a_schedule_card_with_cp_has_the_losses_of_plain_transformers(
    cls, mask, of, on, tmp_path
):
    """Losses, every gradient, the norm, and weights after two steps: with dropout as one process, without as plain."""
    case, dry = case_of(cls), case_of(cls, dropout=0.0)
    (card, *others) = on_mesh(published, case, str(tmp_path / "card"), sizes=of)
    assert set(others) <= {card}
    assert read_card(Path(card)).mesh == {"tp": 1, "pp": 1, "dp": 1} | {
        n: of[n] for n in of if n in ("tp", "pp", "cp")
    }
    given = {"schedule": card, "verify": "off", "sizes": on}
    found = on_mesh(trained, case, mask, **given)
    require_equal(found[0], trained(case, mask))
    assert all(each[0] == found[0][0] for each in found)
    folder = checkpoint(dry, tmp_path)
    found = on_mesh(trained, dry, mask, folder=folder, **given)
    require_equal(found[0], of_plain(dry, mask, folder))


def with_steps(card, keep=lambda step: True, **changes):
    """Return a card without the directives that `keep` leaves out, and with changes of its program."""
    steps = tuple(filter(keep, card.program.steps))
    return replace(card, program=replace(card.program, steps=steps, **changes))


GPT2 = Case("GPT2LMHeadModel", ("tokens",))
SIZES = {"tp": 1, "pp": 1, "dp": 1}


def test_schedule_card_made_with_cp_differs_from_one_made_without_only_in_its_cp_size(tmp_path):
    """The program is the same for every cp; README.md names the cp that the card was made for."""
    made(GPT2, tmp_path / "whole", Mesh())
    made(GPT2, tmp_path / "cut", Mesh(cp=2))
    whole, cut = (read_card(tmp_path / name) for name in ("whole", "cut"))
    assert whole.program.to_bytes() == cut.program.to_bytes()
    assert (whole.mesh, cut.mesh) == (SIZES, SIZES | {"cp": 2})
    pages = [(tmp_path / name / "README.md").read_text() for name in ("whole", "cut")]
    assert not any(word in pages[0] for word in ("cp=", "cp-", "cp:"))
    assert "- cp-2\n" in pages[1]
    assert "tp=1, pp=1, dp=1, cp=2. It is data" in pages[1]
    assert 'schedule="org/name@sha", tp=1, pp=1, cp=2\n' in pages[1]
    (tmp_path / "cut" / "README.md").write_text(pages[1].replace("cp: 2", "cp: two"))
    with pytest.raises(CardError, match=r"'cp': 'two'}, expected integers .* for tp, pp, dp, cp"):
        read_card(tmp_path / "cut")


# what the author does, arguments of the reader, text of the error
REFUSED = {
    "policy": ({"checkpoint_ratio": 1.0, "checkpoint_policy": "save_matmuls"}, {}, "card | sch['transformer.h.0'].checkpoint(policy='save_matmuls') | not supported together with cp=2 | load the card with cp=1"),
    "kernel": ({"kernels": ["bias_gelu"]}, {}, "card | sch['**:NewGELUActivation'].replace(new='bias_gelu') | not supported together with cp=2"),
    "attention": ({"attention": "flex"}, {}, "backend='flex') | not supported together with cp=2"),
    "ring": ({"attention": "eager"}, {"cp_attention": "ring"}, "backend='eager') | not supported together with cp=2 and cp_attention=\"ring\" | load the card with cp=1 or another cp_attention"),
    "heads": ({}, {"cp_attention": "ulysses"}, "cp=2 does not divide the 5 heads of a rank"),
    "stages": ({"mesh": Mesh(pp=2)}, {}, "card | constraint 'stages == 2' | the constraint does not hold: found stages = 1"),
    "cp of the author": ({"changes": {"constraints": ("stages == 1", "cp == 1")}}, {}, "card | constraint 'cp == 1' | the constraint does not hold: found cp = 2"),
    "no seam": ({"changes": {"keep": lambda step: step[1] != "core_attention"}}, {}, "card | transformer.h.0.attn | the card has no core_attention for this module: with cp=2"),
    "python": ({}, {"trust_remote_code": True}, "not supported together with cp=2 | use schedule=\"zoo\", \"auto\" or a card; or use cp=1"),
}  # fmt: skip


def said(config, **options):
    """Text of the error with which a load is refused on this rank."""
    with pytest.raises(SlapoError) as caught:
        AutoScheduledModel.from_config(config, **{"verify": "off", "dp": 1, **options})
    error = caught.value
    return " | ".join((error.where, str(error.what), error.problem, error.hint))


@pytest.mark.parametrize("name", REFUSED)
def test_schedule_card_that_does_not_allow_the_mesh_with_cp_is_refused_on_every_rank(
    name, tmp_path
):
    author, reader, text = REFUSED[name]
    author, config = dict(author), tiny_config(GPT2)[0]
    mesh, changes = author.pop("mesh", Mesh()), author.pop("changes", {})
    card = zoo_card(config, GPT2.cls, mesh, "tiny", **author)
    with_steps(card, **changes).write(tmp_path / "card")
    given = {"auto_class": GPT2.cls, "schedule": str(tmp_path / "card"), "cp": 2, **reader}
    for found in emulate(said, config, mesh=(1, 1, 2), **given):
        assert text in found
        assert all(found.split(" | ")), found


def test_schedule_json_files_and_vision_models_are_refused_with_cp(tmp_path):
    config = tiny_config(GPT2)[0]
    file = tmp_path / "steps.json"
    file.write_text(AutoScheduledModel.from_config(config, auto_class=GPT2.cls).schedule.to_json())
    for found in emulate(
        said, config, auto_class=GPT2.cls, schedule=str(file), cp=2, mesh=(1, 1, 2)
    ):
        assert "not supported together with cp=2 | use schedule" in found
    case = Case("ViTForImageClassification", ())
    config, card = tiny_config(case)[0], made(case, tmp_path / "card", Mesh())
    for found in emulate(said, config, auto_class=case.cls, schedule=card, cp=2, mesh=(1, 1, 2)):
        assert "the loss of ViTForImageClassification is no mean over tokens" in found


def test_schedule_card_without_fork_rng_directives_fails_verification_at_load_with_cp(
    tmp_path, forked_child
):
    """Without random streams, two cp ranks do not draw the masks of one process."""
    config = tiny_config(GPT2)[0]
    card = with_steps(zoo_card(config, GPT2.cls, Mesh(), "tiny"), lambda s: s[1] != "fork_rng")
    card.write(tmp_path / "card")
    given = {"auto_class": GPT2.cls, "schedule": str(tmp_path / "card"), "cp": 2, "verify": "quick"}
    for found in emulate(said, config, mesh=(1, 1, 2), **given):
        assert "card | verify | the schedule of this card is wrong" in found
        assert "on tp=1 pp=1 dp=1 cp=2 (shrunken config): failed" in found


def run(*words):
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    return stop.value.code


@pytest.mark.slow
def test_card_make_and_verify_commands_accept_cp_and_report_verified(tmp_path, capsys):
    folder, model = tmp_path / "card", tmp_path / "model"
    config = tiny_config(GPT2)[0]
    config.architectures = [GPT2.cls]
    config.save_pretrained(model)
    assert run("card", "make", model, folder, "--cp", 2) == 0
    assert run("verify", model, "--schedule", folder, "--cp", 2, "--cp-attention", "ring") == 0
    assert run("card", "verify", folder, "--model", model) == 0
    found = json.loads((folder / "verify.json").read_text())
    assert (found["verdict"], found["mesh"]) == ("verified", SIZES | {"cp": 2})
    assert (
        "GPT2LMHeadModel on tp=1 pp=1 dp=1 cp=2 (shrunken config): verified"
        in capsys.readouterr().out
    )
