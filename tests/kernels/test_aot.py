"""Every Triton kernel compiles for NVIDIA GPUs, without one: no register spilled, wide loads."""

import re
import subprocess
import tempfile
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted(file.stem for file in (ROOT / "kernels").glob("*_triton.py"))
CHIPS = {80: "sm_80", 90: "sm_90a", 100: "sm_100a"}
SCALAR = {
    "num_warps",
    "num_stages",
    "enable_fp_fusion",
}  # options of the compiler, not constants of the kernel


def listed(module):
    return import_module(f"slapo_zoo.kernels.{module}").AOT


def compiled(kernel, types, constants, chip):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    given = {name: constants[name] for name in names if name in constants}
    signature = {name: "constexpr" if name in given else types[name] for name in names}
    # what the launcher finds out about contiguous tensors and even sizes
    even = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names)
            if signature[name].startswith("*") or name in ("N", "C", "S", "T", "H")}  # fmt: skip
    source = ASTSource(kernel, signature, {(names.index(n),): v for n, v in given.items()}, even)
    options = {name: constants[name] for name in SCALAR if name in constants}
    return triton.compile(source, target=GPUTarget("cuda", chip, 32), options=options)


def assembler_report(ptx, chip):
    """What NVIDIA's assembler says about registers and spills."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas-blackwell"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [str(tool), "-v", f"--gpu-name={CHIPS[chip]}", file.name, "-o", "/dev/null"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stderr


def check(module, number, chip):
    kernel, types, constants = listed(module)[number]
    got = compiled(kernel, types, constants, chip)
    assert got.metadata.shared <= 227 * 1024 if chip > 80 else 163 * 1024
    report = assembler_report(got.asm["ptx"], chip)
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", report))
    assert spills == 0, report
    wide = re.findall(
        r"ld\.global[\w.:]*\.v[248]\.b32|cp\.async[\w.]*|ld\.global[\w.:]*\.v4", got.asm["ptx"]
    )
    assert wide, "no load is wider than an element"


CASES = [(module, number) for module in MODULES for number in range(len(listed(module)))]


def name_of(module, number):
    kernel, _, constants = listed(module)[number]
    flags = "-".join(str(v) for k, v in constants.items() if k not in SCALAR)
    return f"{module}-{kernel.__name__}-{flags}"


@pytest.mark.parametrize("module, number", CASES, ids=[name_of(*case) for case in CASES])
def test_compiles_for_hopper(module, number):
    check(module, number, 90)


@pytest.mark.slow
@pytest.mark.parametrize("chip", [80, 100])
@pytest.mark.parametrize("module, number", CASES, ids=[name_of(*case) for case in CASES])
def test_compiles_for_ampere_and_blackwell(module, number, chip):
    check(module, number, chip)
