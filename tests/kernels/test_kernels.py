"""Every registered kernel on its CPU path and under Triton's interpreter, also at the borders of its tiles.

All tests of the interpreter stand in one file: its process, which imports torch and Triton anew, starts once.
"""

import pytest
import torch

from kernel_checks import (
    CASES,
    CONSTANT,
    IDS,
    KERNEL_NAMES,
    check_deterministic,
    check_one_graph,
    check_operators,
    check_reference,
    check_strided,
    outputs_and_gradients,
)
from slapo_zoo.dispatch.kernel_registry import KERNELS
from slapo_zoo.kernels.dropout_mask import mask_like
from slapo_zoo.kernels.loss.cross_entropy import gradient, join, statistics

COMPOSED = ("unpadded_encoder",)  # no operator of their own
CHEAP = [
    pytest.param(n, marks=pytest.mark.slow if "attention" in n or n in COMPOSED else ())
    for n in KERNEL_NAMES
]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_ids(*names):
    return [pytest.param(DTYPES[name], id=name) for name in names]


@pytest.mark.parametrize("dtype", dtype_ids("fp32", "bf16"))
@pytest.mark.parametrize("name, shape", CASES, ids=IDS)
def test_kernel_on_cpu_equals_its_reference_implementation(name, shape, dtype):
    check_reference(name, shape, dtype)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "dtype",
    [*dtype_ids("fp32"), pytest.param(DTYPES["fp16"], id="fp16", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name, shape", CASES, ids=IDS)
def test_triton_kernel_in_the_interpreter_equals_its_reference_implementation(
    interpreter, name, shape, dtype
):
    interpreter.run(check_reference, name, shape, dtype)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", KERNEL_NAMES)
def test_kernel_gives_equal_results_for_strided_and_contiguous_inputs(interpreter, name):
    shape = KERNELS[name].shapes[1]
    check_strided(name, shape, torch.float32)
    interpreter.run(check_strided, name, shape, torch.float32)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", KERNEL_NAMES)
def test_kernel_gives_bit_equal_results_in_two_runs(interpreter, name):
    shape = KERNELS[name].shapes[1]
    check_deterministic(name, shape)
    interpreter.run(check_deterministic, name, shape)


@pytest.mark.one_in(4, 2)
@pytest.mark.parametrize("name", CHEAP)
def test_every_kernel_operator_passes_torch_library_opcheck(interpreter, name):
    if name in COMPOSED:
        pytest.skip("it is made of operations of torch")
    shape = KERNELS[name].shapes[1]
    check_operators(name, shape)
    assert interpreter.run(check_operators, name, shape), "no operator of ours ran"


@pytest.mark.one_in(3, 2)
@pytest.mark.parametrize("name", CHEAP)
def test_every_kernel_compiles_with_torch_compile_to_one_graph(interpreter, name):
    shape = KERNELS[name].shapes[1]
    check_one_graph(name, shape)
    interpreter.run(check_one_graph, name, shape)


@pytest.mark.gpu
@pytest.mark.parametrize("name, shape", CASES, ids=IDS)
def test_kernel_on_a_gpu_equals_its_reference_implementation(name, shape):
    from slapo_zoo.dispatch.choose_kernel import force

    with force("triton"):
        check_reference(name, shape, torch.bfloat16, "cuda")
        check_reference(name, shape, torch.float32, "cuda")


P = 0.25
DROPPING = [
    "dropout", "geglu", "relu_dropout", "bias_dropout_residual_layer_norm", "embedding_layer_norm",
    "local_causal_attention", "t5_attention",
]  # fmt: skip


def mask_of(name, given):
    """Return the dropout mask that the seeds of a kernel's arguments produce."""
    first = given.get("x", given.get("gate"))
    if first is None and "q" in given:
        first = (given["q"] @ given["k"].mT).detach()
    if first is None:
        first = given["word"].new_empty((*given["ids"].shape, given["word"].shape[1]))
    return mask_like(first, None, given["seeds"], given["p"])


def check_keep_is_seeds(name):
    """Check that a mask in memory and its seeds give equal results and gradients."""
    torch.manual_seed(0)
    given = KERNELS[name].inputs(*KERNELS[name].shapes[1])
    seeded = outputs_and_gradients(KERNELS[name].entry, given, torch.float32)
    assert "keep" in CONSTANT
    held = {k: v for k, v in given.items() if k not in ("seeds", "p")} | {
        "keep": mask_of(name, given)
    }
    assert bool((held["keep"] == 0).any())
    kept = outputs_and_gradients(KERNELS[name].entry, held, torch.float32)
    for what, want in seeded.items():
        torch.testing.assert_close(kept[what], want, atol=1e-6, rtol=1e-6, msg=what)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", DROPPING)
def test_kernel_gives_equal_results_for_dropout_given_as_mask_and_as_seeds(interpreter, name):
    check_keep_is_seeds(name)
    interpreter.run(check_keep_is_seeds, name)


def check_columns(C, stride):
    """Check statistics and gradient of logits whose rows may be strided; padding stays unchanged."""
    torch.manual_seed(0)
    wide = torch.full((3, stride), float("nan"))
    wide[:, :C] = torch.randn(3, C)
    logits, target = wide[:, :C], torch.tensor([C - 1, -1, 0])
    found = statistics(logits, target)
    exact = logits.double()
    want = torch.stack([exact.logsumexp(1), exact.gather(1, target.clamp(min=0)[:, None])[:, 0], exact.sum(1)])  # fmt: skip
    want[1, 1] = 0.0
    torch.testing.assert_close(found.double(), want, atol=1e-3, rtol=1e-5)
    d = torch.randn(3, 3)
    got = gradient(logits, target, found[0], d).double()
    expected = (exact - want[0][:, None]).exp() * d[0].double()[:, None] + d[2].double()[:, None]
    for row in (0, 2):
        expected[row, target[row]] += d[1, row].double()
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
    assert bool(wide[:, C:].isnan().all())


def check_all_columns():
    """Check one column, fewer than a vector, more than a block of 4096, odd and even numbers."""
    for C, stride in ((1, 1), (1, 64), (5, 16), (16, 16), (4096 + 13, 4096 + 64), (2 * 4096 + 16, 2 * 4096 + 16)):  # fmt: skip
        check_columns(C, stride)


def test_loss_kernels_equal_their_reference_at_every_vocabulary_size(interpreter):
    check_all_columns()
    interpreter.run(check_all_columns)


def check_hidden_shard():
    """Check that a shard of the vocabulary whose logits are all -inf adds nothing to the others' log-sum-exp."""
    hidden, seen, target = torch.full((2, 21), -torch.inf), torch.randn(2, 21), torch.tensor([3, 5])
    parts = [statistics(hidden, target.new_full((2,), -1)), statistics(seen, target)]
    torch.testing.assert_close(join(torch.stack(parts))[0], seen.logsumexp(1))


def check_nan_of_relu():
    """Check that relu keeps NaN, as torch's does: an overflow must not become a finite loss."""
    from slapo_zoo.kernels.batch_norm_relu_add import batch_norm_relu_add
    from slapo_zoo.kernels.bias_relu import bias_relu

    x, one = torch.tensor([[torch.nan, -1.0, 2.0]]), torch.ones(3)
    normed = batch_norm_relu_add(x[..., None, None], one, one * 0, None, one * 0, one, False)
    for y in (bias_relu(x), normed.flatten(1)):
        torch.testing.assert_close(y, x.clamp(min=0), equal_nan=True, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("check", [check_hidden_shard, check_nan_of_relu])
def test_kernel_equals_torch_on_infinite_logits_and_nan(interpreter, check):
    check()
    interpreter.run(check)


def attention_inputs(S, T, D, **more):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, D) / D**0.25 for n in (S, T, T))
    return {"q": q, "k": k, "v": v} | more


def check_attention(name, given):
    """Fail unless attention is as near to fp64 as the reference is."""
    kernel = KERNELS[name]
    truth = outputs_and_gradients(kernel.reference, given, torch.float64)
    found = outputs_and_gradients(kernel.entry, given, torch.float32)
    for what, want in truth.items():
        torch.testing.assert_close(found[what].double(), want, atol=2e-5, rtol=2e-4, msg=what)


def check_real_heads():
    """Check heads of 64 and 128 columns over several tiles, with more keys than queries, and a window."""
    for D, window in ((64, 20), (128, 0)):
        seeds = torch.tensor([3, 5])
        given = attention_inputs(70, 100, D, window=window, seeds=seeds, p=P, scale=D**-0.5)
        check_attention("local_causal_attention", given)
    weight = torch.randn(32, 2)
    check_attention("t5_attention", attention_inputs(40, 70, 64, weight=weight, bidirectional=True))


def test_attention_kernel_on_sequences_of_several_tiles_equals_its_reference(interpreter):
    check_real_heads()
    interpreter.run(check_real_heads)


def check_nothing_seen():
    """Check that a row whose keys are all padding gives zeros and no gradient, and changes no other row, as in sdpa."""
    from slapo_zoo.kernels.blocked_attention import attention, in_one_piece

    given = [torch.randn(2, 2, 9, 8, requires_grad=True) for _ in range(3)]
    seen = torch.tensor([[False], [True]]).expand(2, 9)
    rest = None, None, seen, None, None, 0.0
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *given, seen[:, None, None].expand(2, 1, 9, 9), scale=1.0
    )
    grads = torch.autograd.grad(wanted.sum(), given)
    for out in (attention(*given, key_mask=seen), in_one_piece(*given, 1.0, False, 0, *rest)):
        assert bool((out[0] == 0).all())
        torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-4)
        for found, want in zip(torch.autograd.grad(out.sum(), given), grads, strict=True):
            torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-4)


def check_no_queries():
    """Check that keys and values that no query reads have a gradient of zeros, not of unset memory."""
    from slapo_zoo.kernels.blocked_attention import attention

    q, k, v = (torch.ones(1, 2, n, 8, requires_grad=True) for n in (0, 3, 3))
    torch.use_deterministic_algorithms(True)  # fills unset memory with NaN
    try:
        attention(q, k, v).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert not any(bool(t.grad.any()) for t in (k, v))


def check_pairs():
    """Check that a [query, key] mask equals a key mask where all queries see the same keys."""
    from slapo_zoo.kernels.blocked_attention import attention

    torch.manual_seed(0)
    found = []
    keys = torch.rand(2, 70) > 0.3
    q, k, v = (torch.randn(2, 2, 70, 8) for _ in range(3))
    own = torch.rand(2, 70, 70) > 0.5
    for mask in (keys, keys[:, None].expand(2, 70, 70), own):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out = attention(*leaves, key_mask=mask, seeds=torch.arange(4), p=P)
        out.square().sum().backward()
        found.append([out.detach(), *(t.grad for t in leaves)])
    for one, two in zip(*found[:2], strict=True):
        torch.testing.assert_close(one, two)
    weights = (q @ k.mT).masked_fill(~own[:, None], -torch.inf).softmax(-1).nan_to_num(0.0)
    want = weights * mask_like(weights, None, torch.arange(4), P) @ v
    torch.testing.assert_close(found[2][0], want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("check", [check_nothing_seen, check_no_queries, check_pairs])
def test_attention_kernel_output_does_not_depend_on_masked_keys(interpreter, check):
    check()
    interpreter.run(check)
