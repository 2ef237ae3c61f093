"""The modules of transformers with a kernel in them: the same outputs and gradients, in train and eval."""

import copy

import pytest
import torch
import transformers
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.bert import modeling_bert
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.t5 import modeling_t5

from kernel_checks import KERNELS
from slapo_zoo.hf.own.wideresnet import WideResNetBottleneck, WideResNetConfig
from slapo_zoo.parallel.rng.layout_independent_random import RandomStream

BERT = transformers.BertConfig(hidden_size=24, intermediate_size=40, vocab_size=31, max_position_embeddings=16)  # fmt: skip
T5 = {"d_model": 24, "d_kv": 8, "d_ff": 40, "num_heads": 3, "num_layers": 2, "vocab_size": 31, "decoder_start_token_id": 0}  # fmt: skip
NEO = transformers.GPTNeoConfig(hidden_size=32, num_heads=4, num_layers=2, window_size=5, vocab_size=31,
                                attention_types=[[["global", "local"], 1]], max_position_embeddings=32)  # fmt: skip


LLAMA = transformers.LlamaConfig(
    hidden_size=24, intermediate_size=40, num_attention_heads=3, mlp_bias=True
)
QWEN = transformers.Qwen3Config(hidden_size=24, intermediate_size=40, num_attention_heads=3)


class Site:
    def __init__(self, module):
        self.module = module


def gated(name):
    return transformers.T5Config(**T5, feed_forward_proj=name)


IDS = torch.arange(14).view(2, 7) % 31
MODULES = {  # kernel, module, arguments
    "gelu": ("bias_gelu", lambda: ACT2FN["gelu"], lambda: (torch.randn(5, 24),)),
    "gelu_new": ("bias_gelu", lambda: ACT2FN["gelu_new"], lambda: (torch.randn(5, 24),)),
    "gelu_fast": ("bias_gelu", lambda: ACT2FN["gelu_fast"], lambda: (torch.randn(5, 24),)),
    "relu": ("bias_relu", nn.ReLU, lambda: (torch.randn(5, 24),)),
    "layer_norm": ("layer_norm", lambda: nn.LayerNorm(24), lambda: (torch.randn(5, 24),)),
    "t5_norm": ("rms_norm", lambda: modeling_t5.T5LayerNorm(24), lambda: (torch.randn(5, 24),)),
    "llama_norm": ("rms_norm", lambda: modeling_llama.LlamaRMSNorm(24), lambda: (torch.randn(5, 24),)),
    "qwen3_norm": ("rms_norm", lambda: modeling_qwen3.Qwen3RMSNorm(8), lambda: (torch.randn(2, 5, 3, 8).mT.mT,)),
    "llama_mlp": ("swiglu", lambda: modeling_llama.LlamaMLP(LLAMA), lambda: (torch.randn(2, 7, 24),)),
    "qwen3_mlp": ("swiglu", lambda: modeling_qwen3.Qwen3MLP(QWEN), lambda: (torch.randn(2, 7, 24),)),
    "bert_self_output": ("bias_dropout_residual_layer_norm", lambda: modeling_bert.BertSelfOutput(BERT),
                         lambda: (torch.randn(2, 7, 24), torch.randn(2, 7, 24))),
    "bert_output": ("bias_dropout_residual_layer_norm", lambda: modeling_bert.BertOutput(BERT),
                    lambda: (torch.randn(2, 7, 40), torch.randn(2, 7, 24))),
    "bert_embeddings": ("embedding_layer_norm", lambda: modeling_bert.BertEmbeddings(BERT), lambda: (IDS,)),
    "t5_relu": ("relu_dropout", lambda: modeling_t5.T5DenseActDense(gated("relu")),
                lambda: (torch.randn(2, 7, 24),)),
    "t5_gated": ("geglu", lambda: modeling_t5.T5DenseGatedActDense(gated("gated-gelu")),
                 lambda: (torch.randn(2, 7, 24),)),
    "neo_local": ("local_causal_attention", lambda: GPTNeoSelfAttention(NEO, "local", 0),
                  lambda: (torch.randn(2, 17, 32),)),
    "neo_global": ("local_causal_attention", lambda: GPTNeoSelfAttention(NEO, "global", 0),
                   lambda: (torch.randn(2, 17, 32),)),
    "bottleneck": ("batch_norm_relu_add", lambda: WideResNetBottleneck(WideResNetConfig(), 16, 4, 1),
                   lambda: (torch.randn(3, 16, 6, 6),)),
}  # fmt: skip


def pair(name):
    """A module, its copy with the kernel, and arguments."""
    kernel_name, make, arguments = MODULES[name]
    torch.manual_seed(0)
    module = copy.deepcopy(make())
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    fast = copy.deepcopy(module)
    assert KERNELS[kernel_name].refuses(fast) == ""
    KERNELS[kernel_name].install(Site(fast))
    assert fast.state_dict().keys() == module.state_dict().keys()
    return module, fast, arguments()


def run(module, arguments):
    given = [a.clone().requires_grad_(a.is_floating_point()) for a in arguments]
    out = module(*given)
    out = out[0] if isinstance(out, tuple) else out
    scale = torch.linspace(0.5, 1.5, out.numel()).view(out.shape)
    (out * scale).sum().backward()
    grads = [a.grad for a in given if a.grad is not None] + [p.grad for p in module.parameters()]
    return [out.detach(), *grads, *module.buffers()]


def stream_dropouts(module):
    """Give every dropout its own random stream, as `fork_rng` does."""
    stream = RandomStream(seed=3)
    for name, child in module.named_modules():
        if isinstance(child, nn.Dropout):
            child.p = 0.3
            child.forward = lambda x, name=name: x * stream.keep_mask(x, 0.3, name)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", MODULES)
def test_module_with_a_kernel_has_the_outputs_and_gradients_of_the_transformers_module(
    name, training
):
    module, fast, arguments = pair(name)
    for m in (module, fast):
        m.train(training)
        if training:
            stream_dropouts(m)
    for found, want in zip(run(fast, arguments), run(module, arguments), strict=True):
        assert (found is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(found, want, atol=3e-5, rtol=1e-4)


CHILDREN = [(name, child) for name, (_, make, _) in MODULES.items()
            for child, _ in make().named_children()]  # fmt: skip


def doubled(_module, _inputs, output):
    return output * 2


class Doubles(nn.Module):
    """Wrapper that replaces an activation, norm or dropout and doubles its output."""

    def __init__(self, of):
        super().__init__()
        self.of = of
        self.weight = getattr(of, "weight", None)  # T5 looks at that of `wo`

    def forward(self, x):
        return 2 * self.of(x)


@pytest.mark.parametrize("replaced", [False, True], ids=["hooked", "replaced"])
@pytest.mark.parametrize(("name", "child"), CHILDREN)
def test_module_with_a_kernel_calls_children_that_the_user_replaced_or_hooked(
    name, child, replaced
):
    module, fast, arguments = pair(name)
    before = module.eval()(*arguments)
    for m in (module, fast.eval()):
        if replaced:
            setattr(m, child, Doubles(getattr(m, child)))
        else:
            getattr(m, child).register_forward_hook(doubled)
    want = run(module, arguments)
    if isinstance(before, torch.Tensor):
        assert not torch.equal(want[0], before), "the change does nothing"
    for found, expected in zip(run(fast, arguments), want, strict=True):
        torch.testing.assert_close(found, expected, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["bert_output", "t5_gated", "t5_relu", "bert_embeddings"])
def test_module_with_fused_dropout_is_random_in_train_mode_and_deterministic_in_eval_mode(name):
    _, fast, arguments = pair(name)
    torch.manual_seed(0)
    one, two = fast.train()(*arguments), fast(*arguments)
    assert not torch.equal(one, two)
    assert torch.equal(fast.eval()(*arguments), fast(*arguments))


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("num_buckets, max_distance", [(32, 128), (8, 20), (64, 512)])
def test_t5_attention_kernel_computes_the_relative_position_buckets_of_transformers(
    bidirectional, num_buckets, max_distance
):
    from slapo_zoo.kernels.t5_attention import relative_buckets

    distance = torch.arange(-3000, 3000)
    want = modeling_t5.T5Attention._relative_position_bucket(
        distance, bidirectional, num_buckets, max_distance
    )
    assert torch.equal(relative_buckets(distance, bidirectional, num_buckets, max_distance), want)


def whole_pair(kind, kernel_name):
    """Return a model and its copy with the kernel in every attention."""
    config = gated("gated-gelu") if kind == "T5ForConditionalGeneration" else NEO
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    fast = copy.deepcopy(model)
    for module in list(fast.modules()):
        if KERNELS[kernel_name].refuses(module) == "":
            KERNELS[kernel_name].install(Site(module))
    return model, fast


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("kind, kernel_name", [
    ("T5ForConditionalGeneration", "t5_attention"), ("GPTNeoForCausalLM", "local_causal_attention"),
])  # fmt: skip
def test_model_with_a_kernel_on_padded_batches_has_the_loss_and_gradients_of_transformers(
    kind, kernel_name, use_cache
):
    model, fast = whole_pair(kind, kernel_name)
    ids = torch.randint(1, 31, (3, 19))
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    given = {"input_ids": ids, "attention_mask": mask, "use_cache": use_cache,
             "labels": torch.where(mask == 1, ids, -100)}  # fmt: skip
    want, found = model(**given), fast(**given)
    torch.testing.assert_close(found.loss, want.loss, atol=1e-5, rtol=1e-5)
    want.loss.backward()
    found.loss.backward()
    for (name, p), q in zip(model.named_parameters(), fast.named_parameters(), strict=True):
        torch.testing.assert_close(q[1].grad, p.grad, atol=3e-6, rtol=1e-3, msg=name)


@pytest.mark.parametrize("kind, kernel_name", [
    ("T5ForConditionalGeneration", "t5_attention"), ("GPTNeoForCausalLM", "local_causal_attention"),
])  # fmt: skip
def test_generate_with_a_kernel_returns_the_tokens_of_plain_transformers(kind, kernel_name):
    model, fast = whole_pair(kind, kernel_name)
    ids = torch.randint(1, 31, (2, 9))
    options = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0}
    want, found = (m.generate(ids, **options) for m in (model, fast))
    assert torch.equal(want, found)


def test_t5_attention_kernel_draws_dropout_from_the_random_stream_of_the_model():
    """Attention dropout uses the mask of the model's random stream."""
    from slapo_zoo.hf.attention import CoreAttention
    from slapo_zoo.kernels.t5_attention import t5_attention

    attention = modeling_t5.T5Attention(gated("relu"), layer_idx=0).train()
    attention.dropout = 0.4
    stream = RandomStream(seed=5)
    attention.add_module("core_attn", CoreAttention(stream, "a.core_attn", range(3)))
    KERNELS["t5_attention"].install(Site(attention))
    x = torch.randn(2, 6, 24)
    q, k, v = (
        linear(x).view(2, 6, 3, 8).transpose(1, 2)
        for linear in (attention.q, attention.k, attention.v)
    )
    with stream.at(1, 0, 2):  # beside any call each draw takes a turn of its own
        keep = stream.keep_mask(torch.empty(2, 3, 6, 6), 0.4, "a.core_attn", range(3))
        found = attention(x)[0]
    want = attention.o(((q @ k.mT).softmax(-1) * keep @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(t5_attention(q, k, v), (q @ k.mT).softmax(-1) @ v)


def test_kernel_refuses_an_unsupported_module_with_the_reason():
    cases = {
        "layer_norm": (nn.LayerNorm((3, 4)), "2 axes"),
        "rms_norm": (nn.LayerNorm(4), "T5LayerNorm"),
        "geglu": (modeling_t5.T5DenseGatedActDense(gated("gated-relu")), "ReLU"),
        "relu_dropout": (modeling_t5.T5DenseActDense(gated("gelu_new")), "not ReLU"),
        "swiglu": (modeling_llama.LlamaMLP(transformers.LlamaConfig(hidden_act="gelu")), "GELU"),
    }
    for name, (module, reason) in cases.items():
        assert reason in KERNELS[name].refuses(module)


@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)]
)
def test_rms_norm_kernel_returns_the_values_and_dtype_of_transformers_llama_norm(dtypes):
    norm = modeling_llama.LlamaRMSNorm(24).to(dtypes[1])
    x = torch.randn(5, 24, dtype=dtypes[0])
    want = norm(x)
    KERNELS["rms_norm"].install(Site(norm))
    torch.testing.assert_close(norm(x), want)


def test_batch_norm_relu_kernel_calls_a_norm_that_the_user_patched_or_hooked():
    """A schedule may synchronise a norm's statistics over ranks, and a user's hook reads its output."""
    torch.manual_seed(0)
    bottleneck = WideResNetBottleneck(WideResNetConfig(), 16, 4, 1)
    x = torch.randn(2, 16, 5, 5)
    own, seen = bottleneck.bn2.forward, []
    bottleneck.bn2.forward = lambda x: 2 * own(x) - 1
    bottleneck.bn3.register_forward_hook(lambda module, args, out: seen.append(out))
    want = bottleneck(x)
    KERNELS["batch_norm_relu_add"].install(Site(bottleneck))
    torch.testing.assert_close(bottleneck(x), want)
    torch.testing.assert_close(seen[1], seen[0])
