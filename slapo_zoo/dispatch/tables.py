"""What was measured on a device, and what follows for a size that was not.

A table is looked for under the device's own name, in the user's cache folder and then in the package;
then under any device of the same compute capability. A device without one has the prior: kernels whose
gain needs no timing, because they leave work out.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

MEASURED = Path(__file__).parents[1] / "hub_cards" / "bench"
UNMEASURED = "unmeasured"
KEPT = 0.98  # a kernel is a default where the best alternative takes at least so many times as long
FAR = 2.0  # powers of two beyond the measured sizes up to which the last one still speaks
OLDEST = (7, 0)  # compute capability that Triton serves
# Kernel -> why it needs no timing, on any GPU that Triton serves.
PRIOR = {
    "sparse_mlm_head_loss": "rows without a label do not pass the head",
    "unpadded_encoder": "padding does not pass the layers",
    "linear_cross_entropy": "logits of a whole batch are never kept",
}
# Where no device is at hand to ask, e.g. for a plan: beginnings of words in product names.
CAPABILITIES = {
    "h100": "9.0", "h200": "9.0", "h800": "9.0", "h20": "9.0", "gh200": "9.0", "a100": "8.0",
    "a800": "8.0", "a30": "8.0", "a10": "8.6", "a40": "8.6", "a6000": "8.6", "3090": "8.6",
    "l4": "8.9", "l40": "8.9", "l40s": "8.9", "4090": "8.9", "b200": "10.0", "gb200": "10.0",
    "b300": "10.3", "gb300": "10.3", "5090": "12.0", "t4": "7.5", "v100": "7.0",
}  # fmt: skip


@dataclass(frozen=True)
class Table:
    """What a device was measured to do.

    Args:
        device: that it was measured on; empty for the prior.
        dispatch: bucket --> "triton", or on a CPU "ours", where the kernel did not lose; else "torch".
        ratios: bucket --> how many times as long the best alternative takes.
        capability: of the device, "9.0".
    """

    device: str = ""
    dispatch: Mapping[str, str] = field(default_factory=dict)
    ratios: Mapping[str, float] = field(default_factory=dict)
    capability: str = ""

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> "Table":
        """From the content of a file."""
        return cls(
            content.get("device", ""), content.get("dispatch", {}), content.get("ratios", {}),
            content.get("capability", ""),
        )  # fmt: skip


@dataclass(frozen=True)
class Decision:
    """Whether a kernel runs, and why."""

    runs: bool
    reason: str


def user_folder() -> Path:
    """Where what this user measured is kept: SLAPO_ZOO_CACHE, or the cache folder of the system."""
    given = os.environ.get("SLAPO_ZOO_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (Path(given) if given else base / "slapo_zoo") / "kernels"


def slug(device: str) -> str:
    """The name of a device as a file name: "NVIDIA H200" --> nvidia-h200."""
    return "-".join("".join(c if c.isalnum() else " " for c in device.lower()).split())


@cache
def capability(device: str) -> str:
    """The compute capability of a GPU by its name, "9.0"; empty where it is not known."""
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            if torch.cuda.get_device_name(index) == device:
                return "{}.{}".format(*torch.cuda.get_device_capability(index))
    words = slug(device).split("-")
    return next((CAPABILITIES[word] for word in words if word in CAPABILITIES), "")


_kept: dict[str, Table] = {}
_changes = [0]  # how often a table changed in this process


def keep(device: str, table: Table) -> None:
    """Use a table for a device from now on, in this process."""
    _kept[device] = table
    _changes[0] += 1


def changes() -> int:
    """A number that differs after every change of a table, for those who keep a decision."""
    return _changes[0]


def forget() -> None:
    """Read all tables anew when they are next asked for."""
    _kept.clear()
    _changes[0] += 1


def table_of(device: str) -> Table:
    """The table that speaks for a device; an empty one without a device where there is none."""
    if device not in _kept:
        _kept[device] = _own(device) or _relative(device) or Table()
    return _kept[device]


def own_table(device: str) -> Table | None:
    """What was measured on a device of this very name, or None."""
    return _own(device)


def _own(device: str) -> Table | None:
    """The package's table with what this user measured over it."""
    found = [_read(folder / f"{slug(device)}.json") for folder in (MEASURED, user_folder())]
    tables = [table for table in found if table is not None]
    if not tables:
        return None
    dispatch, ratios = ({k: v for table in tables for k, v in getattr(table, part).items()}
                        for part in ("dispatch", "ratios"))  # fmt: skip
    return Table(tables[-1].device, dispatch, ratios, tables[-1].capability)


def _read(file: Path) -> Table | None:
    return Table.read(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None


def _relative(device: str) -> Table | None:
    """The table of another device of the same compute capability."""
    wanted = capability(device)
    if not wanted:
        return None
    for folder in (user_folder(), MEASURED):
        for file in sorted(folder.glob("*.json")):
            table = _read(file)
            if table is not None and table.capability == wanted:
                return table
    return None


def decide(name: str, dtype: str, size: int, device: str) -> Decision:
    """Whether a kernel runs for a size on a device: the one answer for the choice and the run.

    Args:
        name: of the kernel.
        dtype: "bfloat16".
        size: of the last axis: the width; for attention that of a head.
        device: "cpu", or the name of the GPU.
    """
    table, size = table_of(device), 1 << (max(size, 1) - 1).bit_length()
    start = f"{name}:{dtype}:"
    rows = {int(key[len(start) :]): key for key in table.dispatch if key.startswith(start)}
    if not rows:
        return _estimated(name, dtype, device)
    places = sorted(rows, key=lambda known: abs(math.log2(known / size)))
    nearest, away = places[0], abs(math.log2(places[0] / size))
    if away > FAR and device != "cpu":
        return Decision(False, f"{UNMEASURED} on {device} near a size of {size}")
    key = rows[nearest]
    whose = device if table.device in (device, "") else f"{table.device}, the same capability"
    between = _between(sorted(rows), size)
    if between is not None:
        ratio = _interpolated(table, rows, between, size)
        if not math.isnan(ratio):
            said = f"the best alternative takes about {ratio:.2f} times as long"
            sizes = f"between {rows[between[0]]} and {between[1]} on {whose}"
            return Decision(ratio >= KEPT and _any(table, rows, between), f"{said} ({sizes})")
    ratio = table.ratios.get(key, math.nan)
    said = f"the best alternative takes {ratio:.2f} times as long ({key} on {whose})"
    return Decision(table.dispatch[key] not in ("torch", "refused"), said)


def _any(table: Table, rows: Mapping[int, str], between: tuple[int, int]) -> bool:
    return any(table.dispatch[rows[size]] not in ("torch", "refused") for size in between)


def _between(known: list[int], size: int) -> tuple[int, int] | None:
    """The measured sizes on both sides of one that was not."""
    below, above = [n for n in known if n < size], [n for n in known if n > size]
    return (below[-1], above[0]) if below and above and size not in known else None


def _interpolated(
    table: Table, rows: Mapping[int, str], between: tuple[int, int], size: int
) -> float:
    """The ratio of a size between two: both in powers of two."""
    low, high = (table.ratios.get(rows[n], math.nan) for n in between)
    share = math.log2(size / between[0]) / math.log2(between[1] / between[0])
    return low ** (1 - share) * high**share if low > 0 and high > 0 else math.nan


def _estimated(name: str, dtype: str, device: str) -> Decision:
    known = capability(device)
    recent = known and tuple(int(n) for n in known.split(".")) >= OLDEST
    if name in PRIOR and recent:
        return Decision(True, f"estimated: {PRIOR[name]} (nothing was measured on {device})")
    return Decision(False, f"{UNMEASURED} on {device} in {dtype}")
