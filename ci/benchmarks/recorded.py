"""Launches of the Triton kernels, recorded on meta tensors and compiled for GPUs that this machine lacks.

Recording finds the argument types that a launcher really passes: None, the integer 1, sizes that 16 does not divide.
"""

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

CHIPS = {80: "sm_80", 86: "sm_86", 90: "sm_90a", 100: "sm_100a", 120: "sm_120a"}
SHARED = {80: 163, 86: 99, 90: 227, 100: 227, 120: 99}  # KiB of shared memory that a block may have
TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32",
         torch.int64: "*i64", torch.int32: "*i32", torch.uint8: "*u8", torch.bool: "*i1"}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")  # options of the compiler
ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(".".join(file.relative_to(ROOT / "kernels").with_suffix("").parts)
                 for file in (ROOT / "kernels").rglob("*_triton.py"))  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """One launch of a Triton kernel, with everything that its binary depends on.

    Args:
        module: name below slapo_zoo.kernels of the module that launched it ("loss.cross_entropy_triton").
        kernel: name of the kernel function.
        signature: (name, type) of each argument.
        constants: (name, value) of arguments that are part of the binary.
        even: names of arguments that are multiples of 16.
        options: (name, value) of each option of the compiler.
        grid: number of programs along each axis.
    """

    module: str
    kernel: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    even: tuple[str, ...]
    options: tuple[tuple[str, Any], ...]
    grid: tuple[int, ...]

    @property
    def binary(self) -> tuple:
        """Return a key that is equal for two launches that share a binary."""
        return self.module, self.kernel, self.signature, self.constants, self.even, self.options

    def __str__(self) -> str:
        flags = [f"{k}={v}" for k, v in self.constants if v is not None]
        kinds = sorted({kind for _, kind in self.signature if kind in ("*bf16", "*fp16", "*fp32")})
        odd = [n for n, kind in self.signature if kind in ("i32", "i64") and n not in self.even]
        return " ".join([self.kernel, *(k[1:] for k in kinds), *flags, *(f"odd:{n}" for n in odd)])


def launch_of(module: str, function: Any, grid: Any, args: tuple, options: dict) -> Launch:
    """Return the launch that a call `function[grid](*args, **options)` makes, typed as triton.runtime.jit does."""
    given = dict(zip(function.arg_names, args, strict=False)) | options
    signature, constants, even = [], [], []
    for parameter in function.params:
        name, value = parameter.name, given[parameter.name]
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature.append((name, "constexpr"))
            constants.append((name, value))
            continue
        signature.append((name, _type(value)))
        if isinstance(value, torch.Tensor) or (type(value) is int and value % 16 == 0):
            even.append(name)
    chosen = tuple((name, given[name]) for name in OPTIONS if name in given)
    return Launch(module, function.__name__, tuple(signature), tuple(constants), tuple(even), chosen, grid)  # fmt: skip


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Context in which kernels are not run; it yields a list to which every launch is added."""
    found: list[Launch] = []
    before = []
    for module in MODULES:
        owner = import_module(f"slapo_zoo.kernels.{module}")
        for name in [name for name in vars(owner) if name.endswith("_kernel")]:
            before.append((owner, name, getattr(owner, name)))
            setattr(owner, name, _Recorder(module, getattr(owner, name), found))
    try:
        yield found
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


class _Recorder:
    def __init__(self, module: str, function: Any, found: list[Launch]):
        self.module, self.function, self.found = module, function, found

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            self.found.append(launch_of(self.module, self.function, grid, args, options))

        return launch


def compiled(launch: Launch, chip: int) -> dict[str, Any]:
    """Compile a launch for a chip (compute capability times 10); return the resources of its binary.

    Returns:
        {"registers", "spilled": bytes, "shared_kib", "load_bytes": bytes of the widest load}; {"error": text} on
            failure.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(import_module(f"slapo_zoo.kernels.{launch.module}"), launch.kernel)
    names = [name for name, _ in launch.signature]
    constants = {(names.index(name),): value for name, value in launch.constants}
    even = {(names.index(name),): [["tt.divisibility", 16]] for name in launch.even}
    source = ASTSource(function, dict(launch.signature), constants, even)
    log = io.StringIO()
    try:
        with assembler_speaks(), redirect_stdout(log):
            target = GPUTarget("cuda", chip, 32)
            found = triton.compile(source, target=target, options=dict(launch.options))
    except Exception as error:  # any error means that the launch cannot be compiled for this chip
        return {"error": f"{type(error).__name__}: {str(error).strip()[-200:]}"}
    spills = re.findall(r"(\d+) bytes spill", log.getvalue())
    registers = re.findall(r"Used (\d+) registers", log.getvalue())
    return {"registers": int(registers[0]), "spilled": sum(map(int, spills)),
            "shared_kib": found.metadata.shared / 1024, "load_bytes": widest(found.asm["ptx"])}  # fmt: skip


@contextmanager
def assembler_speaks() -> Iterator[None]:
    """Context in which Triton compiles without its cache and prints the output of NVIDIA's assembler."""
    from triton import knobs

    with knobs.nvidia.scope(), knobs.compilation.scope():
        knobs.nvidia.dump_ptxas_log = knobs.compilation.always_compile = True
        yield


def widest(ptx: str) -> int:
    """Return the bytes of the widest load from global memory in the text of a PTX program; 0 if there is none."""
    loads = re.findall(r"ld\.global(?:\.[\w:]+)*?(\.v[248])?\.b(\d+)", ptx)
    sizes = [int(vector[2:] or 1) * int(bits) // 8 for vector, bits in loads]
    copies = re.findall(r"cp\.async\.\w+\.shared\.global[^;]*?, (0x[0-9a-f]+|\d+)", ptx)
    return max([*sizes, *(int(size, 0) for size in copies)], default=0)
