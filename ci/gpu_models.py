"""Models and batches of `gpu-day`, of published sizes or tiny."""

from typing import Any

import torch

FAMILIES: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {"n_embd": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50257, "n_positions": 1024},
    "BertForMaskedLM": {"hidden_size": 768, "num_hidden_layers": 12, "vocab_size": 30522},
    "LlamaForCausalLM": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 12,
                         "num_attention_heads": 32, "num_key_value_heads": 4},
    "T5ForConditionalGeneration": {"d_model": 768, "d_kv": 64, "num_heads": 12, "d_ff": 2048, "num_layers": 12,
                                   "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0},
    "GPTNeoForCausalLM": {"hidden_size": 768, "num_heads": 12, "num_layers": 12, "vocab_size": 50257,
                          "attention_types": [[["global", "local"], 6]]},
    "OPTForCausalLM": {"hidden_size": 768, "ffn_dim": 3072, "word_embed_proj_dim": 768, "num_hidden_layers": 12},
    "RobertaForMaskedLM": {"hidden_size": 768, "num_hidden_layers": 12},
    "AlbertForMaskedLM": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
                          "intermediate_size": 3072},
    "GPTNeoXForCausalLM": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
                           "intermediate_size": 3072},
}  # fmt: skip
# Tiny sizes, under every name that a config may have for them.
TINY = {
    "n_embd": 32, "hidden_size": 32, "d_model": 32, "word_embed_proj_dim": 32, "n_head": 4, "num_heads": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "d_kv": 8, "n_layer": 2, "num_hidden_layers": 2,
    "num_layers": 2, "d_ff": 64, "ffn_dim": 64, "intermediate_size": 64, "vocab_size": 101,
    "attention_types": [[["global", "local"], 1]], "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def device() -> str:
    """Return the device on which a case runs."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def config_of(family: str, tiny: bool, dropout: str = "0") -> Any:
    """Return the config of a family (name of a model class); dropout "0" turns all dropout off."""
    import transformers

    cls: Any = getattr(transformers, family).config_class
    names = set(cls().to_dict()) | set(FAMILIES[family]) | set(getattr(cls, "attribute_map", {}))
    sizes = {k: v for k, v in TINY.items() if k in names} if tiny else {}
    sizes = {**FAMILIES[family], **sizes} if tiny else FAMILIES[family]
    off = {k: 0.0 for k in cls().to_dict() if ("dropout" in k or "pdrop" in k) and dropout == "0"}
    return cls(**{**off, **sizes}, architectures=[family])


def batch_of(config: Any, rows: int, tokens: int, padded: bool = False) -> dict[str, Any]:
    """Return random tokens and labels on the device; `padded` rows have from a quarter to all of the tokens."""
    ids = torch.randint(3, config.vocab_size, (rows, tokens), device=device())
    batch = {"input_ids": ids, "labels": ids.clone()}
    if padded:
        lengths = torch.linspace(tokens // 4, tokens, rows, device=device()).long()
        mask = torch.arange(tokens, device=device()) < lengths[:, None]
        batch |= {"attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}
    return batch
