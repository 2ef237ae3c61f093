"""Differences between the releases of transformers that pyproject.toml allows; slapo_zoo.hf fences them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, masking_utils
from transformers.integrations import peft as integration
from transformers.models.gpt2 import modeling_gpt2

from slapo_zoo import AutoScheduledModel, Schedule, SlapoError
from slapo_zoo.errors import ScheduleError
from slapo_zoo.hf.attention import CACHES, register_attention
from slapo_zoo.hf.cut_attention import counts_by_place, positions_by_place
from slapo_zoo.hf.models import build_on_meta
from slapo_zoo.kernels import embedding_layer_norm
from slapo_zoo.model.step.generation import refuse_cache
from slapo_zoo.zoo.table import table_for

NEWER = "remap_positions_for_packed_sequence"


def test_attention_is_registered_where_masks_read_positions_only_once(monkeypatch):
    """transformers before 5.23 has no second function that reads the positions of packed rows."""
    monkeypatch.delattr(masking_utils, NEWER, raising=False)
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)
    register_attention()
    assert hasattr(masking_utils.find_packed_sequence_indices, "__wrapped__")
    assert not hasattr(masking_utils, NEWER)


def test_this_release_has_the_functions_that_are_wrapped():
    assert callable(masking_utils.find_packed_sequence_indices)
    assert callable(getattr(masking_utils, NEWER))


class OldPositions(nn.Module):
    def forward(self, tokens, past_key_values_length=0, position_ids=None):
        return past_key_values_length + torch.arange(tokens.shape[1])


class NewPositions(nn.Module):
    """Position embedding as from transformers 5.24 on."""

    def forward(self, tokens, cache_length=0, position_ids=None):
        return cache_length + torch.arange(tokens.shape[1])


@pytest.mark.parametrize(
    ("cls", "name"), [(OldPositions, "past_key_values_length"), (NewPositions, "cache_length")]
)
def test_counted_positions_of_a_cp_rank_start_at_its_first_token_in_every_release(cls, name):
    module, stream = cls(), SimpleNamespace(cut=SimpleNamespace(r=1))
    assert counts_by_place("decoder.embed_positions", module)
    positions_by_place(module, stream)
    tokens = torch.zeros(2, 3)
    assert module(tokens).tolist() == [3, 4, 5]
    assert module(tokens, 1).tolist() == module(tokens, **{name: 1}).tolist() == [4, 5, 6]


@pytest.mark.parametrize("name", CACHES)
def test_pipeline_refuses_a_cache_by_each_name_that_transformers_gives_it(name):
    with pytest.raises(SlapoError, match=f"forward: {name}: pipeline stages keep no KV cache"):
        refuse_cache({name: object()})


def test_attention_that_does_not_call_the_interface_in_a_release_gets_no_core_attention(
    monkeypatch,
):
    """GPT-J calls it from transformers 5.24 on; a `core_attn` that is not called would leave its dropout unsharded."""
    table, cls = replace(table_for("gpt2"), seam=None), GPT2Model
    model = build_on_meta(cls, GPT2Config(n_layer=1), torch.float32, table.seam)
    assert model.config._attn_implementation == "slapo_zoo"
    assert table.rows(model) == table_for("gpt2").rows(model)
    assert table.tries(cls) == table.tunable
    monkeypatch.delattr(modeling_gpt2, "ALL_ATTENTION_FUNCTIONS")
    before = build_on_meta(cls, GPT2Config(n_layer=1), torch.float32, table.seam)
    assert before.config._attn_implementation != "slapo_zoo"
    assert table.tries(cls)["attention"] == ("eager",)
    rows = [(pattern, d.name) for pattern, rule in table.rows(model) for d in rule]
    assert ("h.*.attn", "shard_attribute") in rows
    assert "core_attention" not in {name for _, name in rows}
    with pytest.raises(ScheduleError, match=r"GPT2Attention does not call .* ignore core_attn"):
        Schedule(model)["h.*.attn"].core_attention(12)


def test_kernel_of_bert_embeddings_takes_the_length_of_a_cache_by_both_names():
    config = BertConfig(
        vocab_size=9, hidden_size=8, num_attention_heads=2, max_position_embeddings=16
    )
    module, ids = BertModel(config).embeddings.eval(), torch.arange(6)[None]
    new, old = (
        embedding_layer_norm._forward(module, ids, **{name: 4})
        for name in ("cache_length", "past_key_values_length")
    )
    at = torch.arange(4, 10)[None]
    torch.testing.assert_close(new, module(ids, position_ids=at), rtol=0, atol=1e-6)
    assert torch.equal(new, old)


def test_adapter_is_refused_before_any_change_if_transformers_takes_only_a_newer_peft(monkeypatch):
    config = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9, bos_token_id=1, eos_token_id=1)
    model = AutoScheduledModel.from_config(config, auto_class="GPT2LMHeadModel")
    before = [p.requires_grad for p in model.parameters()]
    monkeypatch.setattr(integration, "MIN_PEFT_VERSION", "99.0")
    with pytest.raises(
        SlapoError, match=r"add_adapter: peft: found .*, expected 99.0 or newer: this"
    ):
        model.add_adapter(LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    assert [p.requires_grad for p in model.parameters()] == before
