"""Other values of `schedule=` than the zoo and cards: the file of to_json, and the zoo's schedule extended."""

from dataclasses import replace

import pytest
import torch

from parity import checkpoint
from refusals import GPT2, refused
from slapo_zoo import AutoScheduledModel, SlapoError, extend
from slapo_zoo.zoo.table import table_for

IDS = torch.arange(12).view(2, 6) + 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return checkpoint(GPT2, tmp_path_factory.mktemp("schedule"))


def loss_of(model):
    return model.train_step({"input_ids": IDS, "labels": IDS})


def test_schedule_loaded_from_a_json_file_gives_the_same_schedule_and_loss(folder, tmp_path):
    model = AutoScheduledModel.from_pretrained(folder)
    file = tmp_path / "mine.json"
    file.write_text(model.schedule.to_json())
    again = AutoScheduledModel.from_pretrained(folder, schedule=str(file))
    assert str(again.schedule) == str(model.schedule)
    assert torch.equal(loss_of(again), loss_of(model))


def test_extend_applies_a_user_function_after_the_default_schedule(folder):
    plain = AutoScheduledModel.from_pretrained(folder)
    model = AutoScheduledModel.from_pretrained(
        folder, schedule=extend(lambda sch: sch["transformer.h.0"].checkpoint())
    )
    more = model.schedule.history[len(plain.schedule.history) :]
    assert [(path, d.name) for path, d in more] == [("transformer.h.0", "checkpoint")]
    assert torch.equal(loss_of(model), loss_of(plain))
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad), name


def test_schedule_argument_accepts_a_table_and_applies_its_rules(folder):
    unsharded = replace(table_for("gpt2"), body=(), heads=())
    plain = AutoScheduledModel.from_pretrained(folder)
    model = AutoScheduledModel.from_pretrained(folder, schedule=table_for("gpt2"))
    bare = AutoScheduledModel.from_pretrained(folder, schedule=unsharded)
    assert str(model.schedule) == str(plain.schedule)
    assert len(bare.schedule.history) < len(plain.schedule.history)
    assert torch.allclose(loss_of(bare), loss_of(plain))


def test_extend_raises_if_its_argument_is_not_a_function():
    with pytest.raises(SlapoError, match="pass a function of one argument"):
        extend([])


def test_schedule_json_file_with_a_malformed_step_raises(folder, tmp_path):
    file = tmp_path / "other.json"
    file.write_text('{"format": "slapo-zoo-schedule/1", "steps": [["wte", "shard"]]}')
    text = refused(SlapoError, folder, schedule=str(file))
    assert "expected [pattern, primitive, arguments]" in text


def wider(sch):
    sch["transformer.h.0.mlp"].replace(torch.nn.Linear(32, 32))


@pytest.mark.parametrize(
    ("schedule", "problem"),
    [
        ([1], "found 1, expected a pair"),
        ([("transformer.h.*", 1)], "expected a pair (pattern, directive)"),
        (wider, "a directive added this parameter"),
        ("bytes.json", "found bytes that are not UTF-8"),
    ],
)
def test_schedule_argument_that_cannot_be_applied_is_refused_with_its_cause(
    schedule, problem, folder, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    assert problem in refused(SlapoError, folder, schedule=schedule)


def test_pipeline_order_argument_accepts_the_schedule_names_of_torch(folder):
    model = AutoScheduledModel.from_pretrained(folder, pipeline_order="1F1B")
    assert torch.isfinite(loss_of(model))
