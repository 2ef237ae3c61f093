"""The linear kernel: matrix products by oneDNN, where they are used, and the linears left to torch."""

import pytest
import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from kernel_checks import KERNELS, recorded_operators
from slapo_zoo import AutoScheduledModel, SlapoError
from slapo_zoo.dispatch import cpu_matmul as products
from slapo_zoo.kernels import linear
from slapo_zoo.kernels.linear_cross_entropy import linear_cross_entropy


@pytest.fixture(autouse=True)
def onednn(monkeypatch):
    """Enable the kernel on any CPU and for tiny sizes."""
    monkeypatch.setattr(products, "is_faster_here", lambda: True)
    monkeypatch.setattr(products, "LEAST", 0)
    monkeypatch.setattr(products, "NARROW", 0)
    monkeypatch.setattr(products, "BLOCK", 64)


def test_private_torch_operator_used_by_the_linear_kernel_has_the_expected_signature():
    """The operator is not public: where a torch release renames it, change slapo_zoo.dispatch.cpu_matmul."""
    assert hasattr(torch.ops.mkldnn, "_linear_pointwise")
    schema = str(torch.ops.mkldnn._linear_pointwise.default._schema)
    assert schema == (
        "mkldnn::_linear_pointwise(Tensor X, Tensor W, Tensor? B, str attr,"
        " Scalar?[] scalars, str? algorithm) -> Tensor Y"
    )


def matrices(M, K, N, layout):
    torch.manual_seed(0)
    a, b = torch.randn(M, K), torch.randn(K, N)
    if layout == "transposed":
        return a.t().contiguous().t(), b.t().contiguous().t()
    return (a[:, ::2], b[::2]) if layout == "strided" else (a, b)


@pytest.mark.parametrize("layout", ["plain", "transposed", "strided"])
@pytest.mark.parametrize("size", [(5, 8, 3), (1, 64, 40), (70, 129, 33), (4, 1, 4)])
def test_onednn_matmuls_have_at_most_about_twice_the_error_of_torch_matmuls(size, layout):
    a, b = matrices(*size, layout)
    want = a.double() @ b.double()
    own = float((a @ b - want).abs().max())
    allowed = 2 * own + 8 * torch.finfo(a.dtype).eps * float(want.abs().max())
    bias = torch.randn(len(b.t()), 2)[:, 0]  # with gaps
    into, total = torch.empty(want.shape), torch.ones(want.shape)
    assert products.suits(a, b)
    cases = {"mm": (products.mm(a, b), 0), "bias": (products.mm(a, b, bias), bias),
             "into": (products.mm_into(into, a, b), 0), "add": (products.add_mm_(total, a, b), 1)}  # fmt: skip
    for name, (found, more) in cases.items():
        assert float((found - want - more).abs().max()) <= allowed + 1e-6, name


@pytest.mark.parametrize("layout", ["plain", "transposed", "strided"])
def test_onednn_matmul_gets_contiguous_operands_for_every_input_layout(layout):
    """oneDNN multiplies other strides element by element: minutes instead of a second."""
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.mkldnn._linear_pointwise.default:
                seen.extend(args[:2])
            return func(*args, **(kwargs or {}))

    a, b = matrices(70, 129, 33, layout)
    with Watch():
        products.mm(a, b)
        products.mm_into(torch.empty(70, 33), a, b)
        products.add_mm_(torch.zeros(70, 33), a, b)
    assert len(seen) > 6
    assert all(x.is_contiguous() or x.t().is_contiguous() for x in seen)


def layer(kind):
    torch.manual_seed(0)
    module = nn.Linear(24, 40) if kind == "Linear" else Conv1D(40, 24)
    nn.init.normal_(module.bias)
    return module if kind != "no bias" else nn.Linear(24, 40, bias=False)


def served(module):
    assert KERNELS["linear"].refuses(module) == ""
    KERNELS["linear"].install(type("Site", (), {"module": module}))
    return module


def run(module, x):
    calls = []
    with recorded_operators(calls):
        y = module(x)
        y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype))
    wanted = [y.detach(), x.grad, *(p.grad for p in module.parameters())]
    return wanted, [func._schema.name.split("::")[1] for func, *_ in calls]


@pytest.mark.parametrize("shape", [(6, 24), (2, 5, 24), (2, 3, 4, 24)])
@pytest.mark.parametrize("kind", ["Linear", "Conv1D", "no bias"])
def test_linear_kernel_has_the_outputs_and_gradients_of_the_torch_module(kind, shape):
    x = torch.randn(shape)
    if kind != "Conv1D":  # whose own forward takes no other strides
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    want, _ = run(layer(kind), x.clone().requires_grad_())
    found, ran = run(served(layer(kind)), x.clone().requires_grad_())
    assert ran == ["linear", "linear_backward"]
    for ours, theirs in zip(found, want, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("frozen", ["input", "weight", "bias"])
def test_linear_kernel_computes_no_gradients_for_frozen_parameters(frozen, monkeypatch):
    module, calls = served(layer("Linear")), []
    if frozen != "input":
        getattr(module, frozen).requires_grad_(False)
    x = torch.randn(6, 24, requires_grad=frozen != "input")
    own = products.mm
    monkeypatch.setattr(products, "mm", lambda *args: calls.append(args) or own(*args))
    module(x).sum().backward()
    assert len(calls) == (3 if frozen == "bias" else 2)
    grads = {"input": x.grad, "weight": module.weight.grad, "bias": module.bias.grad}
    assert [name for name, grad in grads.items() if grad is None] == [frozen]


@pytest.mark.parametrize("case", ["bf16", "autocast", "other CPU", "small", "forward", "subclass"])
def test_linears_that_the_kernel_does_not_support_run_the_torch_forward(case, monkeypatch):
    module, x = layer("Linear"), torch.randn(6, 24)
    if case == "forward":
        module.forward = lambda x: 2 * nn.Linear.forward(module, x)
        assert KERNELS["linear"].refuses(module) == "Linear was patched or hooked"
        return
    if case == "bf16":
        module, x = module.bfloat16(), x.bfloat16()
    if case == "subclass":
        x = x.as_subclass(type("Other", (torch.Tensor,), {}))
    if case == "other CPU":
        monkeypatch.setattr(products, "is_faster_here", lambda: False)
    if case == "small":
        monkeypatch.setattr(products, "LEAST", 6 * 24 * 40 + 1)
    with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
        want, _ = run(module, x.clone().requires_grad_())
        module.zero_grad()
        found, ran = run(served(module), x.clone().requires_grad_())
    assert not ran
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, want, strict=True))


@pytest.mark.parametrize("bias", [True, False])
def test_linear_kernel_compiles_to_one_graph(bias, monkeypatch):
    """Compile the code as it runs: only the CPU's description is replaced, not the function that reads it."""
    monkeypatch.undo()
    monkeypatch.setattr(products, "CPU", {"mkl": True, "avx512_f": True, "cpu_name": "AMD"})
    module, x = served(nn.Linear(256, 256, bias=bias)), torch.randn(256, 256, requires_grad=True)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    calls = []
    with recorded_operators(calls):
        want = module(x)
    assert len(calls) == 1
    torch.testing.assert_close(compiled(x), want)
    (found,) = torch.autograd.grad(compiled(x).sum(), x)
    torch.testing.assert_close(found, torch.autograd.grad(module(x).sum(), x)[0])


def test_second_derivative_through_the_linear_kernel_is_refused():
    """Without the error the gradient of the gradient would be wrong."""
    x = torch.randn(6, 24, requires_grad=True)
    y = served(layer("Linear"))(x)
    with pytest.raises(SlapoError, match="create_graph"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)


@pytest.mark.parametrize("kind", ["GPT2", "Bert"])
def test_model_with_the_linear_kernel_has_the_gradients_of_plain_transformers(tmp_path, kind):
    small = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 50}
    cls = transformers.GPT2LMHeadModel if kind == "GPT2" else transformers.BertForMaskedLM
    config = cls.config_class(**small, intermediate_size=48)
    cls(config).save_pretrained(tmp_path)
    model = AutoScheduledModel.from_pretrained(str(tmp_path), kernels="linear").eval()
    plain = cls.from_pretrained(tmp_path).eval()
    ids, calls = torch.arange(24).view(2, 12), []
    with recorded_operators(calls):
        model(input_ids=ids, labels=ids).loss.backward()
    assert {func._schema.name for func, *_ in calls} == {
        "slapo_zoo::linear",
        "slapo_zoo::linear_backward",
    }
    plain(input_ids=ids, labels=ids).loss.backward()
    for name, want in plain.named_parameters():
        found = model.get_parameter(name).grad
        torch.testing.assert_close(found, want.grad, atol=1e-5, rtol=1e-4, msg=name)
    assert model.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("chunk_bytes", [None, 64 * 30 * 4])
def test_linear_cross_entropy_with_onednn_matmuls_equals_torch_cross_entropy(chunk_bytes):
    torch.manual_seed(0)
    given = [torch.randn(150, 16), torch.randn(30, 16)]
    target = torch.randint(30, (150,))
    ours, theirs = ([x.clone().requires_grad_() for x in given] for _ in range(2))
    found = linear_cross_entropy(*ours, target, chunk_bytes=chunk_bytes)
    want = nn.functional.cross_entropy(theirs[0] @ theirs[1].T, target)
    found.backward()
    want.backward()
    for a, b in zip([found, *(x.grad for x in ours)], [want, *(x.grad for x in theirs)], strict=True):  # fmt: skip
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_save_matmuls_recompute_policy_saves_the_output_of_the_linear_kernel():
    from slapo_zoo.language.primitives.checkpoint import POLICIES

    assert str(torch.ops.slapo_zoo.linear.default) in POLICIES["save_matmuls"]
    assert linear.linear is KERNELS["linear"].entry


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_by_one_convolution_runs_as_a_matmul_and_equals_torch_conv(dtype):
    from slapo_zoo.hf.own.wideresnet import WideResNetBottleneck, WideResNetConfig

    def make():
        torch.manual_seed(0)
        return WideResNetBottleneck(WideResNetConfig(), 16, 4, 1).to(dtype)

    def served_one():
        module = make()
        KERNELS["batch_norm_relu_add"].install(type("Site", (), {"module": module}))
        return module

    x = torch.randn(3, 16, 6, 6)
    want, _ = run(make().double(), x.double().requires_grad_())
    plain, _ = run(make(), x.to(dtype).requires_grad_())
    found, ran = run(served_one(), x.to(dtype).requires_grad_())
    assert ran == (["linear"] * 2 + ["linear_backward"] * 2 if dtype == torch.float32 else [])
    for ours, theirs, truth in zip(found, plain, want, strict=True):
        own = (theirs - truth).norm()
        assert ours.shape == truth.shape
        assert (ours - truth).norm() <= 2 * own + 1e-5


@pytest.mark.parametrize("seen_by", ["nobody", "a hook", "a forward"])
def test_swiglu_kernel_calls_down_proj_as_a_module_when_down_proj_has_hooks(seen_by):
    from transformers.models.llama.modeling_llama import LlamaMLP

    torch.manual_seed(0)
    config = transformers.LlamaConfig(hidden_size=24, intermediate_size=40, num_attention_heads=3)
    module, calls, x = LlamaMLP(config), [], torch.randn(2, 7, 24)
    want, _ = run(module, x.clone().requires_grad_())
    module.zero_grad()
    if seen_by == "a hook":
        module.down_proj.register_forward_hook(lambda *_: calls.append("down"))
    if seen_by == "a forward":
        module.down_proj.forward = lambda x: (
            calls.append("down") or nn.Linear.forward(module.down_proj, x)
        )
    KERNELS["swiglu"].install(type("Site", (), {"module": module}))
    found, ran = run(module, x.clone().requires_grad_())
    assert ("swiglu_linear" in ran) == (seen_by == "nobody") == (not calls)
    for ours, theirs in zip(found, want, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
