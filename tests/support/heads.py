"""The grid of the zoo: every head class that `transformers` has for each family, as data.

The first case of a family is its main head; `REFUSED` and `ELSEWHERE` say why a class is in no case.
"""

from parity import Case

THREE = (("num_labels", 3),)
TOKENS, TAGS, CLASS, SPAN, CHOICE = ("tokens",), ("tags",), ("class",), ("span",), ("choice",)


def usual(name, *more):
    """Return the four heads that most causal families have."""
    return [
        Case(f"{name}ForCausalLM", TOKENS),
        Case(f"{name}ForSequenceClassification", CLASS, THREE),
        Case(f"{name}ForTokenClassification", TAGS, THREE),
        Case(f"{name}ForQuestionAnswering", SPAN),
        *more,
    ]


def t5_heads(name, *more):
    """Return the heads of an encoder-decoder; its classifier reads one end-of-sequence token per row."""
    return [
        Case(f"{name}ForConditionalGeneration", TOKENS),
        Case(f"{name}ForSequenceClassification", CLASS, THREE, variant=("eos",)),
        Case(f"{name}ForTokenClassification", TAGS, THREE),
        Case(f"{name}ForQuestionAnswering", SPAN),
        *more,
    ]


def bart_heads(name):
    """Return the heads of BART and mBART; a decoder alone compares each token with its own label."""
    return [
        Case(f"{name}ForConditionalGeneration", TOKENS),
        Case(f"{name}ForCausalLM", TOKENS, (("is_decoder", True), ("is_encoder_decoder", False))),
        Case(f"{name}ForSequenceClassification", CLASS, THREE, variant=("eos",)),
        Case(f"{name}ForQuestionAnswering", SPAN),
    ]


def roberta_heads(name):
    """Return the heads of RoBERTa and of families derived from it."""
    return [
        Case(f"{name}ForMaskedLM", TOKENS),
        Case(f"{name}ForCausalLM", TOKENS, (("is_decoder", True),)),
        Case(f"{name}ForSequenceClassification", CLASS, THREE),
        Case(f"{name}ForTokenClassification", TAGS, THREE, variant=("bare",)),
        Case(f"{name}ForQuestionAnswering", SPAN, variant=("twice",)),
        Case(f"{name}ForMultipleChoice", CHOICE, choices=2),
    ]


V2 = (  # as in the first DeBERTa: absolute positions, projections of distances of their own
    ("share_att_key", False), ("position_biased_input", True), ("type_vocab_size", 2), ("position_buckets", -1),
)  # fmt: skip
FALCON_40B = (
    ("new_decoder_architecture", True),
    ("num_kv_heads", 5),
    ("num_attention_heads", 10),
    ("hidden_size", 40),
)
FALCON_RW = (("alibi", True), ("multi_query", False), ("parallel_attn", False), ("bias", True))
HEADS = {
    "gpt2": [
        Case("GPT2LMHeadModel", TOKENS),
        Case("GPT2LMHeadModel", TOKENS, variant=("types", "twice")),
        Case("GPT2LMHeadModel", TOKENS, (("add_cross_attention", True),)),
        Case("GPT2DoubleHeadsModel", ("tokens", "mc"), (("num_labels", 1),), choices=2),
        Case("GPT2ForSequenceClassification", CLASS, THREE),
        Case("GPT2ForTokenClassification", TAGS, THREE),
        Case("GPT2ForQuestionAnswering", SPAN),
    ],
    "bert": [
        Case("BertForMaskedLM", TOKENS),
        Case("BertForPreTraining", ("tokens", "next"), variant=("types",)),
        Case("BertLMHeadModel", TOKENS, (("is_decoder", True),)),
        Case("BertLMHeadModel", TOKENS, (("is_decoder", True), ("add_cross_attention", True))),
        Case("BertForNextSentencePrediction", ("two",), variant=("types",)),
        Case("BertForSequenceClassification", CLASS, THREE, variant=("bare", "twice")),
        Case("BertForSequenceClassification", ("number",), (("num_labels", 1),)),
        Case("BertForSequenceClassification", ("multi",), (*THREE, ("problem_type", "multi_label_classification"))),
        Case("BertForTokenClassification", TAGS, THREE),
        Case("BertForQuestionAnswering", SPAN, variant=("types",)),
        Case("BertForMultipleChoice", CHOICE, choices=2),
    ],
    "roberta": roberta_heads("Roberta"),
    "xlm-roberta": roberta_heads("XLMRoberta"),
    "camembert": roberta_heads("Camembert"),
    "albert": [
        Case("AlbertForMaskedLM", TOKENS),
        Case("AlbertForMaskedLM", TOKENS, (("num_hidden_groups", 2), ("inner_group_num", 2)), variant=("bare",)),
        Case("AlbertForPreTraining", ("tokens", "order"), variant=("types",)),
        Case("AlbertForSequenceClassification", CLASS, THREE, variant=("twice",)),
        Case("AlbertForTokenClassification", TAGS, THREE),
        Case("AlbertForQuestionAnswering", SPAN, variant=("bare",)),
        Case("AlbertForMultipleChoice", CHOICE, choices=2),
    ],
    "gpt_neo": usual("GPTNeo", Case("GPTNeoForCausalLM", TOKENS, (("window_size", 3),), variant=("bare", "twice"))),
    "bart": bart_heads("Bart"),
    "mbart": bart_heads("MBart"),
    "m2m_100": [Case("M2M100ForConditionalGeneration", TOKENS)],
    "opt": [
        Case("OPTForCausalLM", TOKENS),
        Case("OPTForCausalLM", TOKENS, (("word_embed_proj_dim", 14), ("do_layer_norm_before", False)), variant=("bare",)),
        Case("OPTForSequenceClassification", CLASS, THREE, variant=("twice",)),
        Case("OPTForQuestionAnswering", SPAN),
    ],
    "t5": t5_heads(
        "T5",
        Case("T5ForConditionalGeneration", TOKENS, (("feed_forward_proj", "gated-gelu"), ("tie_word_embeddings", False))),
        Case("T5ForConditionalGeneration", TOKENS, variant=("decoder", "twice")),
        Case("T5ForConditionalGeneration", TOKENS, variant=("bare",)),
    ),
    "mt5": t5_heads("MT5"),
    "umt5": t5_heads("UMT5"),
    "llama": usual(
        "Llama", Case("LlamaForCausalLM", TOKENS, (("tie_word_embeddings", True),), variant=("bare", "twice"))
    ),
    "mistral": usual("Mistral", Case("MistralForCausalLM", TOKENS, variant=("bare", "twice"))),
    "qwen3": usual(
        "Qwen3", Case("Qwen3ForCausalLM", TOKENS, (("tie_word_embeddings", True),), variant=("bare", "twice"))
    ),
    "qwen2": usual(
        "Qwen2", Case("Qwen2ForCausalLM", TOKENS, (("tie_word_embeddings", True),), variant=("bare", "twice"))
    ),
    "gemma": usual("Gemma")[:3],
    "gemma2": usual("Gemma2")[:3],
    "modernbert": [
        Case("ModernBertForMaskedLM", TOKENS),
        Case("ModernBertForMaskedLM", TOKENS, (("norm_bias", True), ("attention_bias", True), ("mlp_bias", True)), variant=("bare", "twice")),
        Case("ModernBertForSequenceClassification", CLASS, (*THREE, ("classifier_pooling", "mean"))),
        Case("ModernBertForTokenClassification", TAGS, THREE),
        Case("ModernBertForQuestionAnswering", SPAN),
        Case("ModernBertForMultipleChoice", CHOICE, choices=2),
    ],
    "gemma3_text": [Case("Gemma3ForCausalLM", TOKENS), Case("Gemma3TextForSequenceClassification", CLASS, THREE)],
    "olmo2": [*usual("Olmo2")[:2], Case("Olmo2ForCausalLM", TOKENS, (("attention_bias", True), ("tie_word_embeddings", True)), variant=("bare", "twice"))],
    "olmo3": usual("Olmo3")[:2],
    "phi3": [*usual("Phi3")[:3], Case("Phi3ForCausalLM", TOKENS, (("tie_word_embeddings", True), ("sliding_window", 5)), variant=("bare", "twice"))],
    "distilbert": [
        Case("DistilBertForMaskedLM", TOKENS),
        Case("DistilBertForSequenceClassification", CLASS, THREE, variant=("bare", "twice")),
        Case("DistilBertForTokenClassification", TAGS, THREE),
        Case("DistilBertForQuestionAnswering", SPAN),
        Case("DistilBertForMultipleChoice", CHOICE, choices=2),
    ],
    "electra": [
        Case("ElectraForMaskedLM", TOKENS),
        Case("ElectraForCausalLM", TOKENS, (("is_decoder", True),)),
        Case("ElectraForPreTraining", ("replaced",)),
        Case("ElectraForSequenceClassification", CLASS, THREE, variant=("twice",)),
        Case("ElectraForTokenClassification", TAGS, THREE),
        Case("ElectraForQuestionAnswering", SPAN, variant=("types",)),
        Case("ElectraForMultipleChoice", CHOICE, choices=2),
    ],
    "deberta-v2": [
        Case("DebertaV2ForMaskedLM", TOKENS),
        Case("DebertaV2ForMaskedLM", TOKENS, V2, variant=("bare", "twice")),
        Case("DebertaV2ForSequenceClassification", CLASS, THREE),
        Case("DebertaV2ForTokenClassification", TAGS, THREE),
        Case("DebertaV2ForQuestionAnswering", SPAN),
        Case("DebertaV2ForMultipleChoice", CHOICE, choices=3),
    ],
    "esm": [
        Case("EsmForMaskedLM", TOKENS),
        Case("EsmForMaskedLM", TOKENS, (("position_embedding_type", "absolute"), ("emb_layer_norm_before", True)), variant=("bare", "twice")),
        Case("EsmForSequenceClassification", CLASS, THREE),
        Case("EsmForTokenClassification", TAGS, THREE),
    ],
    "gptj": [
        Case("GPTJForCausalLM", TOKENS, variant=("bare", "twice")),
        Case("GPTJForSequenceClassification", CLASS, THREE),
        Case("GPTJForQuestionAnswering", SPAN),
    ],
    "mixtral": usual(
        "Mixtral",
        Case("MixtralForCausalLM", TOKENS, (("tie_word_embeddings", True), ("sliding_window", 5)), variant=("bare", "twice")),
    ),
    "gpt_neox": usual(
        "GPTNeoX",
        Case("GPTNeoXForCausalLM", TOKENS, (("use_parallel_residual", False), ("attention_bias", False)), variant=("bare", "twice")),
    ),
    "bloom": usual(
        "Bloom",
        Case("BloomForCausalLM", TOKENS, (("apply_residual_connection_post_layernorm", True),), variant=("bare", "twice")),
    ),
    "falcon": usual(
        "Falcon",
        Case("FalconForCausalLM", TOKENS, FALCON_40B, variant=("bare", "twice")),
        Case("FalconForCausalLM", TOKENS, (*FALCON_40B, ("num_ln_in_parallel_attn", 1), ("bias", True))),
        Case("FalconForCausalLM", TOKENS, FALCON_RW),
        Case("FalconForCausalLM", TOKENS, (("alibi", True), ("bias", True), ("tie_word_embeddings", False))),
    ),
    "mamba": [
        Case("MambaForCausalLM", TOKENS),
        Case("MambaForCausalLM", TOKENS, (("use_bias", True), ("tie_word_embeddings", False)), variant=("bare", "twice")),
    ],
    "whisper": [
        Case("WhisperForConditionalGeneration", TOKENS),
        Case("WhisperForConditionalGeneration", TOKENS, variant=("decoder", "twice")),
        Case("WhisperForCausalLM", TOKENS, (("is_decoder", True), ("is_encoder_decoder", False))),
        Case("WhisperForAudioClassification", CLASS, THREE),
        Case("WhisperForAudioClassification", CLASS, (*THREE, ("use_weighted_layer_sum", True))),
    ],
    "clip": [
        Case("CLIPModel", ("pairs",)),
        Case("CLIPForImageClassification", CLASS, THREE, variant=("twice",)),
    ],
    "swin": [
        Case("SwinForImageClassification", CLASS, THREE),
        Case("SwinForImageClassification", CLASS, (*THREE, ("use_absolute_embeddings", True), ("qkv_bias", False)), variant=("twice",)),
        Case("SwinForMaskedImageModeling", ("windows",)),
    ],
    "vit": [
        Case("ViTForImageClassification", CLASS, THREE),
        Case("ViTForImageClassification", CLASS, THREE, variant=("twice",)),
        Case("ViTForMaskedImageModeling", ("patches",), (("encoder_stride", 4),)),
    ],
}  # fmt: skip
# Classes without a head: nothing to train, their outputs are compared on every layout.
HEADLESS = [
    Case(name, (), variant=("decoder",) if name == "M2M100Model" else ())
    for name in (
        "GPT2Model", "BertModel", "RobertaModel", "XLMRobertaModel", "CamembertModel", "AlbertModel", "GPTNeoModel", "OPTModel", "BartModel", "MBartModel", "M2M100Model", "T5Model",
        "T5EncoderModel", "MT5Model", "MT5EncoderModel", "UMT5Model", "UMT5EncoderModel", "LlamaModel",
        "MistralModel", "Qwen3Model", "Qwen2Model", "GemmaModel", "Gemma2Model", "Gemma3TextModel", "ModernBertModel", "Olmo2Model", "Olmo3Model", "Phi3Model", "DistilBertModel", "ElectraModel", "EsmModel", "DebertaV2Model", "GPTJModel",
         "MixtralModel", "GPTNeoXModel", "BloomModel", "FalconModel", "MambaModel", "ViTModel", "SwinModel", "WhisperModel",
    )
]  # fmt: skip
ELSEWHERE = {
    "JevForDecision": "of a family of its own, which borrows the config",
    "WideResNetForImageClassification": "tests/zoo/test_wideresnet.py: BatchNorm counts rows of its own",
    "SwinBackbone": "feature maps for the heads of other models: no loss of its own",
    "WideResNetModel": "tests/zoo/test_wideresnet.py",
}
# class, or option of the config --> layout dimension that it cannot have --> the words of its refusal
REFUSED = {
    "ViTForMaskedImageModeling": {"dp": "no mean over", "micro": "no mean over"},
    "SwinForImageClassification": {"sp": "no rule that shards tokens"},
    "SwinForMaskedImageModeling": {
        "dp": "no mean over",
        "micro": "no mean over",
        "sp": "no rule that shards tokens",
    },
    "SwinModel": {"sp": "no rule that shards tokens"},
    "use_weighted_layer_sum": {
        "pp": "expected False with pp=2",
        "sp": "expected False with sequence_parallel",
    },
    "CLIPModel": {"dp": "no mean over rows", "micro": "no mean over rows"},
}
# Heads that no power of two divides, at the sizes of published models.
UNEVEN = [
    (Case("BertForMaskedLM", TOKENS, (("num_attention_heads", 12), ("hidden_size", 48))), (8, 1, 1)),
    (Case("BertForMaskedLM", TOKENS, (("num_attention_heads", 12), ("hidden_size", 48))), (5, 1, 1)),
    (Case("T5ForConditionalGeneration", TOKENS, (("num_heads", 8), ("d_kv", 4))), (3, 1, 1)),
    (Case("T5ForConditionalGeneration", TOKENS, (("num_heads", 8), ("d_kv", 4))), (8, 1, 1)),
    (Case("GPT2LMHeadModel", TOKENS, (("n_head", 12), ("n_embd", 48))), (8, 1, 1)),
    (Case("DebertaV2ForMaskedLM", TOKENS, (*V2, ("conv_kernel_size", 3))), (2, 2, 1)),
]  # fmt: skip
