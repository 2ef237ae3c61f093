"""Timings on a GPU: which kernels become a default where launches take the host longer than the GPU computes."""

import pytest

from slapo_zoo.dispatch.benchmark import WIDE, cases, dispatch


def row(ratio, device_ms, ours_ms, eager_ms):
    host = {"host ours ms": ours_ms, "host eager ms": eager_ms}
    return {"bucket": "k:bfloat16:64", "eager / ours": ratio, "p50 ms": device_ms, **host}


@pytest.mark.parametrize(
    ("measured", "path"),
    [
        (row(1.5, 2.0, 1.0, 0.3), "triton"),  # the GPU computes longer than the host launches
        (row(1.5, 0.1, 1.0, 1.0), "triton"),  # launches take as long as the eager ones
        (row(1.5, 0.1, 1.0, 0.3), "torch"),  # a step would wait for the host
        (row(0.9, 2.0, 0.1, 0.3), "torch"),  # slower on the GPU
    ],
)
def test_kernel_becomes_a_default_only_where_neither_device_nor_host_loses(measured, path):
    table, ratios = dispatch([measured], "triton")
    assert table == {"k:bfloat16:64": path}
    assert ratios == {"k:bfloat16:64": measured["eager / ours"]}


def test_benchmark_on_a_gpu_adds_widths_of_large_models():
    wide = {(name, shape) for name, shapes in WIDE.items() for shape in shapes}
    assert wide <= {(name, shape) for name, shape, _ in cases(False, "", "cuda")}
    assert not wide & {(name, shape) for name, shape, _ in cases(False, "", "cpu")}
