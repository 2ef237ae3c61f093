"""Checks of every kernel, on whatever path runs: reference, opcheck, one graph."""

import contextlib
from importlib import import_module
from pathlib import Path

import torch

from slapo_zoo.dispatch.kernel_registry import KERNELS, NAMESPACE

ROOT = Path(__file__).parents[2]
for file in sorted((ROOT / "kernels").glob("*.py")):
    if not file.stem.endswith("_triton") and not file.stem.startswith("triton_"):
        import_module(f"slapo_zoo.kernels.{file.stem}")

KERNEL_NAMES = [name for name, kernel in KERNELS.items() if kernel.inputs is not None]
CASES = [(name, shape) for name in KERNEL_NAMES for shape in KERNELS[name].shapes]
CONSTANT = ("keep", "running_mean", "running_var")  # arguments that have no gradient
IDS = [f"{name}-{'x'.join(map(str, shape))}" for name, shape in CASES]


def arguments(name, shape, dtype, device="cpu"):
    """Return random arguments in float64 whose values `dtype` can represent."""
    torch.manual_seed(0)
    found = KERNELS[name].inputs(*shape, device=device)
    return {k: v.to(dtype).double() if _is_float(v) else v for k, v in found.items()}


def _is_float(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def strided(x):
    """Return the same values in a non-contiguous tensor."""
    if x.ndim == 0:
        return x
    wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), float("nan"))
    wide[..., ::2] = x
    return wide[..., ::2]


@contextlib.contextmanager
def poisoned():
    """Context in which newly allocated memory holds NaN."""
    names = ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty"))
    real = [getattr(owner, name) for owner, name in names]

    def nan_filled(function):
        def call(*args, **kwargs):
            out = function(*args, **kwargs)
            return out.fill_(float("nan")) if out.is_floating_point() else out

        return call

    for (owner, name), function in zip(names, real, strict=True):
        setattr(owner, name, nan_filled(function))
    try:
        yield
    finally:
        for (owner, name), function in zip(names, real, strict=True):
            setattr(owner, name, function)


def outputs_and_gradients(function, given, dtype, layout=lambda x: x):
    """Return outputs by number and gradients by name."""
    leaves = {k: v.to(dtype).clone().requires_grad_(k not in CONSTANT) if _is_float(v) else v
              for k, v in given.items()}  # fmt: skip
    used = {k: layout(v) if _is_float(v) else v for k, v in leaves.items()}
    out = function(**used)
    outs = out if isinstance(out, tuple) else (out,)
    generator = torch.Generator().manual_seed(1)
    total = sum((o * torch.randn(o.shape, generator=generator).to(dtype).to(o)).sum() for o in outs)
    total.backward()
    found = {f"out{i}": o.detach() for i, o in enumerate(outs)}
    return found | {
        f"d{k}": v.grad for k, v in leaves.items() if _is_float(v) and v.grad is not None
    }


def check_reference(name, shape, dtype, device="cpu", layout=None, floor=8.0):
    """Fail where a kernel is more than twice as far from fp64 as the reference in the same dtype."""
    kernel = KERNELS[name]
    given = arguments(name, shape, dtype, device)
    truth = outputs_and_gradients(kernel.reference, given, torch.float64)
    plain = outputs_and_gradients(kernel.reference, given, dtype)
    with poisoned():
        fast = outputs_and_gradients(kernel.entry, given, dtype, layout or (lambda x: x))
    assert set(fast) == set(truth), (set(fast), set(truth))
    for what, want in truth.items():
        found = fast[what].double()
        assert found.shape == want.shape, f"{what}: {found.shape} != {want.shape}"
        if not want.numel():
            continue
        scale = float(want.abs().max())
        own = float((plain[what].double() - want).abs().max())
        allowed = 2 * own + floor * torch.finfo(dtype).eps * scale + 1e-12
        error = float((found - want).abs().max())
        assert error <= allowed, (
            f"{what}: error {error:.2e}, allowed {allowed:.2e}, scale {scale:.2e}"
        )


def check_strided(name, shape, dtype, device="cpu"):
    check_reference(name, shape, dtype, device, strided)


def check_deterministic(name, shape, device="cpu"):
    """Fail unless the same arguments give the same bits twice."""
    given = arguments(name, shape, torch.float32, device)
    one, two = (outputs_and_gradients(KERNELS[name].entry, given, torch.float32) for _ in range(2))
    assert all(torch.equal(one[what], two[what]) for what in one)


@contextlib.contextmanager
def recorded_operators(calls):
    """Context that records every call of an operator of this package, with its arguments."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == NAMESPACE:
                calls.append((func, args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    with Recorder():
        yield


def check_operators(name, shape):
    """Run torch.library.opcheck on every operator that the kernel calls, forward and backward."""
    calls = []
    given = arguments(name, shape, torch.float32)
    with recorded_operators(calls):
        outputs_and_gradients(KERNELS[name].entry, given, torch.float32)
    for func, args, kwargs in calls:
        fresh = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args]
        if func._schema.name.endswith("_backward") or "_gradient" in func._schema.name:
            tests = ("test_schema", "test_faketensor")  # nobody differentiates a gradient
        else:
            fresh = [a.requires_grad_() if _is_float(a) else a for a in fresh]
            tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")  # fmt: skip
        torch.library.opcheck(func, tuple(fresh), kwargs, test_utils=tests)
    return sorted({func._schema.name.split("::")[1] for func, *_ in calls})


def check_one_graph(name, shape):
    """Fail unless torch.compile(fullgraph=True, dynamic=True) gives one graph for all numbers of rows."""
    torch._dynamo.reset()
    frames = []

    def backend(graph, example_inputs):
        frames.append(graph)
        return graph  # opcheck tests the operators with AOTAutograd

    compiled = torch.compile(KERNELS[name].entry, backend=backend, fullgraph=True, dynamic=True)
    for rows in (shape[0], shape[0] + 3, shape[0] + 5):
        given = arguments(name, (rows, *shape[1:]), torch.float32)
        found = outputs_and_gradients(compiled, given, torch.float32)
        want = outputs_and_gradients(KERNELS[name].entry, given, torch.float32)
        for what in want:
            torch.testing.assert_close(found[what], want[what], atol=1e-5, rtol=1e-5)
    torch._dynamo.reset()
    assert len(frames) == 1, f"{len(frames)} graphs"
