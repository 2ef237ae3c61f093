"""Losses of a sharded vocabulary on 2 to 4 ranks; memory of the losses without logits."""

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from slapo_zoo.parallel.collectives import group_size
from slapo_zoo.parallel.local_tensors import local_part
from slapo_zoo.parallel.placement import Placement
from slapo_zoo.weights.ledger import AnonymousPeak, anonymous_bytes

V, N, H = 37, 11, 8  # 37 columns on 2, 3 and 4 ranks: padding on the last, targets on every one


def whole():
    torch.manual_seed(0)
    x, weight, bias = torch.randn(N, H), torch.randn(V, H), torch.randn(V)
    target = torch.cat([torch.tensor([0, V - 1, 18, 19]), torch.randint(V, (N - 4,))])
    target[[5, 9]] = -100
    return x, weight, bias, target, torch.rand(N)


def run_parallel(smoothing):
    from slapo_zoo.kernels.loss.lm_loss import lm_loss

    group = dist.group.WORLD
    n, r = group_size(group), dist.get_rank()
    x, weight, bias, target, scale = whole()
    cut = Placement(0, pad=True)
    w, b = (local_part(t, cut, n, r).requires_grad_() for t in (weight, bias))
    logits = (x @ w.T + b).detach().requires_grad_()
    options = {"label_smoothing": smoothing, "vocab_size": V, "group": group}
    loss = lm_loss(logits, None, target, reduction="none", **options)
    (loss * scale).sum().backward()
    x.requires_grad_()
    linear = lm_loss(x, w, target, b, chunk_bytes=1, **options)
    (linear * 3).backward()
    return [t.detach() for t in (loss, logits.grad, linear, x.grad, w.grad, b.grad)]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("nprocs", [2, 3, 4])
def test_vocabulary_parallel_losses_and_gradients_equal_those_of_one_rank(ranks, nprocs, smoothing):
    x, weight, bias, target, scale = (t.double() if t.is_floating_point() else t for t in whole())
    x, weight, bias = (t.requires_grad_() for t in (x, weight, bias))
    logits = x @ weight.T + bias
    options = {"label_smoothing": smoothing}
    loss = functional.cross_entropy(logits, target, reduction="none", **options)
    (d_logits,) = torch.autograd.grad((loss * scale).sum(), logits, retain_graph=True)
    mean = functional.cross_entropy(logits, target, **options)
    (mean * 3).backward()
    cut = Placement(0, pad=True)
    for r, found in enumerate(ranks.run(run_parallel, nprocs, smoothing)):
        columns = local_part(d_logits.T, cut, nprocs, r).T
        dw, db = (local_part(t.grad, cut, nprocs, r) for t in (weight, bias))
        for got, want in zip(found, (loss, columns, mean, x.grad, dw, db), strict=True):
            torch.testing.assert_close(got.double(), want.detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_reference_of_the_loss_kernel_has_the_reductions_of_torch(reduction):
    from slapo_zoo.kernels.linear_cross_entropy import reference

    x, weight, bias, target, _ = whole()
    found = reference(x, weight, target, bias, reduction=reduction)
    want = functional.cross_entropy(x @ weight.T + bias, target, reduction=reduction)
    torch.testing.assert_close(found, want)


def test_loss_kernel_with_labels_beyond_the_vocabulary_raises():
    from slapo_zoo.kernels.linear_cross_entropy import linear_cross_entropy

    with pytest.raises(RuntimeError, match="labels: found one beyond"):
        linear_cross_entropy(torch.zeros(2, 4), torch.zeros(5, 4), torch.tensor([1, 5]))


def test_loss_of_bfloat16_hidden_states_is_float32_on_a_gpu_too():
    """In bfloat16 a sum over 2,000 targets is wrong by 2 %."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from slapo_zoo.dispatch.choose_kernel import force
    from slapo_zoo.kernels.linear_cross_entropy import linear_cross_entropy

    with FakeTensorMode(), force("torch"):
        x, weight = (torch.empty(n, H, dtype=torch.bfloat16, device="cuda") for n in (N, V))
        loss = linear_cross_entropy(x, weight, torch.empty(N, dtype=torch.int64, device="cuda"))
    assert (loss.dtype, loss.device.type) == (torch.float32, "cuda")


def test_linear_cross_entropy_with_ignored_labels_and_tied_weight_equals_torch():
    from slapo_zoo.kernels.linear_cross_entropy import linear_cross_entropy

    x, weight, _, target, _ = whole()
    found = []
    for loss in (linear_cross_entropy, lambda x, w, t: functional.cross_entropy(x @ w.T, t)):
        w = weight.clone().requires_grad_()
        loss(functional.embedding(target.clamp(min=0), w) + x, w, target).backward()
        found.append(w.grad)
    torch.testing.assert_close(*found)


def test_second_backward_of_linear_cross_entropy_gives_the_gradients_of_the_first():
    """The gradients that the forward computed serve a second backward too."""
    from slapo_zoo.kernels.linear_cross_entropy import linear_cross_entropy

    x, weight, _, target, _ = whole()
    x.requires_grad_()
    loss = linear_cross_entropy(x, weight, target)
    one, two = (torch.autograd.grad(loss * 2, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(one, two)
    assert one.any()


def test_torch_function_mode_intercepts_linear_cross_entropy():
    from slapo_zoo.kernels.linear_cross_entropy import linear_cross_entropy

    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x, weight, _, target, _ = whole()
    with Mode():
        linear_cross_entropy(x, weight, target)
    assert linear_cross_entropy in seen


def growth(loss, *tensors):
    """Return the peak growth of anonymous memory in forward and backward, in bytes."""
    for t in tensors:
        t.grad = torch.zeros_like(t)  # gradients are the same for all
    with AnonymousPeak() as peak:
        loss().backward()
    return peak.growth


@pytest.fixture(scope="module")
def sizes():
    """Return tensors whose logits are 160 MB."""
    if not anonymous_bytes():
        pytest.skip("this kernel does not tell anonymous memory")
    torch.manual_seed(0)
    hidden, weight = torch.randn(4, 500, 32), torch.randn(20_000, 32) / 6
    labels = torch.randint(20_000, (4, 500))
    return hidden.requires_grad_(), weight.requires_grad_(), labels, 4 * 500 * 20_000 * 4


def test_linear_cross_entropy_kernel_has_a_smaller_memory_peak_than_the_logits(sizes):
    from slapo_zoo.kernels.linear_cross_entropy import linear_cross_entropy

    hidden, weight, labels, logits = sizes
    x, target = hidden.flatten(0, 1), labels.flatten()
    linear_cross_entropy(
        x[:4], weight[:8], target[:4] % 8
    ).backward()  # the first call imports modules
    plain = growth(lambda: functional.cross_entropy(x @ weight.T, target), hidden, weight)
    ours = growth(
        lambda: linear_cross_entropy(x, weight, target, chunk_bytes=1 << 23), hidden, weight
    )
    assert plain > 1.8 * logits, "the yardstick does not hold its logits"
    assert ours < 0.4 * logits, f"{ours / logits:.2f} of the logits, plain {plain / logits:.2f}"


def test_sparse_mlm_head_kernel_has_a_smaller_memory_peak_than_the_logits(sizes):
    from slapo_zoo.kernels.sparse_mlm_head_loss import sparse_mlm_head_loss

    hidden, weight, labels, logits = sizes
    labels = torch.where(torch.arange(500) % 7 == 0, labels, -100)
    ours = growth(lambda: sparse_mlm_head_loss(hidden, labels, torch.tanh, weight), hidden, weight)
    assert ours < 0.5 * logits, f"{ours / logits:.2f} of the logits"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [1.0, 1 / 3])
def test_linear_cross_entropy_gradients_in_bf16_use_the_number_of_targets_unrounded(dtype, factor):
    """1/1023 rounded to bf16 is off by 0.1 %, and so would be every gradient."""
    from slapo_zoo.kernels.linear_cross_entropy import linear_cross_entropy

    torch.manual_seed(0)
    x, weight, target = torch.randn(1023, 32), torch.randn(200, 32) / 4, torch.randint(200, (1023,))
    plain = lambda x, w, t: functional.cross_entropy((x @ w.T).float(), t)  # noqa: E731

    def gradients(loss, dtype):
        found = [t.to(dtype).detach().clone().requires_grad_() for t in (x, weight)]
        (factor * loss(*found, target)).backward()
        return [t.grad.double() for t in found]

    exact = gradients(plain, torch.float64)
    for mine, other, want in zip(gradients(linear_cross_entropy, dtype), gradients(plain, dtype), exact, strict=True):  # fmt: skip
        scales = [abs(float((g * want).sum() / (want * want).sum()) - 1) for g in (mine, other)]
        assert scales[0] <= scales[1] + 1e-4
        assert (mine - want).norm() <= 1.1 * (other - want).norm()
