"""Every launch of the Triton kernels compiles for NVIDIA GPUs, without one: nothing spilled, wide loads.

The launches are those that the launchers make at real sizes; `ci/bench.py launches` prints them all.
"""

import importlib
import sys
from pathlib import Path

import pytest
import torch

CI = str(Path(__file__).parents[2] / "ci")
WIDE = 16  # bytes of a load


@pytest.fixture(scope="module")
def bench():
    sys.path.insert(0, CI)
    try:
        yield importlib.import_module("benchmarks.launches")
    finally:
        sys.path.remove(CI)


def kind_of(launch):
    """Return what identifies one compiled variant: the kernel and its branches, not its sizes."""
    flags = dict(launch.constants)
    names = ("MASK", "TABLE", "KEYS", "KIND", "RMS", "X_BIAS")
    return launch.module, launch.kernel, *(flags.get(name) for name in names)


def check(bench, launch, label, chip):
    row = bench.judged(chip, launch, label)
    assert "beyond" not in row, row
    odd = any(name in ("N", "stride") and name not in launch.even for name, _ in launch.signature)
    assert odd or row["load_bytes"] >= WIDE, row


@pytest.mark.slow
def test_every_compile_time_branch_of_the_triton_kernels_compiles_for_hopper(bench):
    """Compile for the masks of scheduled models, an odd vocabulary and heads of 128, among others."""
    kinds = {}
    for launch, label in bench.launches((torch.bfloat16,)).items():
        kinds[kind_of(launch)[:-4]] = launch, label
    masks = {(module, dict(k.constants).get("MASK")) for (module, *_), (k, _) in kinds.items()}
    for module in ("norm_triton", "activation_triton", "attention_triton", "dropout_triton"):
        assert {(module, "keep"), (module, "seeds")} <= masks or module == "dropout_triton"
    for launch, label in kinds.values():
        check(bench, launch, label, 90)


@pytest.mark.slow
@pytest.mark.parametrize("chip", [80, 90, 100])
def test_every_recorded_triton_launch_compiles_ahead_of_time(bench, chip):
    found = bench.launches((torch.bfloat16,))
    assert len(found) > 100
    for launch, label in found.items():
        check(bench, launch, label, chip)


def test_recorded_triton_launch_has_the_constants_and_types_of_the_compiled_signature(bench):
    """None and 1 are constants and multiples of 16 are marked as such, as in triton.runtime.jit."""
    from benchmarks.recorded import recording

    from slapo_zoo.kernels import norm_triton

    x, w = bench.meta(32, 48), bench.meta(48)
    with recording() as found:
        norm_triton.forward(x, w, None, None, None, x, None, 0.1, 1e-5, True)
    (launch,) = found
    constants, types = dict(launch.constants), dict(launch.signature)
    assert constants["seeds"] is None is constants["bias"]
    assert constants["cell"] == 1
    assert types["x"] == types["keep"] == "*bf16"
    assert types["M"] == "i32"
    assert {"x", "keep", "M", "N"} <= set(launch.even)
    assert "threshold" not in launch.even
