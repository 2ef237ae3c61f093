"""A device and its links as a few numbers: measured once by `slapo-zoo calibrate`, or a named profile."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from slapo_zoo.errors import SlapoError

GIB = 2**30
CPU_SCRATCH = 13.0  # fitted to what `ci/bench.py memory` measured


@dataclass(frozen=True)
class Hardware:
    """What the planner knows of a cluster.

    Args:
        name: of the device.
        source: where the numbers come from.
        matmul: dtype --> floating-point operations per second of large matrix products.
        bandwidth: bytes per second that other operations read and write.
        operation_s: least seconds of an operation.
        link: bytes per second between devices of a node, one way.
        network: bytes per second of a device to another node, one way.
        latency_s: of a collective.
        per_node: devices of a node.
        memory: bytes of a device.
        reserved: bytes that libraries and the context take on each device.
        optimizer_copies: temporaries of the optimizer's step: of the largest parameter, or (foreach
            on CUDA) of all of them when `foreach`.
        scratch: short-lived memory inside of operations, which a rehearsal cannot see, in units of what a
            block returns for a micro-batch.
        foreach: whether torch's optimizers take their many-tensor form here.
    """

    name: str
    source: str
    matmul: Mapping[str, float]
    bandwidth: float
    operation_s: float
    link: float
    network: float
    latency_s: float = 1e-5
    per_node: int = 8
    memory: float = 80 * GIB
    reserved: float = 1.5 * GIB
    optimizer_copies: float = 2.0
    foreach: bool = True
    scratch: float = 0.0

    def flops(self, dtype: str) -> float:
        """Operations per second in a dtype; the nearest known one where it was not measured."""
        return self.matmul.get(dtype) or self.matmul.get("bfloat16") or max(self.matmul.values())

    def between(self, ranks: int) -> float:
        """Bytes per second among so many neighbouring ranks."""
        return self.link if ranks <= self.per_node else self.network

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def data_sheet(
    name: str, matmul: float, bandwidth: float, link: float, network: float, memory: float
) -> Hardware:
    """A profile from a data sheet: half of the matrix rate and 4/5 of every bandwidth are expected.

    Args:
        name: of the device.
        matmul: dense operations per second of 16-bit matrix units.
        bandwidth: of its memory, bytes per second.
        link: to the other devices of its node, bytes per second, one way.
        network: to other nodes, bytes per second, one way.
        memory: bytes.
    """
    rates = {"bfloat16": 0.5 * matmul, "float16": 0.5 * matmul, "float32": 0.25 * matmul}
    source = "data sheet: 0.5 of the matrix rate, 0.8 of the bandwidths; unmeasured"
    return Hardware(
        name, source, rates, 0.8 * bandwidth, 5e-6, 0.8 * link, 0.8 * network, memory=memory
    )


HARDWARE = {
    "h200": data_sheet("NVIDIA H200", 989e12, 4.8e12, 450e9, 50e9, 141e9),
    "h100": data_sheet("NVIDIA H100 SXM", 989e12, 3.35e12, 450e9, 50e9, 80 * GIB),
    "a100": data_sheet("NVIDIA A100 SXM 80GB", 312e12, 2.0e12, 300e9, 25e9, 80 * GIB),
    "a100-40g": data_sheet("NVIDIA A100 SXM 40GB", 312e12, 1.55e12, 300e9, 25e9, 40 * GIB),
    # DGX-1: four ports of 100 Gb/s for eight devices
    "v100": data_sheet("NVIDIA V100 SXM2", 125e12, 0.9e12, 150e9, 6.25e9, 16 * GIB),
    # one thread of a server core; `slapo-zoo calibrate` replaces it by this machine's figures
    "cpu": Hardware("CPU", "a server core, rounded", {"float32": 5e10, "bfloat16": 5e10}, 8e9, 4e-6,
                    2e9, 1e9, 5e-5, 1, 16 * GIB, 5 * 2**20, 2.0, False, CPU_SCRATCH),
}  # fmt: skip


def find_hardware(name: str) -> Hardware:
    """A named profile, or one from a file that `calibrate` wrote."""
    if name in HARDWARE:
        return HARDWARE[name]
    path = Path(name)
    if not path.is_file():
        hint = f"choose one of {', '.join(HARDWARE)}, or a file that `slapo-zoo calibrate` wrote"
        raise SlapoError("plan", f"hardware={name!r}", "no such profile and no such file", hint)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return Hardware(**{field.name: values[field.name] for field in fields(Hardware)})
    except (ValueError, KeyError, TypeError) as error:
        problem = f"it is no hardware profile: {error}"
        raise SlapoError(
            "plan", str(path), problem, "make one with `slapo-zoo calibrate`"
        ) from None


def with_memory(hardware: Hardware, memory: float | None) -> Hardware:
    """The profile with another size of memory, unless None."""
    return hardware if memory is None else replace(hardware, memory=memory)
