"""The short_attention kernel in place of core_attn: its results, and the calls that still run sdpa."""

import pytest
import torch
import transformers
from torch import nn

from kernel_checks import KERNELS, recorded_operators
from slapo_zoo import AutoScheduledModel
from slapo_zoo.dispatch import cpu_matmul as products
from slapo_zoo.hf.attention import CoreAttention
from slapo_zoo.kernels import short_attention
from slapo_zoo.parallel.rng.layout_independent_random import RandomStream

HEADS, DEPTH = 4, 16


class Attention(nn.Module):
    def __init__(self, causal, groups):
        super().__init__()
        self.is_causal, self.num_key_value_groups = causal, groups


@pytest.fixture(autouse=True)
def any_cpu(monkeypatch):
    """Enable the kernel on a CPU with any instruction set."""
    monkeypatch.setattr(short_attention, "_is_faster_here", lambda: True)


def make_core(groups, fast):
    core = CoreAttention(RandomStream(seed=1), "core", range(HEADS * groups)).train()
    if fast:
        assert KERNELS["short_attention"].refuses(core) == ""
        KERNELS["short_attention"].install(type("Site", (), {"module": core}))
    return core


def tensors(length, groups, dtype):
    torch.manual_seed(0)
    heads = (HEADS * groups, HEADS, HEADS)
    found = [torch.randn(2, length, n, DEPTH).to(dtype).transpose(1, 2) for n in heads]
    return [x.detach().requires_grad_() for x in found]


def run(core, attention, given, **options):
    """Return output, gradients, and the operators of this package that ran."""
    calls = []
    with recorded_operators(calls):
        out = core(*given, options.pop("mask", None), attention=attention, **options)[0]
        torch.manual_seed(1)
        gradients = torch.autograd.grad(out, given, torch.randn_like(out))
    return [out, *gradients], {func._schema.name.split("::")[1] for func, *_ in calls}


@pytest.mark.parametrize("length, groups, causal", [(9, 1, False), (9, 2, True), (300, 3, True)])
def test_short_attention_kernel_is_as_close_to_fp64_as_sdpa(length, groups, causal):
    attention, given = Attention(causal, groups), tensors(length, groups, torch.bfloat16)
    found, ran = run(make_core(groups, True), attention, given, scaling=0.3)
    plain, _ = run(make_core(groups, False), attention, given, scaling=0.3)
    wide = [x.detach().double().requires_grad_() for x in given]
    truth, _ = run(make_core(groups, False), attention, wide, scaling=0.3)
    assert ran == {"attention", "attention_backward"}
    for ours, theirs, want in zip(found, plain, truth, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        own = (theirs - want).abs().mean()
        assert (ours - want).abs().mean() <= 1.5 * own


@pytest.mark.parametrize("change", [
    {"mask": torch.ones(2, 1, 9, 9, dtype=torch.bool)}, {"position_bias": torch.zeros(1, HEADS, 9, 9)},
    {"dropout": 0.5}, "eval", "float32", "long", "amx",
], ids=str)  # fmt: skip
def test_short_attention_kernel_falls_back_to_sdpa_for_unsupported_calls(change, monkeypatch):
    core, options = make_core(1, True), change if isinstance(change, dict) else {}
    core.train(change != "eval")
    if change == "amx":
        monkeypatch.setattr(short_attention, "_is_faster_here", lambda: False)
    if "position_bias" in options:
        options["position_bias"] = options["position_bias"].bfloat16()
    dtype = torch.float32 if change == "float32" else torch.bfloat16
    given = tensors(513 if change == "long" else 9, 1, dtype)
    _, ran = run(core, Attention(False, 1), given, **options)
    assert not ran


def test_short_attention_kernel_compiles_to_one_graph_with_equal_output(monkeypatch):
    """Compile the code as it runs: only the CPU's description is replaced, not the function that reads it."""
    monkeypatch.undo()
    monkeypatch.setattr(products, "CPU", {"mkl": True, "avx512_bf16": True})
    core, given = make_core(2, True), tensors(9, 2, torch.bfloat16)
    attention = Attention(True, 2)
    calls = []
    with recorded_operators(calls):
        want = core(*given, None, attention=attention)[0]
    assert len(calls) == 1
    compiled = torch.compile(core, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*given, None, attention=attention)[0], want)


@pytest.mark.parametrize("kernels, ran", [("short_attention", 2), ("reference", 0)])
def test_model_with_short_attention_kernel_has_the_gradients_of_plain_transformers(
    tmp_path, kernels, ran
):
    config = transformers.LlamaConfig(hidden_size=32, intermediate_size=40, num_hidden_layers=2, vocab_size=50,
                                      num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    model = AutoScheduledModel.from_pretrained(str(tmp_path), kernels=kernels).train()
    ids, calls = torch.arange(24).view(2, 12), []
    with recorded_operators(calls):
        model(input_ids=ids, labels=ids).loss.backward()
    names = [func._schema.name for func, *_ in calls if "attention" in func._schema.name]
    assert len(names) == 2 * ran
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).train()
    plain(input_ids=ids, labels=ids).loss.backward()
    wide = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).train()
    wide(input_ids=ids, labels=ids).loss.backward()
    for name, want in wide.named_parameters():
        ours, theirs = (m.get_parameter(name).grad.double() for m in (model, plain))
        assert (ours - want.grad).norm() <= 1.5 * (theirs - want.grad).norm() + 1e-6, name
