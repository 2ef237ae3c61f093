"""Tables of kernel timings, asked about sizes and devices that were not measured."""

import json

import pytest

from slapo_zoo.dispatch import tables
from slapo_zoo.dispatch.choose_kernel import KEPT, decide

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Return a function that writes kernel timings, into a user's folder or an empty package."""
    monkeypatch.setattr(tables, "MEASURED", tmp_path / "package")
    monkeypatch.setattr(tables, "_kept", {})
    monkeypatch.setenv("SLAPO_ZOO_CACHE", str(tmp_path))

    def write(device, ratios, where="kernels", **more):
        folder = tmp_path / where
        folder.mkdir(exist_ok=True)
        dispatch = {key: "triton" if ratio >= KEPT else "torch" for key, ratio in ratios.items()}
        content = {"device": device, "dispatch": dispatch, "ratios": ratios, **more}
        (folder / f"{tables.slug(device)}.json").write_text(json.dumps(content))

    return write


def test_kernel_timings_measured_on_one_gpu_apply_to_gpus_of_equal_compute_capability(measured):
    measured(H100, {"rms_norm:bfloat16:4096": 2.0}, capability="9.0")
    found = decide("rms_norm", "bfloat16", 4096, H200)
    assert found.runs
    assert f"on {H100}, the same capability" in found.reason
    assert not decide("rms_norm", "bfloat16", 4096, "NVIDIA A100-SXM4-80GB").runs


def test_kernel_timings_are_interpolated_between_sizes_and_unmeasured_below_the_smallest(measured):
    measured(H100, {"rms_norm:bfloat16:1024": 0.25, "rms_norm:bfloat16:16384": 4.0})
    assert not decide("rms_norm", "bfloat16", 1500, H100).runs  # 2048: 0.25 * 16 ** 0.25 = 0.5
    assert decide("rms_norm", "bfloat16", 4096, H100).runs
    assert "about 1.00 times" in decide("rms_norm", "bfloat16", 4096, H100).reason
    assert decide("rms_norm", "bfloat16", 32768, H100).runs
    assert decide("rms_norm", "bfloat16", 64, H100).reason.startswith("unmeasured")


def test_user_kernel_timings_override_packaged_timings(measured):
    measured(H100, {"geglu:bfloat16:1024": 0.5, "swiglu:bfloat16:1024": 2.0}, "package")
    measured(H100, {"geglu:bfloat16:1024": 3.0})
    assert decide("geglu", "bfloat16", 1024, H100).runs
    assert decide("swiglu", "bfloat16", 1024, H100).runs


def test_measured_kernel_timing_overrides_the_estimated_speedup(measured):
    assert decide("linear_cross_entropy", "bfloat16", 1024, H100).reason.startswith("estimated")
    tables.forget()
    measured(H100, {"linear_cross_entropy:bfloat16:1024": 0.5})
    assert not decide("linear_cross_entropy", "bfloat16", 1024, H100).runs
