"""Broken schedules: the correct history of a family, and an edit that breaks it.

An edit is a function of the steps; `live` edits change the model itself after the steps, as a wrong
kernel or a careless patch would. `culprit` is the module that must be named.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

from slapo_zoo.kernels.loss.vocab_logits import VocabLogits
from slapo_zoo.language.directive import Site
from slapo_zoo.language.primitives import ForkRng, Shard, Sync
from slapo_zoo.parallel import collectives

WIDTHS = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 99, "intermediate_size": 48}
BASE = {**WIDTHS, "num_attention_heads": 4, "max_position_embeddings": 32, "pad_token_id": 0}
IDS = {"bos_token_id": 1, "eos_token_id": 2}
LLAMA = {**BASE, **IDS, "num_key_value_heads": 2, "head_dim": 8}
CONFIGS = {
    "GPT2LMHeadModel": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 32,
                        "vocab_size": 99, **IDS},
    "BertForMaskedLM": BASE,
    "AlbertForMaskedLM": {**BASE, "embedding_size": 16, **IDS},
    "LlamaForCausalLM": LLAMA,
    "Qwen3ForCausalLM": LLAMA,
    "MixtralForCausalLM": {**LLAMA, "num_local_experts": 4, "intermediate_size": 28},
    "OPTForCausalLM": {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2,
                       "vocab_size": 99, "ffn_dim": 48, "max_position_embeddings": 32,
                       "word_embed_proj_dim": 32, "pad_token_id": 0, **IDS},
    "GPTNeoForCausalLM": {"hidden_size": 32, "num_heads": 4, "num_layers": 2, "window_size": 3,
                          "vocab_size": 99, "attention_types": [[["global", "local"], 1]],
                          "max_position_embeddings": 32, "intermediate_size": 48, **IDS},
    "T5ForConditionalGeneration": {"d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 48,
                                   "num_layers": 2, "vocab_size": 99, "decoder_start_token_id": 0,
                                   "relative_attention_num_buckets": 8},
    "ViTForImageClassification": {"hidden_size": 32, "num_attention_heads": 4,
                                  "num_hidden_layers": 2, "intermediate_size": 48,
                                  "image_size": 12, "patch_size": 4},
}  # fmt: skip
Steps = list[Any]


@dataclass(frozen=True)
class Mutant:
    """Broken schedule.

    Args:
        name: what is wrong.
        cls: of the model.
        edits: what is done to the right history.
        culprit: path of the module that must be named, its number left out: `h.*.mlp`.
        layout: of LAYOUTS.
        config: changes to that of CONFIGS.
    """

    name: str
    cls: str
    edits: tuple[Callable[[Steps], Steps], ...]
    culprit: str
    layout: str = "tp2"
    config: tuple[tuple[str, Any], ...] = ()


LAYOUTS = {
    "tp2": ((2, 1, 1), {}), "tp4": ((4, 1, 1), {}), "sp2": ((2, 1, 1), {"sequence_parallel": True}),
    "tp2-dp2": ((2, 1, 2), {}), "tp2-pp2": ((2, 2, 1), {}),
}  # fmt: skip


def config_of(mutant):
    """Return the config of a mutant's family."""
    cls = getattr(transformers, mutant.cls)
    fields = {**CONFIGS[mutant.cls], **dict(mutant.config), "architectures": [mutant.cls]}
    return cls.config_class(**fields)


def mutate(mutant, steps):
    """Return the broken schedule as a function that each rank applies."""
    for edit in mutant.edits:
        steps = edit(steps)

    def schedule(sch):
        for pattern, directive in steps:
            if callable(directive) and not hasattr(directive, "apply"):
                directive(sch, sch[pattern].paths)
            else:
                sch.do(pattern, directive)

    return schedule


def _matches(step, pattern, text):
    return step[0].endswith(pattern) and text in str(step[1])


def drop(pattern, text):
    """Edit: leave steps out."""

    def edit(steps):
        kept = [step for step in steps if not _matches(step, pattern, text)]
        assert len(kept) < len(steps), f"no step {pattern} {text}"
        return kept

    return edit


def change(pattern, text, **fields):
    """Edit: replace arguments of a step."""

    def edit(steps):
        new = [(p, dataclasses.replace(d, **fields)) if _matches((p, d), pattern, text) else (p, d)
               for p, d in steps]  # fmt: skip
        assert new != steps, f"no step {pattern} {text}"
        return new

    return edit


def add(pattern, directive):
    """Edit: add a directive."""
    return lambda steps: [*steps, (pattern, directive)]


def move(pattern, text, to):
    """Edit: move a step to another module."""
    return lambda steps: [(to if _matches(s, pattern, text) else s[0], s[1]) for s in steps]


def live(pattern, patch):
    """`patch(module, sch, path)` on every module that matches, after all steps."""

    def run(sch, paths):
        assert paths, pattern
        for path in paths:
            patch(sch.state.modules[path], sch, path)

    return lambda steps: [*steps, (pattern, run)]


def on_output(change_y):
    """Return a patch that changes a module's output."""
    return lambda module, sch, path: module.register_forward_hook(lambda m, a, y: change_y(y, sch))


def _erf_gelu(module, sch, path):
    module.forward = nn.functional.gelu


def _tanh_gelu(module, sch, path):
    module.forward = lambda x: nn.functional.gelu(x, approximate="tanh")


def _no_mask(core, sch, path):
    core.register_forward_pre_hook(lambda m, args: (*args[:3], None))


def _stale_rotary(module, sch, path):
    module.register_forward_hook(lambda m, a, y: tuple(x.roll(1, 1) for x in y))


def _summed_output(y, sch):
    return collectives.reduce_forward(y, sch.mesh.group("tp"))


def _wrap_padded(y, sch):
    return VocabLogits.wrap(y, y.shape[-1] * sch.mesh.tp, sch.mesh.group("tp"))


def _same_heads(core, sch, path):
    core.heads = range(len(core.heads))


def _own_dropout(module, sch, path):
    ForkRng().apply(Site(f"{path}.{sch.mesh.coord('tp')}", module, sch.state))


def _always_drops(module, sch, path):
    def forward(x):
        g = torch.Generator().manual_seed(0)
        return x * (torch.rand(x.shape, generator=g) < 0.9).to(x.dtype) / 0.9

    module.forward = forward


def _shard_too_short(module, sch, path):
    if hasattr(module.forward, "stop"):
        module.forward.stop -= 1


def _shard_off_by_one(module, sch, path):
    if getattr(module.forward, "start", 0):
        module.forward.start -= 1


def _half_gradient(module, sch, path):
    module.register_full_backward_hook(lambda m, dx, dy: tuple(g / sch.mesh.tp for g in dx))


def _rank_scaled(module, sch, path):
    """Patch: scale a module's output by a factor that depends on the rank."""
    factor = 1.0 + 1e-3 * sch.mesh.coord("tp")
    module.register_forward_hook(lambda m, a, y: y * factor)


def _untie(module, sch, path):
    sch.state.model.lm_head.weight = nn.Parameter(module.weight.detach().clone())
    sch.state.index()


GPT2, BERT, LLAMA_, T5 = (
    "GPT2LMHeadModel", "BertForMaskedLM", "LlamaForCausalLM", "T5ForConditionalGeneration",
)  # fmt: skip
MIXTRAL, OPT, QWEN3, NEO, VIT, ALBERT = (
    "MixtralForCausalLM", "OPTForCausalLM", "Qwen3ForCausalLM", "GPTNeoForCausalLM",
    "ViTForImageClassification", "AlbertForMaskedLM",
)  # fmt: skip
SIX_HEADS = (("hidden_size", 48), ("num_attention_heads", 6), ("num_key_value_heads", 3))
H, L, LAYER = "transformer.h.*", "model.layers.*", "bert.encoder.layer.*"
REDUCE_Y, REDUCE_DX = "mode='fwd_post', sync_op_or_fn='all_reduce'", "mode='bwd_post'"

MUTANTS = [
    # a missing collective, forward
    Mutant("embedding not summed", GPT2, (drop("wte", "sync"),), "transformer.wte"),
    Mutant("attention output not summed", GPT2, (drop("attn.c_proj", "sync"),), f"{H}.attn.c_proj"),
    Mutant("mlp output not summed", GPT2, (drop("mlp.c_proj", "sync"),), f"{H}.mlp.c_proj"),
    Mutant("output not summed", LLAMA_, (drop("down_proj", "sync"),), f"{L}.mlp.down_proj"),
    Mutant("output not summed", BERT, (drop("attention.output.dense", "sync"),), f"{LAYER}.attention.output.dense"),
    Mutant("output not summed", VIT, (drop("mlp.fc2", "sync"),), "vit.layers.*.mlp.fc2"),
    Mutant("output not summed", OPT, (drop("fc2", "sync"),), "model.decoder.layers.*.fc2"),
    Mutant("output not summed", T5, (drop("DenseReluDense.wo", "sync"),), "encoder.block.*.layer.*.DenseReluDense.wo"),
    Mutant("logits not joined", GPT2, (drop("lm_head", "vocab_logits"),), "lm_head"),
    # a missing collective, backward
    Mutant("dx of attention not summed", GPT2, (drop("attn", REDUCE_DX),), f"{H}.attn"),
    Mutant("dx of mlp not summed", GPT2, (drop("mlp", REDUCE_DX),), f"{H}.mlp"),
    Mutant("dx of the head not summed", GPT2, (drop("lm_head", REDUCE_DX),), "lm_head"),
    Mutant("dx of mlp not summed", LLAMA_, (drop("mlp", REDUCE_DX),), f"{L}.mlp"),
    Mutant("dx of intermediate not summed", BERT, (drop("intermediate", REDUCE_DX),), f"{LAYER}.intermediate"),
    Mutant("dx of attention not summed", VIT, (drop("attention", REDUCE_DX),), "vit.layers.*.attention"),
    Mutant("dx of fc1 not summed", OPT, (drop("fc1", REDUCE_DX),), "model.decoder.layers.*.fc1"),
    Mutant("d(encoder states) not summed", T5, (drop("EncDecAttention.k", REDUCE_DX), drop("EncDecAttention.v", REDUCE_DX)), "decoder.block.*.layer.*.EncDecAttention.k"),
    Mutant("dx of ffn not summed", ALBERT, (drop("ffn", REDUCE_DX),), "albert.encoder.albert_layer_groups.*.albert_layers.*.ffn"),
    Mutant("dx of mlp not summed", GPT2, (drop("mlp", REDUCE_DX),), f"{H}.mlp", "tp2-pp2"),
    # a collective too many, or another one
    Mutant("dx summed twice", GPT2, (add(f"{H}.mlp", Sync("bwd_post", "all_reduce")),), f"{H}.mlp"),
    Mutant("output summed twice", GPT2, (add(f"{H}.mlp.c_proj", Sync("fwd_post", "all_reduce")),), f"{H}.mlp.c_proj"),
    Mutant("dy summed too", BERT, (change("output.dense", REDUCE_Y, sync_op_or_fn="all_reduce_twice"),), f"{LAYER}.output.dense"),
    Mutant("summed backward, not forward", BERT, (change(".output.dense", REDUCE_Y, mode="bwd_post"),), f"{LAYER}.attention.output.dense"),
    Mutant("bias added tp times", BERT, (drop("attention.output.dense", "sync"), live(f"{LAYER}.attention.output.dense", on_output(_summed_output))), f"{LAYER}.attention.output.dense"),
    # divided in another way
    Mutant("wrong axis", GPT2, (change("mlp.c_fc", "'weight'", axis=0),), f"{H}.mlp.c_fc"),
    Mutant("wrong axis of a row", LLAMA_, (change("o_proj", "'weight'", axis=0),), f"{L}.self_attn.o_proj"),
    Mutant("q|k|v not sharded one by one", GPT2, (change("c_attn", "shard", groups=()),), f"{H}.attn.c_attn"),
    Mutant("bias of q|k|v not one by one", GPT2, (change("c_attn", "'bias'", groups=()),), f"{H}.attn.c_attn"),
    Mutant("bias not sharded", BERT, (drop("self.key", "'bias'"),), f"{LAYER}.attention.self.key"),
    Mutant("query heads leave their KV head", LLAMA_, (change("q_proj", "shard", together=1), change("o_proj", "shard", together=1), change("self_attn", "core_attention", together=1)), f"{L}.self_attn", "tp2", SIX_HEADS),
    Mutant("head bias not sharded", BERT, (drop("decoder", "'bias'"),), "cls.predictions.decoder"),
    Mutant("relative bias not sharded", T5, (drop("relative_attention_bias", "shard"),), "encoder.block.*.layer.*.SelfAttention"),
    Mutant("experts not told", MIXTRAL, (drop("experts", "expert_parallel"),), f"{L}.mlp.experts"),
    # a forgotten attribute
    Mutant("split_size not sharded", GPT2, (drop("attn", "split_size"),), f"{H}.attn"),
    Mutant("num_heads not sharded", OPT, (drop("self_attn", "'num_heads'"),), "model.decoder.layers.*.self_attn"),
    Mutant("num_heads not sharded", NEO, (drop("attention", "'num_heads'"),), f"{H}.attn.attention"),
    Mutant("dx of attention not summed", T5, (drop("EncDecAttention", REDUCE_DX),), "decoder.block.*.layer.*.EncDecAttention"),
    # gradients of what every rank holds whole
    Mutant("norm gradient not summed", QWEN3, (drop("q_norm", "sum_gradient"),), f"{L}.self_attn.q_norm"),
    Mutant("norm gradient not summed", LLAMA_, (drop("input_layernorm", "sum_gradient"),), f"{L}.input_layernorm", "sp2"),
    Mutant("bias gradient not summed", GPT2, (drop("mlp.c_proj", "sum_gradient"),), f"{H}.mlp.c_proj", "sp2"),
    Mutant("tokens not joined", GPT2, (drop("h.1", "join_tokens"),), "lm_head", "sp2"),
    Mutant("tokens joined too early", LLAMA_, (move("layers.1", "join_tokens", f"{L[:-1]}0"),), f"{L}", "sp2"),
    Mutant("gradient averaged over tp", BERT, (live("bert.embeddings.LayerNorm", _half_gradient),), "bert.embeddings.LayerNorm"),
    # dropout
    Mutant("dropout without a stream", GPT2, (drop("**:Dropout", "fork_rng"),), "transformer.drop"),
    Mutant("same masks on shards", BERT, (live(f"{LAYER}.attention.self.core_attn", _same_heads),), f"{LAYER}.attention.self.core_attn"),
    Mutant("same masks on shards", T5, (change("DenseReluDense.dropout", "fork_rng", axis=0, size=0),), "encoder.block.*.layer.*.DenseReluDense.dropout"),
    Mutant("same masks on shards", NEO, (change("attn_dropout", "fork_rng", axis=0, size=0),), f"{H}.attn.attention.attn_dropout"),
    Mutant("different masks on replicas", BERT, (live(f"{LAYER}.output.dropout", _own_dropout),), f"{LAYER}.output.dropout"),
    Mutant("different masks on replicas", GPT2, (live("transformer.drop", _own_dropout),), "transformer.drop"),
    Mutant("masks of all tokens", GPT2, (change("**:Dropout", "tokens", tokens=False),), f"{H}.*.*dropout", "sp2"),
    Mutant("drops in eval", BERT, (live("bert.embeddings.dropout", _always_drops),), "bert.embeddings.dropout"),
    # the vocabulary
    Mutant("last id of a shard lost", GPT2, (live("transformer.wte", _shard_too_short),), "transformer.wte"),
    Mutant("shard begins one too early", LLAMA_, (live("model.embed_tokens", _shard_off_by_one),), "model.embed_tokens"),
    Mutant("padded rows in the loss", GPT2, (drop("lm_head", "vocab_logits"), live("lm_head", on_output(_wrap_padded))), "lm_head"),
    Mutant("head untied", GPT2, (lambda steps: [("transformer.wte", lambda sch, paths: _untie(sch.state.modules[paths[0]], sch, "")), *steps],), "lm_head"),
    # another function
    Mutant("erf for tanh", GPT2, (live(f"{H}.mlp.act", _erf_gelu),), f"{H}.mlp.act"),
    Mutant("tanh for erf", BERT, (live(f"{LAYER}.intermediate.intermediate_act_fn", _tanh_gelu),), f"{LAYER}.intermediate.intermediate_act_fn"),
    Mutant("mask ignored", BERT, (live(f"{LAYER}.attention.self.core_attn", _no_mask),), f"{LAYER}.attention.self.core_attn"),
    Mutant("stale rotary table", LLAMA_, (live("model.rotary_emb", _stale_rotary),), "model.rotary_emb"),
    Mutant("a replica that drifts", BERT, (live("bert.encoder.layer.1.output.LayerNorm", _rank_scaled),), f"{LAYER}.output.LayerNorm"),
    Mutant("position table divided", GPT2, (add("transformer.wpe", Shard("weight", 1)),), "transformer.wpe"),
]  # fmt: skip
