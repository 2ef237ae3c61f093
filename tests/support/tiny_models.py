"""Tiny models of the families that the zoo serves, for tests of graphs and primitives."""

from functools import cache

import torch
import transformers

BASE = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 99,
        "intermediate_size": 48, "max_position_embeddings": 32, "pad_token_id": 0}  # fmt: skip
LLAMA = {**BASE, "num_key_value_heads": 2}
GPT2 = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 32, "vocab_size": 99,
        "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
NEO = {"hidden_size": 32, "num_heads": 4, "num_layers": 2, "vocab_size": 99, "window_size": 4,
       "max_position_embeddings": 32, "attention_types": [[["global", "local"], 1]],
       "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
OPT = {**BASE, "ffn_dim": 48, "word_embed_proj_dim": 32}
T5 = {"d_model": 32, "num_heads": 4, "d_kv": 8, "d_ff": 48, "num_layers": 2, "vocab_size": 99,
      "decoder_start_token_id": 0}  # fmt: skip
VIT = {**BASE, "image_size": 16, "patch_size": 4}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic"}
MOE = {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}

# family: (class, config, path of an attention module, path of a block)
MODELS = {
    "bert": ("BertForMaskedLM", BASE, "bert.encoder.layer.1.attention", "bert.encoder.layer.1"),
    "roberta": ("RobertaForMaskedLM", {**BASE, "max_position_embeddings": 40},
                "roberta.encoder.layer.1.attention", "roberta.encoder.layer.1"),
    "gpt2": ("GPT2LMHeadModel", GPT2, "transformer.h.1.attn", "transformer.h.1"),
    "gpt_neo": ("GPTNeoForCausalLM", NEO, "transformer.h.1.attn.attention", "transformer.h.1"),
    "opt": ("OPTForCausalLM", OPT, "model.decoder.layers.1.self_attn", "model.decoder.layers.1"),
    "t5": ("T5ForConditionalGeneration", T5, "decoder.block.1.layer.1.EncDecAttention",
           "decoder.block.1"),
    "albert": ("AlbertForMaskedLM", {**BASE, "embedding_size": 16},
               "albert.encoder.albert_layer_groups.0.albert_layers.0.attention",
               "albert.encoder.albert_layer_groups.0.albert_layers.0"),
    "llama": ("LlamaForCausalLM", LLAMA, "model.layers.1.self_attn", "model.layers.1"),
    "mistral": ("MistralForCausalLM", LLAMA, "model.layers.1.self_attn", "model.layers.1"),
    "qwen3": ("Qwen3ForCausalLM", {**LLAMA, "head_dim": 8}, "model.layers.1.self_attn",
              "model.layers.1"),
    "mixtral": ("MixtralForCausalLM", MOE, "model.layers.1.self_attn", "model.layers.1"),
    "vit": ("ViTForImageClassification", VIT, "vit.layers.1.attention", "vit.layers.1"),
    "resnet": ("ResNetForImageClassification", RESNET, "", "resnet.encoder.stages.1.layers.1"),
}  # fmt: skip


def tiny_model(family):
    """Return a newly initialised model, in eval mode."""
    name, config, *_ = MODELS[family]
    cls = getattr(transformers, name)
    torch.manual_seed(7)
    return cls(cls.config_class(**config)).eval()


@cache
def shared_model(family):
    """Return the same model, made once; for tests that change nothing."""
    return tiny_model(family)


def batch_for(model, rows, tokens):
    """Return a padded batch of another size than that of a trace."""
    g = torch.Generator().manual_seed(rows * 100 + tokens)
    if model.main_input_name == "pixel_values":
        size = getattr(model.config, "image_size", 32)
        return {"pixel_values": torch.rand(rows, 3, size, size, generator=g)}
    ids = torch.randint(3, 99, (rows, tokens), generator=g)
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    batch = {"input_ids": ids * mask, "attention_mask": mask, "use_cache": False}
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = ids[:, :-2]
        batch["decoder_attention_mask"] = mask[:, :-2]
    if model.config.model_type in ("bert", "roberta", "albert"):
        del batch["use_cache"]
    return batch


def call_of(model, path, batch):
    """Return the arguments and the result of the module at `path` when the model runs on a batch."""
    seen = {}

    def keep(_module, args, kwargs, output):
        seen.update(args=args, kwargs=kwargs, output=output)

    handle = model.get_submodule(path).register_forward_hook(keep, with_kwargs=True)
    try:
        model(**batch)
    finally:
        handle.remove()
    return seen["args"], seen["kwargs"], seen["output"]


def train_step(model, batch, seed=3):
    """Return logits and all gradients in training mode, dropout included."""
    model.train()
    model.zero_grad()
    torch.manual_seed(seed)
    logits = model(**batch).logits
    logits.float().square().mean().backward()
    return logits, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_same_step(model, plain, same_names=True):
    """Fail unless outputs and gradients of a scheduled model equal the plain model's."""
    batch = batch_for(plain, 3, 11)
    (mine, grads), (theirs, expected) = train_step(model, batch), train_step(plain, batch)
    torch.testing.assert_close(mine, theirs)
    assert expected.keys() == grads.keys() or not same_names
    for name in expected.keys() & grads.keys():
        torch.testing.assert_close(grads[name], expected[name], atol=1e-6, rtol=1e-4, msg=name)
