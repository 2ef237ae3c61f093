"""Derived tables with dropout: several ranks draw the masks of one rank."""

from dataclasses import replace

import pytest
import torch
import transformers
from huggingface_hub import constants
from type_coverage import default_config

from slapo_zoo import AutoScheduledModel, emulate
from slapo_zoo.language.primitives import ForkRng
from slapo_zoo.model.load import auto_schedule
from slapo_zoo.verify.case import Trial, dropouts
from slapo_zoo.verify.derive import Search, derive, problem_of
from slapo_zoo.verify.tiny_case import tiny_case
from slapo_zoo.zoo.options import BuildOptions
from slapo_zoo.zoo.tiny_config import Sizes, tiny

# a head's dropout before and after a sharded product; a block's; a plan of transformers; widths that differ
CLASSES = ["LiltForSequenceClassification", "XLNetForSequenceClassification", "Qwen3MoeForCausalLM",
           "FocalNetForImageClassification"]  # fmt: skip


@pytest.fixture
def prove(monkeypatch, tmp_path):
    """Return a function that derives a schedule here, into the cache of later loads: a new process imports for longer.

    A load of this process whose proof is not in the cache fails; tests/zoo/test_auto.py has the process itself.
    """
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "proofs"))
    monkeypatch.setattr(auto_schedule, "python_apart", None)
    options = BuildOptions(schedule="auto")

    def fill(config, cls, sizes):
        file = auto_schedule.cache_file(config, cls, (*sizes, 1, options.cp_attention), options)
        auto_schedule._write(file, derive(config, cls, sizes).document())

    return fill


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
    cls, tmp_path, threads, prove
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
    for tp in (1, 2):
        prove(config, known, (tp, 1, 1))
    ((loss, wanted),) = threads.run(step, 1, *arguments, 1)
    largest = max(float(grad.abs().max()) for grad in wanted.values())
    both = wanted.keys() & case.truth.grads.keys()
    moved = max(float((wanted[name] - case.truth.grads[name]).abs().max()) for name in both)
    assert moved > 0.05 * largest, "nothing drops"
    for found, grads in threads.run(step, 2, *arguments, 2):
        assert found == pytest.approx(loss, rel=1e-5)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, wanted[name], rtol=1e-4, atol=1e-5 * largest)


# a block drops what its sharded linear made; XLNet's head drops by an Identity; some tokens are dropped
WRONG = [("FocalNetForImageClassification", {}, "after"), ("XLNetForSequenceClassification", {}, "after"),
         ("CTRLLMHeadModel", {"sequence_parallel": True}, "tokens")]  # fmt: skip


@pytest.mark.slow  # test_comparison.py has such a fault in dropout on shards of tokens
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


BIOGPT = transformers.BioGptConfig(
    hidden_size=32, num_attention_heads=4, num_hidden_layers=2, vocab_size=64, intermediate_size=48,
    max_position_embeddings=16, layerdrop=0.0, architectures=["BioGptForCausalLM"],
)  # fmt: skip


def trained(mesh):
    model = AutoScheduledModel.from_config(BIOGPT, *mesh, seed=0, schedule="auto").train()
    rows = IDS.tensor_split(mesh[2])[model.mesh.coord("dp")]
    loss = float(model.train_step({"input_ids": rows, "labels": rows}))
    return loss, float(model.clip_grad_norm_(1e9))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mesh", [(2, 1, 1), (1, 2, 1), (1, 1, 2)], ids=str)
def test_training_with_sdpa_dropout_on_emulated_ranks_has_the_losses_of_one_rank(mesh, prove):
    """Emulated ranks share torch's generator, so dropout that reads it would differ in each run."""
    for sizes in ((1, 1, 1), mesh):
        prove(BIOGPT, transformers.BioGptForCausalLM, sizes)
    wanted = trained((1, 1, 1))
    for found in emulate(trained, mesh, mesh=mesh):
        assert found == pytest.approx(wanted, rel=1e-6), mesh
