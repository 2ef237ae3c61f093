"""Methods that replace ones of transformers which synchronise with the device: bit-equal results."""

from types import SimpleNamespace

import pytest
import torch
from transformers import FalconConfig, GPTNeoConfig, masking_utils
from transformers.models.deberta_v2.modeling_deberta_v2 import DebertaV2Encoder
from transformers.models.falcon.modeling_falcon import FalconAttention
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention

from slapo_zoo.hf.attention import register_attention
from slapo_zoo.hf.no_waits import METHODS, without_waits
from slapo_zoo.parallel.known import Known, knowing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["global", "local"])
def test_gpt_neo_attention_without_host_sync_has_the_gradients_of_transformers(kind, masked, dtype):
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
def test_deberta_relative_positions_without_host_sync_equal_transformers(buckets, most, S, T):
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


@pytest.mark.parametrize(
    "options",
    [{}, {"new_decoder_architecture": True, "num_kv_heads": 2}, {"multi_query": False}],
    ids=str,
)
def test_falcon_head_split_without_host_sync_equals_transformers(options):
    config = FalconConfig(hidden_size=24, num_attention_heads=4, num_hidden_layers=1, **options)
    plain, ours = (FalconAttention(config, layer_idx=0) for _ in range(2))
    without_waits(ours)
    fused = torch.randn(2, 3, plain.query_key_value.out_features)
    wanted, found = plain._split_heads(fused), ours._split_heads(fused)
    assert "_split_heads" in vars(ours)
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


@pytest.mark.parametrize("where", ["class", "module"])
def test_transformers_method_patched_by_the_user_is_not_replaced_by_the_sync_free_version(
    where, monkeypatch
):
    config = GPTNeoConfig(
        hidden_size=8, num_heads=2, num_layers=1, attention_types=[[["global"], 1]]
    )
    module = GPTNeoSelfAttention(config, "global", 0)
    monkeypatch.setattr(
        GPTNeoSelfAttention if where == "class" else module, "_attn", lambda *_: "patched"
    )
    without_waits(module)
    assert module._attn() == "patched"


def test_packed_sequences_declared_in_advance_are_indexed_without_host_sync():
    register_attention()
    one, two = torch.tensor([[3, 4, 5, 6]]), torch.tensor([[0, 1, 0, 1]])
    find = masking_utils.find_packed_sequence_indices
    assert find(one) is None
    for positions in (one, two):
        wanted = find.__wrapped__(positions)
        with knowing(Known(packed=True)):
            assert find(positions).tolist() == (
                [[0, 0, 0, 0]] if wanted is None else wanted.tolist()
            )
    with knowing(Known(packed=False)):
        assert find(one) is None
