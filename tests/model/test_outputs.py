"""Fields of an output object: equal to plain transformers, or refused by name."""

import pytest
import torch
import transformers

from parity import Case, batch_of, changes_of, checkpoint
from slapo_zoo import AutoScheduledModel, SlapoError

CASES = [
    Case(name, ("tokens",))
    for name in (
        "GPT2LMHeadModel", "BertForMaskedLM", "T5ForConditionalGeneration", "LlamaForCausalLM",
        "MixtralForCausalLM", "OPTForCausalLM",
    )
]  # fmt: skip
CLOSE = {"rtol": 1e-4, "atol": 2e-5}


def load(folder, case, layout):
    return AutoScheduledModel.from_pretrained(
        folder, seed=0, auto_class=case.cls, **layout, **changes_of(case)
    )


def outputs(folder, case, layout, options, train):
    model = load(folder, case, layout).train(train)
    found = model(**batch_of(case), **options)
    return {k: [x.detach() for x in v] for k, v in found.items() if k.endswith("hidden_states")}


@pytest.mark.one_in(2, 2)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp2", "tp2-sp"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.cls)
def test_output_hidden_states_returns_unsharded_tensors(case, sequence_parallel, tmp_path, threads):
    folder = checkpoint(case, tmp_path)
    plain = getattr(transformers, case.cls).from_pretrained(folder, **changes_of(case)).train()
    want = plain(**batch_of(case), output_hidden_states=True)
    layout = {"tp": 2, "sequence_parallel": sequence_parallel}
    options = {"output_hidden_states": True}
    for found in threads.run(outputs, 2, folder, case, layout, options, True):
        assert found
        for name, layers in found.items():
            assert len(layers) == len(want[name])
            for mine, theirs in zip(layers, want[name], strict=True):
                torch.testing.assert_close(mine, theirs.detach(), **CLOSE)


def as_tuple(folder, case, layout):
    model, batch = load(folder, case, layout), batch_of(case)
    found = model(**batch, return_dict=False)
    named = model(**batch)
    loss = float(model.train_step({**batch, "return_dict": False}))
    if "GPT2" not in case.cls:  # whose own forward of transformers cannot have it in the config
        model.config.return_dict = False
        assert torch.equal(model(**batch)[1], found[1])
        assert abs(float(model.train_step(batch)) - loss) < 1e-6
    assert isinstance(found, tuple)
    assert torch.equal(found[0], named.loss)
    assert torch.equal(found[1], named.logits)
    return found[0].detach(), found[1].detach()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=["tp2", "pp2"])
@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: case.cls)
def test_forward_with_return_dict_false_equals_plain_transformers_on_tp_2_and_pp_2(
    case, layout, tmp_path, threads
):
    folder = checkpoint(case, tmp_path)
    plain = getattr(transformers, case.cls).from_pretrained(folder)
    want = plain(**batch_of(case), return_dict=False)
    for loss, logits in threads.run(as_tuple, 2, folder, case, layout):
        torch.testing.assert_close(loss, want[0].detach(), **CLOSE)
        torch.testing.assert_close(logits, want[1].detach(), **CLOSE)


def refusals(folder, case, layout, options):
    model, batch = load(folder, case, layout), batch_of(case)
    found = []
    for call in (lambda: model(**batch, **options), lambda: model.train_step({**batch, **options})):
        with pytest.raises(SlapoError) as caught:
            call()
        found.append(str(caught.value))
    return found


@pytest.mark.parametrize(
    ("layout", "option", "words"),
    [
        ({"pp": 2}, "output_hidden_states", "pp=1"),
        ({"pp": 2}, "output_attentions", "pp=1"),
        ({"tp": 2}, "output_attentions", "tp=1"),
        ({}, "output_attentions", 'attention="eager"'),
    ],
    ids=["pp2-states", "pp2-attentions", "tp2-attentions", "sdpa-attentions"],
)
def test_hidden_states_and_attentions_of_layers_on_another_rank_are_refused(
    layout, option, words, tmp_path, ranks
):
    folder = checkpoint(CASES[0], tmp_path)
    n = 2 if layout else 1
    for texts in ranks.run(refusals, n, folder, CASES[0], layout, {option: True}):
        for text in texts:
            assert option in text
            assert words in text


def broadcast(folder, case, layout):
    model = load(folder, case, layout).train()
    positions = torch.arange(12)[None] % 7
    loss = model.train_step({**batch_of(case), "position_ids": positions}, micro_batches=2)
    return float(loss), model.consolidated_state_dict(grads=True)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=["tp2", "pp2"])
def test_position_ids_of_one_row_are_broadcast_to_every_row_of_each_micro_batch(
    layout, tmp_path, threads
):
    case = CASES[0]
    folder = checkpoint(case, tmp_path)
    plain = transformers.GPT2LMHeadModel.from_pretrained(folder).train()
    loss = plain(**batch_of(case), position_ids=torch.arange(12)[None] % 7).loss
    loss.backward()
    found = threads.run(broadcast, 2, folder, case, layout)
    for each, _ in found:
        assert abs(each - loss.item()) < 1e-4
    for name, p in plain.named_parameters():
        torch.testing.assert_close(found[0][1][name], p.grad, **CLOSE)


def counted(folder, case):
    """dp2: the items of both ranks, as the Trainer of transformers counts them."""
    model = load(folder, case, {"dp": 2}).train()
    batch, half = batch_of(case), slice(2 * model.mesh.coord("dp"), 2 * model.mesh.coord("dp") + 2)
    mine = {k: v[half] for k, v in batch.items()}
    items = (batch["labels"][:, 1:] != -100).sum()
    mean = float(model.train_step(mine))
    assert abs(float(model.train_step({**mine, "num_items_in_batch": items})) - mean) < 1e-6
    half_loss = float(model.train_step({**mine, "num_items_in_batch": 2 * items}))
    assert abs(2 * half_loss - mean) < 1e-5
    with pytest.raises(SlapoError, match="drop_last"):
        model.train_step({k: v[:0] for k, v in mine.items()})


def test_forward_argument_num_items_in_batch_counts_the_targets_of_all_dp_ranks(tmp_path, ranks):
    ranks.run(counted, 2, checkpoint(CASES[0], tmp_path), CASES[0])


def outputs_within(folder, case, batch):
    model = load(folder, case, {"pp": 2}).eval()
    with torch.no_grad():
        return model(**batch)


def test_outputs_within_an_output_are_returned_by_every_stage(tmp_path, threads):
    case = Case("CLIPModel", ())
    folder, batch = checkpoint(case, tmp_path), batch_of(case)
    with torch.no_grad():
        want = transformers.CLIPModel.from_pretrained(folder).eval()(**batch)
    for found in threads.run(outputs_within, 2, folder, case, batch):
        assert found.keys() == want.keys()
        for name in ("text_model_output", "vision_model_output"):
            torch.testing.assert_close(found[name].pooler_output, want[name].pooler_output, **CLOSE)
