"""Operations of models on sharded logits between the head and the loss."""

import pytest
import torch
from torch.nn import functional

from sharded_logits import wrapped
from slapo_zoo.kernels.loss.vocab_logits import VocabLogits

HEADS = {  # operation on the logits before the loss, True where they stay sharded
    "scale": (lambda x: x * 0.25, True),
    "cap": (lambda x: torch.tanh(x / 3.0) * 3.0, True),
    "bias": (lambda x: x + torch.linspace(-1, 1, x.shape[-1])[None], True),
    "learned scale": (lambda x: x * torch.ones((), requires_grad=True), False),
    "learned bias": (lambda x: x + torch.ones(x.shape[-1], requires_grad=True), False),
}


def losses_of_heads(full, targets):
    found = {}
    for name, (change, _) in HEADS.items():
        local, logits = wrapped(full.clone())
        changed = change(logits)
        loss = functional.cross_entropy(changed.view(-1, full.shape[-1]), targets)
        loss.backward()
        found[name] = loss.detach(), local.grad, isinstance(changed, VocabLogits)
    return found


@pytest.mark.parametrize("n", [2, 4])
def test_sharded_logits_stay_sharded_when_scaled_or_capped_and_are_gathered_by_other_operations(
    n, ranks
):
    """An operation with a learned parameter needs the gradient of every column, so the logits are gathered."""
    full, targets = torch.randn(6, 11), torch.arange(6)
    for r, found in enumerate(ranks.run(losses_of_heads, n, full, targets)):
        for name, (change, stays) in HEADS.items():
            logits = full.clone().requires_grad_()
            want = functional.cross_entropy(change(logits), targets)
            want.backward()
            loss, local, apart = found[name]
            assert apart is stays, name
            torch.testing.assert_close(loss, want.detach(), rtol=1e-6, atol=1e-6, msg=name)
            share = -(-11 // n)
            part = logits.grad[:, r * share : (r + 1) * share]
            width = part.shape[-1]
            torch.testing.assert_close(local[:, :width], part, rtol=1e-5, atol=1e-7, msg=name)
            assert local[:, width:].eq(0).all(), name
