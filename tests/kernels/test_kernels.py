"""Every registered kernel on its CPU path and under Triton's interpreter."""

import pytest
import torch

from kernel_checks import (
    CASES,
    IDS,
    KERNEL_NAMES,
    check_deterministic,
    check_one_graph,
    check_operators,
    check_reference,
    check_strided,
)
from slapo_zoo.dispatch.kernel_registry import KERNELS

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
