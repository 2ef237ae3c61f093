"""Masks of attention kernels: padding masks are handled, with others the model's own attention runs."""

import pytest
import torch
from transformers import GPTNeoConfig, T5Config

from slapo_zoo import AutoScheduledModel
from slapo_zoo.kernels.dropout_mask import hides_only_padding

NEO = GPTNeoConfig(
    hidden_size=16, num_heads=2, num_layers=2, attention_types=[[["global", "local"], 1]], window_size=3,
    vocab_size=31, intermediate_size=32, bos_token_id=1, eos_token_id=2, architectures=["GPTNeoModel"],
)  # fmt: skip
T5 = T5Config(d_model=16, d_kv=8, num_heads=2, d_ff=32, num_layers=2, vocab_size=31, pad_token_id=0,
              decoder_start_token_id=0, architectures=["T5EncoderModel"])  # fmt: skip
IDS = torch.arange(3, 11)[None]
PACKED = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
OWN = PACKED[:, None] == PACKED
CASES = {
    "neo positions": (NEO, {"position_ids": torch.arange(8)[None] % 4, "use_cache": False}),
    "neo mask": (NEO, {"attention_mask": torch.where(OWN.tril(), 0.0, -1e30)[None, None]}),
    "t5 mask": (T5, {"attention_mask": torch.where(OWN, 0.0, -1e30)[None, None]}),
    "neo padded": (NEO, {"attention_mask": torch.tensor([[1] * 7 + [0]])}),
    "t5 padded": (T5, {"attention_mask": torch.tensor([[1] * 7 + [0]])}),
}


@pytest.mark.parametrize("name", CASES)
def test_attention_kernels_keep_packed_sequences_from_attending_to_each_other(name):
    config, inputs = CASES[name]
    kernel = "local_causal_attention" if config is NEO else "t5_attention"
    found = []
    for kernels in (kernel, "reference"):
        model = AutoScheduledModel.from_config(config, seed=0, kernels=kernels).eval()
        with torch.no_grad():
            found.append(model(input_ids=IDS, **inputs)[0][:, :7])
    torch.testing.assert_close(*found)
    if "padded" not in name:
        other = IDS.clone()
        other[:, 0] = 20  # a token of the first sequence
        with torch.no_grad():
            again = model(input_ids=other, **inputs)[0]
        torch.testing.assert_close(again[:, 4:7], found[1][:, 4:])


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_attention_masks_that_hide_only_padding_are_distinguished_from_other_masks(kind):
    def made(seen):
        return seen if kind == torch.bool else torch.where(seen, 0.0, torch.finfo(kind).min)

    keys = torch.tensor([[True] * 5 + [False] * 3])
    padded = keys[:, None, None].expand(1, 1, 8, 8)
    assert hides_only_padding(made(padded), 8, 8, causal=False)
    assert hides_only_padding(made(padded & torch.ones(8, 8).tril().bool()), 8, 8, causal=True)
    assert hides_only_padding(made(keys[:, None, None]), 8, 8, causal=False)
    assert not hides_only_padding(made(padded & torch.ones(8, 8).tril().bool()), 8, 8, causal=False)
    assert not hides_only_padding(made(OWN[None, None]), 8, 8, causal=False)
    assert not hides_only_padding(made(OWN.tril()[None, None]), 8, 8, causal=True)


def test_output_attentions_returns_equal_weights_with_and_without_kernels():
    found = []
    for kernels in ("auto", "reference"):
        model = AutoScheduledModel.from_config(NEO, seed=0, kernels=kernels).eval()
        with torch.no_grad():
            found.append(model(input_ids=IDS, output_attentions=True).attentions)
    assert [w.shape for w in found[0]] == [(1, 2, 8, 8)] * 2
    torch.testing.assert_close(*found)
