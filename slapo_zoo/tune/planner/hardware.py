"""Hardware profiles of the planner: rates of a device and its links, from data sheets or measured."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from slapo_zoo.errors import SlapoError

GIB = 2**30
DIVISORS = ("bandwidth", "link", "network", "per_node")
CPU_SCRATCH = 4.0  # fitted to what `ci/bench.py memory` measured


@dataclass(frozen=True)
class Hardware:
    """Hardware profile: the speeds and sizes of a cluster's devices and links, with which the planner simulates steps.

    Args:
        name: name of the device.
        source: where the numbers come from.
        matmul: dtype --> floating-point operations per second of large matrix products.
        bandwidth: bytes per second that operations other than matrix products read and write.
        operation_s: seconds that the host needs to launch one operation.
        link: bytes per second that a rank sends in a collective within its node.
        network: bytes per second of a device to another node, one way.
        latency_s: seconds of a collective that sends nothing.
        hop_s: seconds that each rank of a node adds to a collective.
        node_hops: n nodes add log2(n) * `node_hops` * `hop_s` seconds to a collective.
        per_node: devices of a node.
        memory: bytes of a device.
        reserved: bytes that libraries and the context take on each device.
        optimizer_copies: temporary memory of the optimizer step, as a multiple of the largest parameter; not used with
            `foreach`, which takes temporary memory for all parameters.
        scratch: temporary memory inside operations, which a dry run cannot see, as a multiple of the bytes of a block's
            output for one micro-batch.
        foreach: whether torch's optimizers use their multi-tensor implementation on this device.
        multiprocessors: number of multiprocessors; each computes one tile of a product at a time. 0: ignore tiles.
        peak: 16-bit operations per second of the data sheet; 0 where unknown.
        host: bytes per second between device and host memory, one way; 0 where both are the same memory.
        error: mean relative error of forecast step times against published runs; 0 if never compared.
        fill: to begin and end a tile takes as long as this number of additional elements along the summed axis.
    """

    name: str
    source: str
    matmul: Mapping[str, float]
    bandwidth: float
    operation_s: float
    link: float
    network: float
    latency_s: float = 1e-5
    hop_s: float = 0.0
    node_hops: float = 0.0
    per_node: int = 8
    memory: float = 80 * GIB
    reserved: float = 1.5 * GIB
    optimizer_copies: float = 2.0
    foreach: bool = True
    scratch: float = 0.0
    multiprocessors: int = 0
    fill: float = 0.0
    peak: float = 0.0
    error: float = 0.0
    host: float = 0.0

    def __post_init__(self) -> None:
        """Raise SlapoError for a figure that is no number, infinite, negative, or 0 where the planner divides by it."""
        rates = self.matmul if isinstance(self.matmul, Mapping) else {}
        figures = {f.name: getattr(self, f.name) for f in fields(self) if f.type in (int, float)}
        figures |= {f"matmul {dtype}": v for dtype, v in (rates or {"of a dtype": None}).items()}
        for name, value in figures.items():
            divides = name in DIVISORS or name.startswith("matmul")
            fits = isinstance(value, int | float) and math.isfinite(value) and value >= 0
            if not fits or (divides and value == 0):
                problem = f"found {value!r}, expected a number {'above 0' if divides else 'of at least 0'}"
                hint = "write a profile with `slapo-zoo calibrate FILE`, and change its figures"
                raise SlapoError("plan", f"hardware: {name}", problem, hint)

    def flops(self, dtype: str) -> float:
        """Return the operations per second of matrix products in `dtype`, else in "bfloat16", else the highest one."""
        return self.matmul.get(dtype) or self.matmul.get("bfloat16") or max(self.matmul.values())

    def write(self, path: Path) -> None:
        """Write the profile as a JSON file, for the option `--hardware FILE`."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


# Fitted once, to the single-node half of the published runs of vTrain and its table of all-reduces (A100);
# as shares of the data sheet they serve the other devices too.
MATMUL, BANDWIDTH, LINK, NETWORK = 0.85, 0.8, 0.72, 0.8
LAUNCH_S, LATENCY_S, HOP_S, NODE_HOPS, FILL = 6e-6, 30e-6, 5.6e-6, 3.0, 32.0


ERROR = 0.074  # mean error over vTrain's multi-node runs: `ci/run.py bench published`


def data_sheet(
    name: str, matmul: float, bandwidth: float, link: float, network: float, memory: float,
    host: float, multiprocessors: int = 0, single: float | None = None,
) -> Hardware:  # fmt: skip
    """Return a hardware profile made from the peak rates of a data sheet, scaled to what is reached in practice.

    Args:
        name: name of the device.
        matmul: dense operations per second of 16-bit matrix units.
        bandwidth: bytes per second of the device memory.
        link: bytes per second to the other devices of the node, one way.
        network: bytes per second to other nodes, one way.
        memory: bytes of a device.
        host: bytes per second to the host memory, one way.
        multiprocessors: number of multiprocessors; 0 to ignore that products run as tiles.
        single: operations per second in float32; None: half of `matmul`, in TF32.
    """
    rate = MATMUL * matmul
    full = 0.5 * rate if single is None else MATMUL * single
    rates = {"bfloat16": rate, "float16": rate, "float32": full}
    source = "data sheet; shares of its rates fitted to published single-node runs on A100"
    return Hardware(
        name, source, rates, BANDWIDTH * bandwidth, LAUNCH_S, LINK * link, NETWORK * network, LATENCY_S,
        HOP_S, NODE_HOPS, memory=memory, multiprocessors=multiprocessors, fill=FILL, peak=matmul,
        host=NETWORK * host,
    )  # fmt: skip


HARDWARE = {
    "h200": data_sheet("NVIDIA H200", 989e12, 4.8e12, 450e9, 50e9, 141e9, 64e9, 132),
    "h100": data_sheet("NVIDIA H100 SXM", 989e12, 3.35e12, 450e9, 50e9, 80 * GIB, 64e9, 132),
    "a100": data_sheet("NVIDIA A100 SXM 80GB", 312e12, 2.0e12, 300e9, 25e9, 80 * GIB, 32e9, 108),
    "a100-40g": data_sheet("NVIDIA A100 SXM 40GB", 312e12, 1.55e12, 300e9, 25e9, 40 * GIB, 32e9, 108),
    # DGX-1: four ports of 100 Gb/s for eight devices
    "v100": data_sheet("NVIDIA V100 SXM2", 125e12, 0.9e12, 150e9, 6.25e9, 16 * GIB, 16e9, 80, 15.7e12),
    # one thread of a server core; `slapo-zoo calibrate` replaces it by this machine's figures
    "cpu": Hardware("CPU", "a server core, rounded", {"float32": 5e10, "bfloat16": 5e10}, 8e9, 4e-6,
                    2e9, 1e9, 5e-5, per_node=1, memory=16 * GIB, reserved=5 * 2**20, foreach=False,
                    scratch=CPU_SCRATCH),
}  # fmt: skip


HARDWARE["a100"] = replace(HARDWARE["a100"], error=ERROR)
HARDWARE["v100"] = replace(HARDWARE["v100"], error=0.12)  # mean error over Aceso's 13 rows


def find_hardware(name: str) -> Hardware:
    """Return the hardware profile called `name` (a100, cpu, ...), or that in the file `name` of `slapo-zoo calibrate`.

    Raises:
        SlapoError: `name` is neither a profile nor a file, or the file holds no profile.
    """
    if name in HARDWARE:
        return HARDWARE[name]
    path = Path(name)
    if not path.is_file():
        hint = f"choose one of {', '.join(HARDWARE)}, or a file that `slapo-zoo calibrate` wrote"
        raise SlapoError("plan", f"hardware={name!r}", "no such profile and no such file", hint)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        known = {field.name for field in fields(Hardware)}
        if isinstance(values, dict):
            return Hardware(**{name: value for name, value in values.items() if name in known})
        problem = f"found {values!r:.60}, expected a JSON object"
    except (ValueError, KeyError, TypeError) as error:
        problem = str(error)
    problem = f"the file is no hardware profile: {problem}"
    raise SlapoError("plan", str(path), problem, "write a profile with `slapo-zoo calibrate FILE`")


def with_memory(hardware: Hardware, memory: float | None) -> Hardware:
    """Return a copy of `hardware` with `memory` bytes per device instead of its own; for None `hardware` itself."""
    return hardware if memory is None else replace(hardware, memory=memory)
