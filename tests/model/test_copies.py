"""copy.deepcopy of a scheduled model: an average, a frozen reference, a snapshot."""

import copy
import pickle

import pytest
import torch

from parity import Case, batch_of, checkpoint

CASES = [
    Case("GPT2LMHeadModel", ("tokens",), dropout=0.1),
    Case("BertForMaskedLM", ("tokens",), dropout=0.1),
    Case("T5ForConditionalGeneration", ("tokens",)),
    Case("LlamaForCausalLM", ("tokens",), (("num_key_value_heads", 1),)),
    Case("MixtralForCausalLM", ("tokens",)),
    Case("MambaForCausalLM", ("tokens",)),
]
SP, PP = {"tp": 2, "sequence_parallel": True}, {"pp": 2, "checkpoint_ratio": 0.5}
CELLS = [
    *(pytest.param(case, SP, id=f"{case.cls}-tp2-sp") for case in CASES),
    *(pytest.param(CASES[i], PP, id=f"{CASES[i].cls}-pp2") for i in (0, 2)),
]


def step(model, batch):
    model.zero_grad()
    loss = model.train_step(batch)
    return float(loss), {n: p.grad.clone() for n, p in model.named_parameters()}


def copied(folder, case, layout):
    """What the original and its copy compute, and what they do to each other."""
    from slapo_zoo import AutoScheduledModel

    changes = {"experts_implementation": "eager"} if "Mixtral" in case.cls else {}
    model = AutoScheduledModel.from_pretrained(folder, seed=0, **layout, **changes).train()
    batch = batch_of(case)
    other = copy.deepcopy(model)
    assert other.state_dict().keys() == model.state_dict().keys()
    first, second = step(model, batch), step(other, batch)  # with the same dropout masks
    before = {n: p.grad.clone() for n, p in model.named_parameters()}
    assert first[0] == second[0]
    for name, grad in first[1].items():
        assert torch.equal(grad, second[1][name]), name
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    step(other, batch)
    grads = {n: p.grad for n, p in model.named_parameters()}
    assert all(torch.equal(grads[n], g) for n, g in before.items()), "gradients of the original"
    with torch.no_grad():
        again = model.eval()(**batch).logits
        zeroed = other.eval()(**batch).logits
    own = {id(module) for module in model.modules()}
    assert not own & {id(module) for module in other.modules()}
    return again, zeroed


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("case", "layout"), CELLS)
def test_a_copy_is_independent(case, layout, tmp_path, ranks):
    folder = checkpoint(case, tmp_path)
    for logits, zeroed in ranks.run(copied, 2, folder, case, layout, timeout=200):
        assert logits.abs().max() > 0
        assert zeroed.abs().max() == 0, "the copy computes with weights of the original"


def averaged(folder, layout, options):
    """An exponential average over 3 steps."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    from slapo_zoo import AutoScheduledModel

    tp, pp, dp = layout
    model = AutoScheduledModel.from_pretrained(
        folder, tp=tp, pp=pp, dp=dp, seed=0, **options
    ).train()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = 4 // dp
    part = slice(model.mesh.coord("dp") * rows, (model.mesh.coord("dp") + 1) * rows)
    for i in range(3):
        optimizer.zero_grad()
        model.train_step({k: v[part] for k, v in batch_of(CASES[0], i).items()})
        optimizer.step()
        average.update_parameters(model)
    weights = average.module.consolidated_state_dict()
    with torch.no_grad():
        return weights, average.eval()(**batch_of(CASES[0])).logits


AVERAGES = {
    "tp2": ((2, 1, 1), {}), "pp2": ((1, 2, 1), {}), "dp2": ((1, 1, 2), {}), "zero3": ((1, 1, 2), {"dp_shard": 2}),
    "zero1": ((1, 1, 2), {"dp_shard": 2, "zero_stage": 1}),
}  # fmt: skip


@pytest.mark.parametrize(("layout", "options"), AVERAGES.values(), ids=AVERAGES)
def test_an_average_of_weights_is_that_of_one_process(layout, options, tmp_path, ranks):
    case = CASES[0]
    folder = checkpoint(case, tmp_path)
    weights, logits = ranks.run(averaged, 1, folder, (1, 1, 1), {})[0]
    found = ranks.run(averaged, 2, folder, layout, options)
    for name, want in weights.items():
        torch.testing.assert_close(found[0][0][name], want, atol=2e-6, rtol=1e-5, msg=name)
    for _, each in found:
        torch.testing.assert_close(each, logits, atol=1e-5, rtol=1e-5)


def test_a_pickle_is_refused(tmp_path):
    from slapo_zoo import AutoScheduledModel, SlapoError

    model = AutoScheduledModel.from_pretrained(checkpoint(CASES[0], tmp_path))
    with pytest.raises(SlapoError, match="save_pretrained"):
        torch.save(model, tmp_path / "model.pt")
    with pytest.raises(SlapoError, match="save_pretrained"):
        pickle.dumps(model)
