"""Packed sequences marked by position ids alone: none attends to another, in any form of the ids."""

import pytest
import torch
import transformers

from slapo_zoo import AutoScheduledModel
from slapo_zoo.model.step import forward

IDS = torch.arange(48).reshape(4, 12) * 7 % 60 + 3
TWO = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
SMALL = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA = transformers.LlamaConfig(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, **SMALL
)
WHISPER = transformers.WhisperConfig(
    d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=20, max_target_positions=32, num_mel_bins=8,
    decoder_start_token_id=3, dropout=0.0, **SMALL,
)  # fmt: skip


@pytest.mark.parametrize(
    ("cls", "config", "name", "rows"),
    [("LlamaForCausalLM", LLAMA, "position_ids", 4), ("LlamaForCausalLM", LLAMA, "position_ids", 1),
     ("WhisperForConditionalGeneration", WHISPER, "decoder_position_ids", 4)],
)  # fmt: skip
def test_packed_position_ids_separate_sequences_as_in_plain_transformers(
    cls, config, name, rows, tmp_path
):
    torch.manual_seed(0)
    cls = getattr(transformers, cls)
    cls(config).save_pretrained(tmp_path)
    batch = {"labels": IDS, "input_ids": IDS, name: TWO.expand(rows, -1).contiguous()}
    if cls.main_input_name == "input_features":
        del batch["input_ids"]
        batch["input_features"] = torch.randn(4, 8, 40)
    plain = cls.from_pretrained(tmp_path).train()
    expected = plain(**batch, use_cache=False).loss.item()
    alone = {k: v for k, v in batch.items() if k != name}
    assert abs(plain(**alone, use_cache=False).loss.item() - expected) > 1e-4
    model = AutoScheduledModel.from_pretrained(tmp_path, auto_class=cls).train()
    assert model.train_step(batch).item() == pytest.approx(expected, rel=1e-6)
    forward._TOLD.clear()
    with pytest.warns(UserWarning, match="each sees its own tokens"):
        found = model(**batch).loss.item()
    assert found == pytest.approx(expected, rel=1e-6)
    assert model.eval()(**batch).loss.item() == pytest.approx(expected, rel=1e-6)
    with_cache = plain.eval()(**batch, use_cache=True).loss.item()
    assert model(**batch, use_cache=True).loss.item() == pytest.approx(with_cache, rel=1e-6)
