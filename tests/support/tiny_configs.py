"""A tiny config of every family: odd sizes, which no layout divides evenly."""

BERT = {
    "hidden_size": 30, "num_attention_heads": 5, "num_hidden_layers": 3, "vocab_size": 99,
    "intermediate_size": 70, "max_position_embeddings": 20, "pad_token_id": 0,
}  # fmt: skip
LLAMA = {  # 8 query heads over 2 KV heads: with tp=4 neighbours hold the same KV head
    "hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4,
    "num_hidden_layers": 3, "vocab_size": 99, "intermediate_size": 70, "pad_token_id": 0,
    "max_position_embeddings": 20, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
T5 = {
    "d_model": 30, "d_kv": 6, "num_heads": 5, "d_ff": 70, "num_layers": 2, "vocab_size": 99,
    "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
    "relative_attention_num_buckets": 8,
}  # fmt: skip
BART = {
    "d_model": 30, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 5,
    "decoder_attention_heads": 6, "encoder_ffn_dim": 70, "decoder_ffn_dim": 46, "vocab_size": 99,
    "max_position_embeddings": 20, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1,
    "decoder_start_token_id": 1, "forced_eos_token_id": 1, "init_std": 0.2,
}  # fmt: skip
TINY = {
    "gpt2": {
        "n_embd": 30, "n_head": 5, "n_layer": 3, "n_positions": 16, "vocab_size": 99,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "loss_type": "ForCausalLMLoss",
    },
    "bert": BERT,
    "roberta": {**BERT, "bos_token_id": 1, "eos_token_id": 2},
    "xlm-roberta": {**BERT, "bos_token_id": 1, "eos_token_id": 2},
    "camembert": {**BERT, "bos_token_id": 1, "eos_token_id": 2},
    "albert": {**BERT, "embedding_size": 14, "num_hidden_layers": 4, "bos_token_id": 1, "eos_token_id": 2},
    "gpt_neo": {
        # A window that holds padding alone has no defined result: of 12 tokens at least 4 are real.
        "hidden_size": 30, "num_heads": 5, "num_layers": 4, "window_size": 9, "vocab_size": 99,
        "attention_types": [[["global", "local"], 2]], "max_position_embeddings": 16,
        "intermediate_size": 70, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    },
    "opt": {
        "hidden_size": 30, "num_attention_heads": 5, "num_hidden_layers": 3, "vocab_size": 99,
        "ffn_dim": 70, "max_position_embeddings": 16, "word_embed_proj_dim": 30, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2,
    },
    "bart": BART,
    "mbart": BART,
    "m2m_100": {**BART, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
    "t5": T5,
    "mt5": T5,
    "umt5": T5,
    "llama": LLAMA,
    "mistral": {**LLAMA, "sliding_window": 5},
    "mixtral": {**LLAMA, "num_local_experts": 5, "intermediate_size": 28},  # with tp=4: 2, 1, 1, 1
    "gpt_neox": {
        "hidden_size": 40, "num_attention_heads": 5, "num_hidden_layers": 3, "vocab_size": 99,
        "intermediate_size": 70, "max_position_embeddings": 20, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 0, "rotary_pct": 0.5,
    },
    "bloom": {"hidden_size": 30, "n_head": 5, "n_layer": 3, "vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "falcon": {  # one KV head, as the 7B has
        "hidden_size": 30, "num_attention_heads": 5, "num_hidden_layers": 3, "vocab_size": 99, "ffn_hidden_size": 70,
        "max_position_embeddings": 20, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    },
    "mamba": {
        "hidden_size": 31, "num_hidden_layers": 3, "vocab_size": 99, "state_size": 4, "expand": 2,
        "time_step_rank": 3, "residual_in_fp32": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    },
    "qwen3": LLAMA,
    "qwen2": {k: v for k, v in LLAMA.items() if k != "head_dim"},
    "gemma": LLAMA,
    "gemma2": {**LLAMA, "query_pre_attn_scalar": 4, "sliding_window": 9},
    "modernbert": {
        "hidden_size": 40, "num_attention_heads": 5, "num_hidden_layers": 4, "vocab_size": 99, "intermediate_size": 70,
        "max_position_embeddings": 20, "local_attention": 6, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "cls_token_id": 1, "sep_token_id": 2,
    },
    "gemma3_text": {**LLAMA, "num_hidden_layers": 6, "query_pre_attn_scalar": 4, "sliding_window": 5},  # the sixth looks back all the way
    "olmo2": LLAMA,
    "olmo3": {**LLAMA, "num_hidden_layers": 4, "sliding_window": 5},  # the fourth looks back all the way
    "phi3": {**LLAMA, "head_dim": 6, "hidden_size": 40, "num_attention_heads": 10, "num_key_value_heads": 5, "original_max_position_embeddings": 20},
    "distilbert": {
        "dim": 30, "n_heads": 5, "n_layers": 3, "hidden_dim": 70, "vocab_size": 99,
        "max_position_embeddings": 20, "pad_token_id": 0,
    },
    "electra": {**BERT, "embedding_size": 14},
    "deberta-v2": {
        **BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "share_att_key": True, "norm_rel_ebd": "layer_norm",
        "position_buckets": 4, "max_relative_positions": 16, "position_biased_input": False, "type_vocab_size": 0, "pooler_hidden_size": 30,
    },
    "esm": {**BERT, "mask_token_id": 32, "token_dropout": True, "position_embedding_type": "rotary"},
    "gptj": {
        "n_embd": 40, "n_head": 5, "n_layer": 3, "n_positions": 16, "rotary_dim": 4, "vocab_size": 99,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    },
    "whisper": {
        **BART, "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 20, "classifier_proj_size": 14,
        "forced_eos_token_id": None, "begin_suppress_tokens": None,
    },
    "swin": {  # 6 x 6 patches in shifted windows, then 3 x 3 in one
        "image_size": 12, "patch_size": 2, "window_size": 3, "embed_dim": 20, "depths": [2, 1], "num_heads": [5, 10], "mlp_ratio": 1.9,
        "encoder_stride": 4,
    },
    "clip": {
        "text_config": {
            "hidden_size": 30, "num_attention_heads": 5, "num_hidden_layers": 2, "intermediate_size": 70, "vocab_size": 99,
            "max_position_embeddings": 20, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
        },
        "vision_config": {
            "hidden_size": 36, "num_attention_heads": 6, "num_hidden_layers": 2, "intermediate_size": 46, "image_size": 12, "patch_size": 4,
        },
        "projection_dim": 14,
    },
    "wideresnet": {
        "depths": (1, 2, 1), "stem_channels": 8, "width_per_group": 96, "num_labels": 3,
        "small_images": True,
    },
    "vit": {
        "hidden_size": 30, "num_attention_heads": 5, "num_hidden_layers": 3, "intermediate_size": 70,
        "image_size": 12, "patch_size": 4,
    },
}  # fmt: skip
