"""Products by slices whose contiguous axes are multiples of 8: any sizes, any strides."""

import pytest
import torch

from slapo_zoo.dispatch import gpu_matmul
from slapo_zoo.kernels.loss.cross_entropy import padded_columns


def matrix(rows, columns, transposed):
    x = torch.randn(columns, rows) if transposed else torch.randn(rows, columns)
    return (x.t() if transposed else x).bfloat16()


@pytest.mark.parametrize("sizes", [(16, 24, 8), (17, 24, 31), (9, 33, 40), (3, 5, 7), (64, 1, 23)])
@pytest.mark.parametrize("a_transposed", [False, True])
@pytest.mark.parametrize("b_transposed", [False, True])
def test_product_of_aligned_slices_equals_the_whole_product(sizes, a_transposed, b_transposed):
    torch.manual_seed(0)
    M, K, N = sizes
    a, b = matrix(M, K, a_transposed), matrix(K, N, b_transposed)
    out = padded_columns(torch.empty(0, dtype=torch.bfloat16), M, N).fill_(float("nan"))
    found, wanted = gpu_matmul.mm_into(out, a, b), a.double() @ b.double()
    assert found is out
    assert (found.double() - wanted).norm() <= 4e-3 * wanted.norm()


def test_axis_slices_except_the_last_have_multiples_of_eight():
    assert gpu_matmul._parts(50257, True) == [slice(0, 50256), slice(50256, 50257)]
    assert gpu_matmul._parts(50256, True) == [slice(0, 50256)]
    assert gpu_matmul._parts(50257, False) == [slice(0, 50257)]
    assert gpu_matmul._parts(5, True) == [slice(0, 5)]


def test_products_on_a_cpu_or_in_fp32_are_not_cut():
    x = torch.randn(9, 9)
    assert not gpu_matmul.suits(x, x)
    assert not gpu_matmul.suits(x.bfloat16(), x.bfloat16())
