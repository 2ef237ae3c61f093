"""Derived tables with dropout: several ranks draw the masks of one rank."""

from dataclasses import replace

import pytest
import torch
import transformers
from type_coverage import default_config

from slapo_zoo import AutoScheduledModel, emulate
from slapo_zoo.language.primitives import ForkRng
from slapo_zoo.verify.case import Trial, dropouts
from slapo_zoo.verify.derive import Search, problem_of
from slapo_zoo.verify.tiny_case import tiny_case
from slapo_zoo.zoo.tiny_config import Sizes, tiny

# a head's dropout before and after a sharded product; a block's; a plan of transformers; widths that differ
CLASSES = ["LiltForSequenceClassification", "XLNetForSequenceClassification", "Qwen3MoeForCausalLM",
           "FocalNetForImageClassification"]  # fmt: skip


def step(folder, config, cls, batch, given, tp):
    model = AutoScheduledModel.from_pretrained(
        folder, config=config, tp=tp, auto_class=getattr(transformers, cls), schedule="auto",
        kernels="reference", **given,
    )  # fmt: skip
    loss = float(model.train().train_step(batch, micro_batches=1))
    return loss, model.consolidated_state_dict(grads=True)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("cls", CLASSES)
def test_automatically_derived_schedule_draws_the_same_dropout_on_one_and_several_ranks(
    cls, tmp_path, ranks
):
    known = getattr(transformers, cls)
    case = tiny_case(default_config(known.config_class.model_type, known), known, tmp_path, Sizes())
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    for name in dropouts(config):
        if getattr(config, name) is not None:
            setattr(config, name, 0.3)
    batch = {k: x.float() if x.is_floating_point() else x for k, x in case.batch.items()}
    given = {k: v for k, v in case.changes().items() if k == "experts_implementation"}
    arguments = (tmp_path, config, cls, batch, given)
    ((loss, wanted),) = ranks.run(step, 1, *arguments, 1)
    largest = max(float(grad.abs().max()) for grad in wanted.values())
    both = wanted.keys() & case.truth.grads.keys()
    moved = max(float((wanted[name] - case.truth.grads[name]).abs().max()) for name in both)
    assert moved > 0.05 * largest, "nothing drops"
    for found, grads in ranks.run(step, 2, *arguments, 2):
        assert found == pytest.approx(loss, rel=1e-5)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, wanted[name], rtol=1e-4, atol=1e-5 * largest)


# a block drops what its sharded linear made; XLNet's head drops by an Identity; some tokens are dropped
WRONG = [("FocalNetForImageClassification", {}, "after"), ("XLNetForSequenceClassification", {}, "after"),
         ("CTRLLMHeadModel", {"sequence_parallel": True}, "tokens")]  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("cls", "knobs", "said"), WRONG)
def test_verify_detects_ranks_whose_dropout_masks_differ_from_those_of_one_rank(
    cls, knobs, said, tmp_path
):
    """Replicated tensors agree: the fault is in the dropout of each rank's own shard."""
    known, mesh = getattr(transformers, cls), (2, 1, 1)
    config = known.config_class()
    for name in dropouts(config):
        setattr(config, name, 0.1)
    case = tiny_case(tiny(config), known, tmp_path, Sizes())
    search = Search(case.config, case, mesh, knobs)
    table = search.candidates()[0](case.config, search.small)
    assert problem_of(Trial(case, mesh, table, knobs)) == ""
    rows = [(row, any(getattr(d, said, "") for d in row[1])) for row in table.body]
    body = tuple((row[0], (ForkRng(),)) if says else row for row, says in rows)
    assert body != table.body
    found = problem_of(Trial(case, mesh, replace(table, body=body), knobs))
    assert found.startswith("dropout: ")


IDS = torch.arange(32).reshape(4, 8) * 3 % 61


def trained(mesh):
    config = transformers.BioGptConfig(
        hidden_size=32, num_attention_heads=4, num_hidden_layers=2, vocab_size=64, intermediate_size=48,
        max_position_embeddings=16, layerdrop=0.0, architectures=["BioGptForCausalLM"],
    )  # fmt: skip
    model = AutoScheduledModel.from_config(config, *mesh, seed=0, schedule="auto").train()
    rows = IDS.tensor_split(mesh[2])[model.mesh.coord("dp")]
    loss = float(model.train_step({"input_ids": rows, "labels": rows}))
    return loss, float(model.clip_grad_norm_(1e9))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mesh", [(2, 1, 1), (1, 2, 1), (1, 1, 2)], ids=str)
def test_training_with_sdpa_dropout_on_emulated_ranks_has_the_losses_of_one_rank(mesh):
    """Emulated ranks share torch's generator, so dropout that reads it would differ in each run."""
    wanted = trained((1, 1, 1))
    for found in emulate(trained, mesh, mesh=mesh):
        assert found == pytest.approx(wanted, rel=1e-6), mesh
