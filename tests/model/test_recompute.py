"""gradient_checkpointing_enable(): the same dropout masks and gradients from fewer saved activations."""

import pytest
import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from parity import Case, batch_of, checkpoint
from slapo_zoo import SlapoError

CASES = {
    "gpt2": Case("GPT2LMHeadModel", ("tokens",), dropout=0.1),
    "bert": Case("BertForMaskedLM", ("tokens",), dropout=0.1),
    "t5": Case("T5ForConditionalGeneration", ("tokens",), dropout=0.1),
    "opt": Case("OPTForCausalLM", ("tokens",), dropout=0.1),  # F.dropout inside of its layers
}
FORMS = ({}, {"use_reentrant": True}, {"use_reentrant": False})
pytestmark = pytest.mark.filterwarnings("ignore:.gradient_checkpointing:FutureWarning")


def trained(model, batch, by_hand):
    """Return loss and gradients of the second step, and the calls of the first layer."""
    layer, calls = next(m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)), []
    norm = next(m for m in layer.modules() if "Norm" in type(m).__name__)
    handle = norm.register_forward_hook(lambda *_: calls.append(1))
    for _ in range(2):
        model.zero_grad()
        calls.clear()
        if by_hand:
            loss = model(**batch).loss
            loss.backward()
        else:
            loss = model.train_step(batch)
    handle.remove()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}, len(calls)


def forms(folder, case, layout, by_hand):
    """Largest difference of each form from the run without, relative to the largest gradient."""
    from slapo_zoo import AutoScheduledModel

    found = []
    for options in (None, *FORMS, "off"):
        model = AutoScheduledModel.from_pretrained(folder, seed=0, **layout).train()
        if options is not None:
            model.gradient_checkpointing_enable({} if options == "off" else options)
            assert model.is_activation_checkpointing
        if options == "off":
            model.gradient_checkpointing_disable()
        found.append(trained(model, batch_of(case), by_hand))
    loss, grads, calls = found[0]
    for other, theirs, _ in found[1:]:
        torch.testing.assert_close(other, loss)
        for name, grad in grads.items():
            torch.testing.assert_close(theirs[name], grad, msg=name)
    return [count / calls for *_, count in found]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "layout", "by_hand"),
    [
        ("gpt2", {"tp": 2}, True), ("bert", {"tp": 2, "sequence_parallel": True}, False),
        ("t5", {"pp": 2}, False), ("opt", {}, False),
    ],
)  # fmt: skip
def test_gradient_checkpointing_enable_leaves_losses_and_gradients_unchanged(
    name, layout, by_hand, threads, tmp_path
):
    case = CASES[name]
    nprocs = max([1, *(v for v in layout.values() if v is not True)])
    found = threads.run(forms, nprocs, checkpoint(case, tmp_path), case, layout, by_hand)
    assert found[0] == [1, 2, 2, 2, 1]


def test_gradient_checkpointing_enable_with_unsupported_arguments_or_models_raises(tmp_path):
    from slapo_zoo import AutoScheduledModel

    gpt2 = AutoScheduledModel.from_pretrained(checkpoint(CASES["gpt2"], tmp_path))
    with pytest.raises(SlapoError, match=r"context_fn"):
        gpt2.gradient_checkpointing_enable({"context_fn": print})
    assert not gpt2.is_activation_checkpointing


@pytest.mark.parametrize("frozen", [True, False])
def test_layer_frozen_or_trained_between_forward_and_backward_is_recomputed_as_it_was(
    tmp_path, frozen
):
    from slapo_zoo import AutoScheduledModel

    case, found = Case("GPT2LMHeadModel", ("tokens",)), []
    for ratio in (0.0, 1.0):
        folder = checkpoint(case, tmp_path)
        model = AutoScheduledModel.from_pretrained(folder, checkpoint_ratio=ratio).train()
        layer = model.transformer.h[0].requires_grad_(frozen)
        loss = model(**batch_of(case)).loss
        layer.requires_grad_(not frozen)
        loss.backward()
        assert all(p.requires_grad is not frozen for p in layer.parameters())
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    torch.testing.assert_close(found[1], found[0])
