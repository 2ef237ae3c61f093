"""Published bugs that are faults of a schedule: sums, shares, masks and functions of a sharded model."""

from corpus_bug import Bug, Fault

from mutants import (
    change,
    drop,
    live,
    on_output,
)
from slapo_zoo.parallel.vocab_parallel import VocabLogits

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
    """A fault of a schedule."""
    return Fault(edits=edits)


def _whole_bias_each(module, sch, path):
    """The bias is in every rank's term of the sum."""
    more = sch.mesh.tp - 1
    module.register_forward_hook(lambda m, args, y: y + more * m.bias)


def _gathered_as_a_shard(y, sch):
    """Whole logits on every rank, taken for one rank's columns."""
    whole = y.gathered() if isinstance(y, VocabLogits) else y
    return VocabLogits.wrap(whole, whole.shape[-1], sch.mesh.group("tp"))


def scaled_gradient(name, factor):
    """A patch: the gradient of a parameter is times `factor(tp)`; it has its values when the module is called."""

    def patch(module, sch, path):
        hooked = set()

        def hook(m, args):
            p, times = getattr(m, name), factor(sch.mesh.tp)
            if id(p) not in hooked and p.requires_grad and not p.is_meta:
                hooked.add(id(p))
                p.register_hook(lambda grad: grad * times)

        module.register_forward_pre_hook(hook)

    return patch


BUGS = [
    Bug("bias of a row-parallel output added on every rank", ("pytorch/torchtitan#4245", "huggingface/text-generation-inference#1036"),
        "torchtitan, GPT-OSS with tp > 1 on the default back end", "each tp rank added the whole bias before the sum: tp times the bias",
        BERT, steps(live(f"{LAYER}.attention.output.dense", _whole_bias_each)),
        "verify", f"{LAYER}.attention.output.dense"),
    Bug("bias gradient of a row-parallel linear divided by tp", ("pytorch/torchtitan#4332",),
        "torchtitan, linears with a bias under tp", "bias / tp is added before the sum, and autograd divides the bias's gradient too",
        BERT, steps(live(f"{LAYER}.output.dense", scaled_gradient("bias", lambda tp: 1 / tp))),
        "verify", f"{LAYER}.output.dense"),
    Bug("gradient of the head's input not summed over tp", ("apple/ml-cross-entropy#42",),
        "cut-cross-entropy with Megatron, tp > 1", "the gradient of the hidden states was that of one rank's columns",
        GPT2, steps(drop("lm_head", DX)), "build", "lm_head", always=True),
    Bug("head groups of a fused projection cut in one run", ("NVIDIA-NeMo/Automodel#1324", "hpcaitech/ColossalAI#817", "awslabs/slapo#46"),
        "AutoModel's combined q|k|v under tp", "rank 0 gets all queries and some keys: the wrong mix of heads, of the right shape",
        GPT2, steps(change("c_attn", "shard", groups=())), "verify", f"{H}.attn.c_attn"),
    Bug("gate and up cut in one run", ("NVIDIA-NeMo/Automodel#1324",),
        "AutoModel's combined gate|up under tp", "one rank has all gates, the other all ups",
        PHI3, steps(change("gate_up_proj", "shard", groups=())), "verify", f"{L}.mlp.gate_up_proj"),
    Bug("gathered logits enter the vocabulary-parallel loss", ("NVIDIA/Megatron-LM#7452 (2)",),
        "Megatron Core, tp > 1 and `parallel_output=False`", "whole logits are taken for one shard: loss + log(tp), the target's gradient lost",
        GPT2, steps(live("lm_head", on_output(_gathered_as_a_shard))), "verify", "lm_head"),
]  # fmt: skip
