"""Published bugs in a schedule: all-reduces, shards, masks and functions of a sharded model."""

import torch
import torch.utils.checkpoint
from corpus_bug import Bug, Fault

from mutants import (
    _own_dropout,
    _same_heads,
    _shard_too_short,
    change,
    drop,
    live,
    on_output,
)
from slapo_zoo.kernels.loss.vocab_logits import VocabLogits

H, L, LAYER = "transformer.h.*", "model.layers.*", "bert.encoder.layer.*"
DX = "mode='bwd_post'"
GPT2, BERT, LLAMA, T5 = (
    "GPT2LMHeadModel", "BertForMaskedLM", "LlamaForCausalLM", "T5ForConditionalGeneration",
)  # fmt: skip
MIXTRAL, QWEN3, BLOOM, BART, MISTRAL, NEO, PHI3 = (
    "MixtralForCausalLM", "Qwen3ForCausalLM", "BloomForCausalLM", "BartForConditionalGeneration",
    "MistralForCausalLM", "GPTNeoForCausalLM", "Phi3ForCausalLM",
)  # fmt: skip


def steps(*edits):
    """Return the fault of a schedule."""
    return Fault(edits=edits)


def _whole_bias_each(module, sch, path):
    """Patch: add the bias on every rank, before the all-reduce."""
    more = sch.mesh.tp - 1
    module.register_forward_hook(lambda m, args, y: y + more * m.bias)


def _gathered_as_a_shard(y, sch):
    """Patch: take full logits for one rank's columns."""
    whole = y.gathered() if isinstance(y, VocabLogits) else y
    return VocabLogits.wrap(whole, whole.shape[-1], sch.mesh.group("tp"))


def at_first_call(module, action):
    """Run a change at the first call, when the parameters have their values."""
    done = set()

    def hook(m, args):
        p = next(m.parameters())
        if id(p) not in done and p.requires_grad and not p.is_meta:
            done.add(id(p))
            action(m)

    module.register_forward_pre_hook(hook)


def scaled_gradient(name, factor):
    """Return a patch that multiplies the gradient of a parameter by `factor(mesh)`."""

    def patch(module, sch, path):
        times = factor(sch.mesh)
        at_first_call(module, lambda m: getattr(m, name).register_hook(lambda grad: grad * times))

    return patch


def _a_part(mesh):
    """Return factors that add up to 1 over two ranks."""
    return 0.25 + 0.5 * mesh.coord("tp")


def masked(see):
    """Return a patch of an attention core with another mask: `see(visible, query, key)` gets positions."""

    def patch(core, sch, path):
        def hook(m, args):
            mask = args[3]
            if mask is None:
                return None
            q, k = (torch.arange(n) for n in mask.shape[-2:])
            seen = see(mask if mask.dtype == torch.bool else mask > -1, q[:, None], k[None, :])
            least = torch.finfo(args[0].dtype).min
            new = seen if mask.dtype == torch.bool else torch.where(seen, 0.0, least)
            return (*args[:3], new.expand_as(mask), *args[4:])

        core.register_forward_pre_hook(hook)

    return patch


def _half_gradient_of_keys(core, sch, path):
    def hook(m, args):
        return (args[0], 0.5 * args[1] + (0.5 * args[1]).detach(), *args[2:])

    core.register_forward_pre_hook(hook)


def _slopes_of_the_first_heads(attention, sch, path):
    """Patch: every rank uses the ALiBi slopes of the first heads."""

    def hook(m, args, kwargs):
        rows = kwargs["alibi"].unflatten(0, (-1, HEADS))
        return args, kwargs | {"alibi": rows[:, : HEADS // sch.mesh.tp].flatten(0, 1)}

    attention.register_forward_pre_hook(hook, with_kwargs=True)


def _heads_in_another_order(y, sch):
    return y.flip(-1) if sch.mesh.coord("tp") else y


def frequencies(change, ranks=(0, 1, 2, 3)):
    """Return a patch that changes the rotary frequencies on some ranks."""

    def patch(module, sch, path):
        if sch.mesh.coord("tp") in ranks:
            module.register_forward_pre_hook(lambda m, args: m.inv_freq.copy_(change(FREQUENCIES)))

    return patch


def _padding_row_of_each_shard(embedding, sch, path):
    """Patch: every rank drops the gradient of the local row with the padding token's number."""

    def hook(grad):
        grad = grad.clone()
        grad[0] = 0
        return grad

    at_first_call(embedding, lambda m: m.weight.register_hook(hook))


def aux_loss_times(mesh_dim):
    """Return a patch that counts the router's loss once per rank."""

    def patch(module, sch, path):
        sch.state.model.router_aux_loss_coef *= sch.mesh.size(mesh_dim)

    return patch


def labels_lost(module, sch, path):
    """Patch: each rank shifts the labels of its own tokens, so the last token of a shard has no label."""
    model = sch.state.model
    right = model.loss_function

    def loss(logits, labels, **options):
        chunk = labels.shape[1] // 2
        labels = labels.clone()
        labels[:, chunk] = -100
        return right(logits=logits, labels=labels, **options)

    model.loss_function = loss


def means_of_chunks(module, sch, path):
    """Patch: each rank divides by the number of targets among its own tokens."""
    model = sch.state.model
    right = model.loss_function

    def loss(logits, labels, **options):
        first, second = labels.clone(), labels.clone()
        first[:, labels.shape[1] // 2 :] = second[:, : labels.shape[1] // 2] = -100
        counts = [(x[:, 1:] != -100).sum() for x in (first, second, labels)]
        parts = [right(logits=logits, labels=x, **options) for x in (first, second)]
        weights = [counts[2] / (2 * n) for n in counts[:2]]  # weights of a mean over all ranks
        return sum(w * part for w, part in zip(weights, parts, strict=True))

    model.loss_function = loss


def _halves_swapped(y, sch):
    """Patch: the second replica scatters in the rank order of another group."""
    return y.roll(y.shape[1] // 2, 1) if sch.mesh.coord("dp") else y


def _drawn_anew(module, sch, path):
    """Patch: recompute with other random numbers than the forward's."""
    right, calls = module.forward, []

    def forward(*args, **kwargs):
        def run(*xs):
            calls.append(len(calls))
            stream = sch.state.random
            with stream.at(stream.step + 7 * (len(calls) % 2 == 0), *stream.position()[1:]):
                return right(*xs, **kwargs)

        if not torch.is_grad_enabled():
            return right(*args, **kwargs)
        calls.clear()
        return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=False)

    module.forward = forward


def _rows_of_the_first_rank(dropout, sch, path):
    """Patch: every dp rank draws dropout as if its rows were the first."""
    right, stream = dropout.forward, sch.state.random

    def forward(x):
        step, row, rows = stream.position()
        with stream.at(step, row - rows * sch.mesh.coord("dp"), rows):
            return right(x)

    dropout.forward = forward


HEADS, FREQUENCIES = 4, 1.0 / 10000.0 ** (torch.arange(0, 8, 2) / 8)
AUX = (("output_router_logits", True), ("router_aux_loss_coef", 0.5))

BUGS = [
    Bug("bias of a row-parallel output added on every rank", ("pytorch/torchtitan#4245", "huggingface/text-generation-inference#1036"),
        "torchtitan, GPT-OSS with tp > 1 on the default back end", "each tp rank added the whole bias before the sum: tp times the bias",
        BERT, steps(live(f"{LAYER}.attention.output.dense", _whole_bias_each)),
        "verify", f"{LAYER}.attention.output.dense"),
    Bug("bias gradient of a row-parallel linear divided by tp", ("pytorch/torchtitan#4332",),
        "torchtitan, linears with a bias under tp", "bias / tp is added before the sum, and autograd divides the bias's gradient too",
        BERT, steps(live(f"{LAYER}.output.dense", scaled_gradient("bias", lambda mesh: 1 / mesh.tp))),
        "verify", f"{LAYER}.output.dense"),
    Bug("gradient of the head's input not summed over tp", ("apple/ml-cross-entropy#42",),
        "cut-cross-entropy with Megatron, tp > 1", "the gradient of the hidden states was that of one rank's columns",
        GPT2, steps(drop("lm_head", DX)), "build", "lm_head", always=True),
    Bug("head groups of a fused projection cut in one run", ("NVIDIA-NeMo/Automodel#1324", "hpcaitech/ColossalAI#817", "awslabs/slapo#46"),
        "AutoModel's combined q, k and v under tp", "rank 0 gets all queries and some keys: the wrong mix of heads, of the right shape",
        GPT2, steps(change("c_attn", "shard", groups=())), "verify", f"{H}.attn.c_attn"),
    Bug("gate and up cut in one run", ("NVIDIA-NeMo/Automodel#1324",),
        "AutoModel's combined gate and up under tp", "one rank has all gates, the other all ups",
        PHI3, steps(change("gate_up_proj", "shard", groups=())), "verify", f"{L}.mlp.gate_up_proj"),
    Bug("gathered logits enter the vocabulary-parallel loss", ("NVIDIA/Megatron-LM#7452 (2)",),
        "Megatron Core, tp > 1 and `parallel_output=False`", "whole logits are taken for one shard: loss + log(tp), the target's gradient lost",
        GPT2, steps(live("lm_head", on_output(_gathered_as_a_shard))), "verify", "lm_head"),
    Bug("norms after attention: gradient not summed over tp", ("NVIDIA/Megatron-LM#1446",),
        "Megatron-LM, tp with sequence parallelism", "each rank keeps the gradient of its own tokens: norms of tp ranks drift apart",
        LLAMA, steps(drop("post_attention_layernorm", "sum_gradient")), "guard", f"{L}.post_attention_layernorm", "sp2", always=True),
    Bug("no norm's gradient is summed over tp", ("EleutherAI/gpt-neox#1257",),
        "GPT-NeoX, first sequence parallelism", "layer norms were not synchronised: the loss fell to about 8 and stayed there",
        GPT2, steps(drop("ln_1", "sum_gradient"), drop("ln_2", "sum_gradient")), "guard", f"{H}.ln_*", "sp2"),
    Bug("partial gradient taken for that of a replica", ("NVIDIA/Megatron-LM#7452 (a partial gradient of a replicated weight)", "NVIDIA-NeMo/Automodel#3822"),
        "Megatron Core without sequence parallelism; AutoModel under tp", "each rank's heads give a part of the gradient of a norm that all ranks hold: replicas drift",
        QWEN3, steps(drop("k_norm", "sum_gradient")), "guard", f"{L}.self_attn.k_norm", always=True),
    Bug("encoders made causal", ("huggingface/accelerate#4177 (the encoders it left out)",),
        "accelerate with context parallelism, BART, M2M-100, Pegasus", "every module named self_attn is told to be causal: an encoder no longer sees what follows",
        BART, steps(live("model.encoder.layers.*.self_attn.core_attn", masked(lambda seen, q, k: seen & (k <= q)))), "verify", "model.encoder.layers.*.self_attn.core_attn"),
    Bug("sliding window dropped", ("huggingface/accelerate#4177", "PrimeIntellect-ai/prime-rl#2828"),
        "accelerate and prime-rl with context parallelism, Mistral, Gemma", "masks are replaced by is_causal: layers with a window see everything before",
        MISTRAL, steps(live(f"{L}.self_attn.core_attn", masked(lambda seen, q, k: k <= q))), "verify", f"{L}.self_attn.core_attn"),
    Bug("some layers attend to their own chunk only", ("NVIDIA-NeMo/Automodel#3507",),
        "AutoModel, shipped recipes with context parallelism", "layers 0 to 2 of 60 ran without it and saw an eighth of the text; the loss falls all the same",
        LLAMA, steps(live("model.layers.0.self_attn.core_attn", masked(lambda seen, q, k: seen & (q // 6 == k // 6)))), "verify", "model.layers.*.self_attn.core_attn"),
    Bug("gradient of attention wrong over chunks of tokens", ("NVIDIA/Megatron-LM#1464", "NVIDIA/TransformerEngine#1557"),
        "Megatron-LM with context parallelism", "gradients off by 40 to 230 %, the loss right",
        LLAMA, steps(live(f"{L}.self_attn.core_attn", _half_gradient_of_keys)), "verify", f"{L}.self_attn.k_proj"),
    Bug("every rank takes the position biases of the first heads", ("bigscience-workshop/Megatron-DeepSpeed#227", "flashinfer-ai/flashinfer#1606"),
        "Megatron-DeepSpeed, BLOOM with tp > 1", "ALiBi slopes are made by local head number: later ranks have those of the first",
        BLOOM, steps(drop("self_attention", "alibi"), live(f"{H}.self_attention", _slopes_of_the_first_heads)), "verify", f"{H}.self_attention"),
    Bug("relative position bias of other heads", ("OpenNMT/CTranslate2#1714",),
        "CTranslate2, T5 under tp", "a rank's heads get the bias of others",
        T5, steps(live("encoder.block.0.layer.0.SelfAttention.relative_attention_bias", on_output(_heads_in_another_order))), "verify", "encoder.block.*.layer.*.SelfAttention.relative_attention_bias"),
    Bug("rotary frequencies from uninitialised memory", ("huggingface/transformers#45902", "sgl-project/SpecForge#703", "pytorch/torchtitan#3775"),
        "models made on meta and filled later, e.g. torchtitan's HF back end", "non-persistent buffers are in no file: positions are lost, the loss begins too high",
        LLAMA, steps(live("model.rotary_emb", frequencies(lambda f: f.flip(0)))), "verify", "model.rotary_emb"),
    Bug("rotary frequencies right on rank 0 alone", ("hiyouga/LlamaFactory#10820", "NovaSky-AI/SkyRL#1725"),
        "LLaMA-Factory, init_on_rank0; SkyRL under sequence parallelism", "buffers are not broadcast: each other rank rotates by what its memory held",
        LLAMA, steps(live("model.rotary_emb", frequencies(lambda f: 0 * f, ranks=(1,)))), "verify", "model.rotary_emb"),
    Bug("router: gradient of a rank's own tokens", ("pytorch/torchtitan#2388",),
        "torchtitan, mixtures of experts under tp", "the router's gradient is a part on each rank and taken as whole: routers diverge after one step",
        MIXTRAL, steps(live(f"{L}.mlp.gate", scaled_gradient("weight", _a_part))), "guard", f"{L}.mlp.gate", always=True),
    Bug("experts: gradients doubled", ("pytorch/pytorch#160285",),
        "torchtitan's experts over two ranks", "each gradient is exactly tp times too large; the loss curve hides it",
        MIXTRAL, steps(live(f"{L}.mlp.experts", scaled_gradient("down_proj", lambda mesh: mesh.tp))), "verify", f"{L}.mlp.experts"),
    Bug("router loss times tp", ("NVIDIA/Megatron-LM#5047", "NVIDIA/Megatron-LM#3768"),
        "Megatron Core, --calculate-per-token-loss with tp > 1", "the auxiliary loss is scaled by tokens that tp ranks count each",
        MIXTRAL, steps(live("lm_head", aux_loss_times("tp"))), "verify", "loss", "tp2", AUX),
    Bug("labels shifted within each chunk of tokens", ("huggingface/transformers#36607", "verl-project/verl#4250", "NVIDIA-BioNeMo/bionemo-recipes#1449"),
        "sequence and context parallelism with HF's causal loss", "the last token of each chunk has no target",
        LLAMA, steps(live("lm_head", labels_lost)), "verify", "loss", "sp2"),
    Bug("each chunk of tokens divides by its own targets", ("NVIDIA/Megatron-LM#7452 (9)", "NVIDIA/Megatron-LM#7513"),
        "Megatron Core with context parallelism and a token mask", "ranks of unequal masks are averaged as if they had equal numbers of tokens",
        LLAMA, steps(live("lm_head", means_of_chunks)), "verify", "loss", "sp2"),
    Bug("tokens scattered over another group", ("NVIDIA/Megatron-LM#7452 (7)",),
        "LLaVA in Megatron Core with a tp group of its own", "sample B becomes [12, 13, 12, 13]: ranks keep the tokens of others",
        LLAMA, steps(live("model.embed_tokens", on_output(_halves_swapped))), "verify", "model.embed_tokens", "sp2-dp2"),
    Bug("padding row of each shard gets no gradient", ("pytorch/torchtitan#4637",),
        "torchtitan, vocabulary-parallel embeddings with padding_idx", "token 37 is row 5 of rank 1 and loses its gradient, as row 5 of rank 0 should",
        BERT, steps(live("bert.embeddings.word_embeddings", _padding_row_of_each_shard)), "verify", "bert.embeddings.word_embeddings"),
    Bug("last id of a shard masked", ("TTrace (arXiv:2506.09280), wrong embedding mask",),
        "Megatron-LM under tp", "ids at the edge of a shard look up nothing",
        GPT2, steps(live("transformer.wte", _shard_too_short)), "verify", "transformer.wte"),
    Bug("same masks on shards of attention", ("pytorch/pytorch#168058",),
        "DTensor under tp, Llama-3 with dropout", "masks are not those of one device: the loss moves by 1.1 at tp 2",
        BERT, steps(live(f"{LAYER}.attention.self.core_attn", _same_heads)), "verify", f"{LAYER}.attention.self.core_attn", dropout=0.2),
    Bug("tp ranks drop different elements of a replica", ("NVIDIA/Megatron-LM#206",),
        "BLOOM's training: the data loader drew numbers on tp rank 0 alone", "generators of tp ranks come apart, and what should be one activation differs",
        BERT, steps(live(f"{LAYER}.output.dropout", _own_dropout)), "verify", f"{LAYER}.output.dropout", dropout=0.2),
    Bug("dp ranks draw the same masks", ("volcengine/veScale#52", "tenstorrent/tt-metal#55947"),
        "torch's DDP with equal seeds; tt-train under dp and tp", "rows of different ranks lose the same elements, unlike on one device",
        BERT, steps(live("bert.embeddings.dropout", _rows_of_the_first_rank)), "verify", "bert.embeddings.dropout", "dp2", dropout=0.2),
    Bug("recomputation draws other masks", ("allenai/OLMo-core#828", "pytorch/pytorch#190758"),
        "OLMo-core, activation checkpointing with dropout", "gradients are those of another sample than the loss: 2.495 instead of 2.195 after 150 steps",
        GPT2, steps(live(f"{H}.mlp", _drawn_anew)), "", "", dropout=0.2),
]  # fmt: skip
