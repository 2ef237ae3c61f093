"""Methods that stand in for ones of transformers for which the host waits: bit for bit the same."""

from types import SimpleNamespace

import pytest
import torch
from transformers import GPTNeoConfig
from transformers.models.deberta_v2.modeling_deberta_v2 import DebertaV2Encoder
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention

from slapo_zoo.hf.no_waits import METHODS, without_waits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["global", "local"])
def test_attention_of_gpt_neo(kind, masked, dtype):
    config = GPTNeoConfig(hidden_size=8, num_heads=2, num_layers=1, window_size=3,
                          attention_types=[[[kind], 1]], attention_dropout=0.0)  # fmt: skip
    plain, ours = (GPTNeoSelfAttention(config, kind, 0) for _ in range(2))
    without_waits(ours)
    found = []
    for module in (plain, ours):
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 2, n, 4, dtype=dtype, requires_grad=True) for n in (5, 7, 7))
        hidden = torch.zeros(2, 1, 1, 7).masked_fill(torch.arange(7) > 5, torch.finfo(dtype).min)
        out, weights = module._attn(q, k, v, hidden if masked else None)
        (out.sum() + weights.square().sum()).backward()
        found.append([out, weights, q.grad, k.grad, v.grad])
    assert "_attn" in vars(ours)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("buckets, most", [(256, 512), (4, 64), (-1, 512), (256, -1)])
@pytest.mark.parametrize("S, T", [(600, 600), (7, 7), (3, 9)])
def test_positions_of_deberta(buckets, most, S, T):
    module = SimpleNamespace(
        relative_attention=True, position_buckets=buckets, max_relative_positions=most
    )
    name, method = METHODS["DebertaV2Encoder"]
    args = torch.empty(1, T, 2), torch.empty(1, S, 2)
    wanted, found = getattr(DebertaV2Encoder, name)(module, *args), method(module, *args)
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted)
    given = torch.ones(1, 2, 2)
    assert method(module, *args, given) is given
    module.relative_attention = False
    assert method(module, *args) is None
