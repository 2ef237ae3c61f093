"""Sizes in which the families are planned for their cards: a published checkpoint, as fields of its config.

A family that is not listed is planned in the default size of its config class.
"""

from typing import Any

WIDE = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
T5_XL = {
    "d_model": 2048,
    "d_kv": 64,
    "d_ff": 5120,
    "num_layers": 24,
    "num_decoder_layers": 24,
    "num_heads": 32,
}
LENGTH = 512  # tokens of a row where the config names no positions
# family --> (checkpoint, fields that differ from the config's own)
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "albert": ("albert-xxlarge-v2", {}),
    "bart": ("bart-large", {}),
    "bert": ("bert-large-uncased", WIDE),
    "bloom": ("bloom-7b1", {"hidden_size": 4096, "n_layer": 30, "n_head": 32}),
    "camembert": ("camembert-large", WIDE),
    "clip": ("clip-vit-base-patch32", {}),
    "deberta-v2": ("deberta-v2-xxlarge", {"num_hidden_layers": 48}),
    "distilbert": ("distilbert-base-uncased", {}),
    "electra": ("electra-large-discriminator", {**WIDE, "embedding_size": 1024}),
    "esm": ("esm2_t36_3B_UR50D", {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 40,
            "intermediate_size": 10240}),
    "gemma": ("gemma-7b", {}),
    "gemma2": ("gemma-2-9b", {"hidden_size": 3584, "num_hidden_layers": 42, "num_attention_heads": 16,
               "num_key_value_heads": 8, "intermediate_size": 14336}),
    "gemma3_text": ("gemma-3-4b", {"hidden_size": 2560, "num_hidden_layers": 34, "intermediate_size": 10240}),
    "gpt2": ("gpt2-xl", {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
    "gpt_neo": ("gpt-neo-2.7B", {"hidden_size": 2560, "num_layers": 32, "num_heads": 20,
                "attention_types": [[["global", "local"], 16]]}),
    "gpt_neox": ("gpt-neox-20b", {}),
    "gptj": ("gpt-j-6b", {}),
    "llama": ("Llama-3.1-8B", {"vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8}),
    "m2m_100": ("nllb-200-3.3B", {"vocab_size": 256206, "d_model": 2048, "encoder_layers": 24,
                "decoder_layers": 24, "encoder_ffn_dim": 8192, "decoder_ffn_dim": 8192,
                "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}),
    "mamba": ("mamba-2.8b", {"hidden_size": 2560, "num_hidden_layers": 64}),
    "mbart": ("mbart-large-50", {"vocab_size": 250054}),
    "mistral": ("Mistral-7B", {}),
    "mixtral": ("Mixtral-8x7B", {}),
    "modernbert": ("ModernBERT-large", {"hidden_size": 1024, "num_hidden_layers": 28,
                   "num_attention_heads": 16, "intermediate_size": 2624}),
    "mt5": ("mt5-xl", T5_XL),
    "olmo2": ("OLMo-2-7B", {"vocab_size": 100352}),
    "olmo3": ("Olmo-3-7B", {"vocab_size": 100278}),
    "opt": ("opt-6.7b", {"hidden_size": 4096, "word_embed_proj_dim": 4096, "num_hidden_layers": 32,
            "num_attention_heads": 32, "ffn_dim": 16384}),
    "phi3": ("Phi-3-mini", {}),
    "qwen2": ("Qwen2.5-7B", {"vocab_size": 152064, "hidden_size": 3584, "num_hidden_layers": 28,
              "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944}),
    "qwen3": ("Qwen3-8B", {"num_hidden_layers": 36, "num_key_value_heads": 8, "intermediate_size": 12288}),
    "roberta": ("roberta-large", WIDE),
    "swin": ("swin-base-patch4-window7-224", {"embed_dim": 128, "depths": [2, 2, 18, 2], "num_heads": [4, 8, 16, 32]}),
    "t5": ("t5-3b", {"d_model": 1024, "d_kv": 128, "d_ff": 16384, "num_layers": 24, "num_decoder_layers": 24,
           "num_heads": 32}),
    "umt5": ("umt5-xl", T5_XL),
    "vit": ("vit-huge-patch14-224", {"hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 16,
            "intermediate_size": 5120, "patch_size": 14}),
    "whisper": ("whisper-large-v2", {"d_model": 1280, "encoder_layers": 32, "decoder_layers": 32,
                "encoder_attention_heads": 20, "decoder_attention_heads": 20,
                "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120}),
    "wideresnet": ("wide_resnet50_2", {}),
    "xlm-roberta": ("xlm-roberta-large", {**WIDE, "vocab_size": 250002}),
}  # fmt: skip
# devices --> (profile of the planner, how many, precision)
CLUSTERS = (("a100", 8, "bf16"), ("h100", 8, "bf16"), ("h100", 64, "bf16"), ("v100", 8, "fp16"))
ROWS, MOST_TOKENS = 256, 2048  # rows of a step; most tokens of a row
ROOM = 0.95  # share of a device's memory that is planned: a real one has a little less than its data sheet says
