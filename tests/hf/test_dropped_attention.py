"""Blockwise attention with dropout: values and gradients of the explicit form, in less memory."""

import pytest
import torch

from kernel_checks import recorded_operators
from slapo_zoo.hf.attention import CoreAttention
from slapo_zoo.kernels import blocked_attention, device_dropout
from slapo_zoo.parallel.rng.layout_independent_random import RandomStream
from slapo_zoo.parallel.token_cut import WAYS, TokenCut


class Attention(torch.nn.Module):
    is_causal = True


def run(q, k, v, mask, p=0.3):
    stream = RandomStream(7, step=2, first_row=1, num_rows=3)
    core = CoreAttention(stream, "a", range(2, 6), device=device_dropout.DEVICE_DROPOUT).train()
    out, _ = core(q, k, v, mask, attention=Attention(), dropout=p)
    scale = torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view(out.shape)
    return out, torch.autograd.grad((out * scale).sum(), (q, k, v))


def masks():
    padded = torch.ones(3, 1, 9, 13, dtype=torch.bool)
    padded[0, :, :, 10:] = False
    lowest = torch.zeros(3, 1, 1, 13, dtype=torch.float64)
    lowest[1, :, :, :4] = torch.finfo(torch.float64).min
    return {"causal": None, "padded": padded, "additive": lowest}


@pytest.mark.parametrize("block", [1, 200, 1 << 19])
@pytest.mark.parametrize("kind", masks())
def test_blockwise_attention_with_dropout_has_the_gradients_of_unblocked_attention(
    kind, block, monkeypatch
):
    q, *kv = (torch.randn(3, n, s, 8, dtype=torch.float64, requires_grad=True)
              for n, s in ((4, 9), (2, 13), (2, 13)))  # fmt: skip
    want, want_grads = run(q, *kv, masks()[kind])
    monkeypatch.setattr(device_dropout, "SMALL", 0)
    monkeypatch.setattr(blocked_attention, "SCORES", block)
    calls = []
    with recorded_operators(calls):
        found, grads = run(q, *kv, masks()[kind])
    assert [call[0]._schema.name.split("::")[1] for call in calls] == [
        "attention",
        "attention_backward",
    ]
    torch.testing.assert_close(found, want)
    for grad, want_grad in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(grad, want_grad)
    assert not torch.equal(found, run(q, *kv, masks()[kind], p=0.1)[0])


@pytest.mark.parametrize("way", WAYS)
def test_masks_of_attention_weights_drawn_again_are_the_masks_of_the_forward_for_every_way_of_cp(
    way,
):
    """Under "ulysses" a rank has all queries of some heads, otherwise some queries of all heads."""
    x, heads = torch.ones(2, 4, 6, 6), range(2, 6)
    of_all, first, again = (RandomStream(7, num_rows=2) for _ in range(3))
    first.cut = again.cut = TokenCut(2, 1, None, way)
    mine = (slice(None), slice(2, 4)) if way == "ulysses" else (slice(None),) * 2 + (slice(3, 6),)
    want = of_all.keep_queries(x, 0.5, "a", heads)[mine]
    torch.testing.assert_close(first.keep_queries(x[mine], 0.5, "a", heads), want)
    torch.testing.assert_close(again.queries_again(x[mine], 0.5, "a", heads)() / 0.5, want)
