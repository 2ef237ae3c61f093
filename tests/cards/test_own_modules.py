"""A card of one's own module: published into a folder, applied to another instance, refused where it does not fit."""

import json

import pytest
import torch
from torch import nn
from transformers import GPT2Config

import slapo_zoo
from slapo_zoo import AutoScheduledModel, CardError, Mesh, ScheduleError
from slapo_zoo.parallel.rng.layout_independent_random import drawn_from


class Tower(nn.Module):
    """An embedding bag, a norm and two linears, which a card shards over tp."""

    def __init__(self, width=8):
        super().__init__()
        self.bag, self.norm = nn.EmbeddingBag(16, width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, ids):
        return self.down(self.up(self.norm(self.bag(ids))).relu())


class Other(Tower):
    """Module with the same tree and shapes, of another class."""


IDS = torch.arange(12).view(3, 4)


def schedule(sch):
    sch["up"].shard("weight", 0).shard("bias", 0).sync("bwd_post", "all_reduce")
    sch["down"].shard("weight", 1).sync("fwd_post", "all_reduce")
    return sch


def tower():
    with drawn_from(0):  # ranks that are threads share torch's generator
        return Tower()


@pytest.fixture
def card(tmp_path):
    def write():
        return slapo_zoo.publish_card(
            schedule(slapo_zoo.create_schedule(tower())), tmp_path / "card"
        )

    assert slapo_zoo.emulate(write, mesh=(2, 1, 1)) == [str(tmp_path / "card")] * 2
    return str(tmp_path / "card")


def test_schedule_card_applied_to_a_user_module_keeps_output_and_gradients(card):
    def trained():
        model = slapo_zoo.build(slapo_zoo.apply_card(tower(), card))
        output = model(IDS)
        output.square().sum().backward()
        return output.detach(), model.norm.weight.grad, model.up.weight.shape[0]

    plain = tower()
    plain(IDS).square().sum().backward()
    for output, gradient, rows in slapo_zoo.emulate(trained, mesh=(2, 1, 1)):
        torch.testing.assert_close(output, plain(IDS).detach())
        torch.testing.assert_close(gradient, plain.norm.weight.grad)
        assert rows == 16


def test_schedule_card_made_on_two_ranks_shards_a_user_module_over_four_ranks(card):
    shapes = slapo_zoo.emulate(
        lambda: slapo_zoo.apply_card(tower(), card).model.up.weight.shape, mesh=(4, 1, 1)
    )
    assert shapes == [(8, 8)] * 4


def test_readme_of_a_schedule_card_for_a_user_module_shows_the_apply_card_call(card):
    with open(f"{card}/README.md") as file:
        text = file.read()
    assert "slapo_zoo.apply_card(Tower(...), " in text
    assert "from_pretrained" not in text
    with open(f"{card}/schedule.json") as file:
        document = json.load(file)
    assert document["structure"] == slapo_zoo.create_schedule(tower()).structure


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Tower(16), "the card was made for a model with other modules or tensor shapes"),
        (Other(), "the card was made for Tower, the module is Other"),
    ],
)
def test_apply_card_refuses_a_module_of_other_shapes_or_class_and_leaves_it_unchanged(
    card, module, words
):
    before = {name: p.shape for name, p in module.named_parameters()}
    with pytest.raises(CardError, match=words):
        slapo_zoo.apply_card(module, card, Mesh(tp=1))
    assert {name: p.shape for name, p in module.named_parameters()} == before


def test_apply_card_refuses_a_mesh_that_does_not_divide_the_module_and_leaves_it_unsharded(card):
    def refused():
        module = tower()
        with pytest.raises(ScheduleError, match=r"32 .*3|3 .*32"):
            slapo_zoo.apply_card(module, card)
        return {p.shape for p in module.parameters()} == {p.shape for p in tower().parameters()}

    assert slapo_zoo.emulate(refused, mesh=(3, 1, 1)) == [True] * 3


def test_schedule_card_used_with_the_wrong_function_raises_and_names_the_right_function(
    card, tmp_path
):
    config = {"n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 16}
    with pytest.raises(CardError, match=r"apply_card\(module, card\)"):
        AutoScheduledModel.from_config(
            GPT2Config(**config, architectures=["GPT2LMHeadModel"]), schedule=card
        )
    model = AutoScheduledModel.from_config(GPT2Config(**config, architectures=["GPT2LMHeadModel"]))
    family = model.push_schedule_to_hub(tmp_path / "family")
    assert family == str(tmp_path / "family")
    again = AutoScheduledModel.from_config(model.config, schedule=family, verify="off")
    assert str(again.schedule) == str(model.schedule)
    with pytest.raises(CardError, match="the card is for gpt2 models of transformers"):
        slapo_zoo.apply_card(tower(), family)


def test_publish_card_to_a_folder_refuses_a_tag_and_a_file_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").write_text("mine")
    sch = schedule(slapo_zoo.create_schedule(tower()))
    with pytest.raises(CardError, match="tag is for a repository of the Hub"):
        slapo_zoo.publish_card(sch, tmp_path / "card", tag="v1")
    assert not (tmp_path / "card").exists()
    with pytest.raises(CardError, match="the card cannot be written: File exists"):
        slapo_zoo.publish_card(sch, "notes")


def test_publish_card_refuses_a_schedule_with_a_python_hook(tmp_path):
    sch = slapo_zoo.create_schedule(tower())
    sch["up"].hook("fwd_pre", print)
    with pytest.raises(CardError, match="a Python object, which JSON"):
        slapo_zoo.publish_card(sch, tmp_path / "card")
