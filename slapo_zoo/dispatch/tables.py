"""Tables of kernel timings per device, by which Triton or torch is chosen to run a kernel.

The table of a device is read from the file with the device's name, in the package and in the user's cache folder; if
there is none, from the file of another GPU with the same compute capability.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path

import torch

MEASURED = Path(__file__).parents[1] / "zoo" / "hub_cards" / "bench"
UNMEASURED = "unmeasured"
# Compute capability by a word of the product name, for plans without the device.
CAPABILITIES = {
    "h100": "9.0", "h200": "9.0", "h800": "9.0", "h20": "9.0", "gh200": "9.0", "a100": "8.0",
    "a800": "8.0", "a30": "8.0", "a10": "8.6", "a40": "8.6", "a6000": "8.6", "3090": "8.6",
    "l4": "8.9", "l40": "8.9", "l40s": "8.9", "4090": "8.9", "b200": "10.0", "gb200": "10.0",
    "b300": "10.3", "gb300": "10.3", "5090": "12.0", "t4": "7.5", "v100": "7.0",
}  # fmt: skip


@dataclass(frozen=True)
class Table:
    """Kernel timings of one device, by bucket: "kernel:dtype:size", where size is the last axis rounded up to 2**n.

    Args:
        device: name of the measured device; "" when there is no table.
        dispatch: bucket --> "triton" (on a CPU "ours") if the kernel runs, since no alternative was over 2 % faster;
            else "torch".
        ratios: bucket --> time of the best alternative, divided by that of the kernel.
        capability: compute capability of the device, e.g. "9.0".
    """

    device: str = ""
    dispatch: Mapping[str, str] = field(default_factory=dict)
    ratios: Mapping[str, float] = field(default_factory=dict)
    capability: str = ""


def user_folder() -> Path:
    """Return the folder of this user's kernel measurements, in $SLAPO_ZOO_CACHE or the system's cache folder."""
    given = os.environ.get("SLAPO_ZOO_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (Path(given) if given else base / "slapo_zoo") / "kernels"


def slug(device: str) -> str:
    """Return a device name as a file name: "NVIDIA H200" --> nvidia-h200."""
    return "-".join("".join(c if c.isalnum() else " " for c in device.lower()).split())


@cache
def capability(device: str) -> str:
    """Return the compute capability of a GPU by its name, e.g. "9.0"; "" if unknown."""
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            if torch.cuda.get_device_name(index) == device:
                return "{}.{}".format(*torch.cuda.get_device_capability(index))
    words = slug(device).split("-")
    return next((CAPABILITIES[word] for word in words if word in CAPABILITIES), "")


_kept: dict[str, Table] = {}
_changes = [0]  # how often a table changed in this process


def keep(device: str, table: Table) -> None:
    """Use `table` (kernel timings) for a device from now on in this process, instead of the device's files."""
    _kept[device] = table
    _changes[0] += 1


def changes() -> int:
    """Return how often kernel timings changed in this process; decisions cached before a change are invalid."""
    return _changes[0]


def forget() -> None:
    """Drop all cached tables of kernel timings, so that the tables' files are read again."""
    _kept.clear()
    _changes[0] += 1


def table_of(device: str) -> Table:
    """Return the kernel timings of a device by its name ("NVIDIA H100 80GB HBM3", "cpu"), else of another GPU of its compute
    capability, else an empty table; cached.
    """
    if device not in _kept:
        _kept[device] = own_table(device) or _table_of_same_capability(device) or Table()
    return _kept[device]


def own_table(device: str) -> Table | None:
    """Return the kernel timings of exactly this device, or None; files of the user override those of the package."""
    found = [_read(folder / f"{slug(device)}.json") for folder in (MEASURED, user_folder())]
    tables = [table for table in found if table is not None]
    if not tables:
        return None
    dispatch, ratios = ({k: v for table in tables for k, v in getattr(table, part).items()}
                        for part in ("dispatch", "ratios"))  # fmt: skip
    return Table(tables[-1].device, dispatch, ratios, tables[-1].capability)


def _read(file: Path) -> Table | None:
    if not file.is_file():
        return None
    found = json.loads(file.read_text(encoding="utf-8"))
    return Table(**{f.name: found[f.name] for f in fields(Table) if f.name in found})


def _table_of_same_capability(device: str) -> Table | None:
    """Return the kernel timings of another GPU with the compute capability of `device`; None if there are none."""
    wanted = capability(device)
    if not wanted:
        return None
    for folder in (user_folder(), MEASURED):
        for file in sorted(folder.glob("*.json")):
            table = _read(file)
            if table is not None and table.capability == wanted:
                return table
    return None
