"""At tp=4 a rank holds about a quarter of a published model, embeddings and head included."""

import math

import pytest
import torch
import transformers

from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.zoo.outline import Outline

TP = 4
# (class, what the published config says beyond the class's defaults, most that a rank may hold):
# Flan-T5-small's 6 heads are 2, 2, 1, 1 on four ranks: heads are never cut, so two ranks hold a third of
# every attention, and 0.2763 of the model.
PUBLISHED = {
    "gpt2": ("GPT2LMHeadModel", {}, 0.26),
    "bert-base-uncased": ("BertForMaskedLM", {}, 0.26),
    "roberta-base": ("RobertaForMaskedLM", {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}, 0.26),
    "gpt-neo-125m": ("GPTNeoForCausalLM", {"hidden_size": 768, "num_layers": 12, "num_heads": 12, "attention_types": [[["global", "local"], 6]]}, 0.26),
    "opt-125m": ("OPTForCausalLM", {}, 0.26),
    "t5-small": ("T5ForConditionalGeneration", {}, 0.26),
    "flan-t5-small": ("T5ForConditionalGeneration", {"num_heads": 6, "d_ff": 1024, "num_layers": 8, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, 0.28),
    "mt5-small": ("MT5ForConditionalGeneration", {}, 0.26),
    "pythia-160m": ("GPTNeoXForCausalLM", {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072, "vocab_size": 50304}, 0.26),
    "llama-2-7b": ("LlamaForCausalLM", {}, 0.26),
    "mistral-7b": ("MistralForCausalLM", {}, 0.26),
    "mixtral-8x7b": ("MixtralForCausalLM", {}, 0.26),
    "qwen3-0.6b": ("Qwen3ForCausalLM", {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 3072, "tie_word_embeddings": True}, 0.26),
    "mamba-130m": ("MambaForCausalLM", {"num_hidden_layers": 24}, 0.26),
    "albert-base-v2": ("AlbertForMaskedLM", {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}, 0.26),
}  # fmt: skip


def share(name):
    """The largest part of the parameters that a tp rank holds, tied ones counted once."""
    cls, changes, _ = PUBLISHED[name]
    model = getattr(transformers, cls)
    outline = Outline(model.config_class(**changes), model, Mesh(tp=TP), torch.float32)
    parameters = {name for name, _ in outline.skeleton.named_parameters()}
    specs = [spec for spec in outline.specs if spec.name in parameters]
    whole = sum(math.prod(spec.shape) for spec in specs)
    local = [sum(math.prod(spec.local_shape(TP, r)) for spec in specs) for r in range(TP)]
    return max(local) / whole


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_of_four_tp_ranks_holds_close_to_a_quarter_of_the_parameters(name, record_property):
    found = share(name)
    record_property("share", found)
    print(f"{name}: {found:.4f}")
    assert 0.25 <= found <= PUBLISHED[name][2]
