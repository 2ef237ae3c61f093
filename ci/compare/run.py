"""Comparison of libraries on one checkpoint, and its files: JSON, Markdown, PNG."""

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from compare.contest import compete
from compare.peers import CONTENDERS
from compare.shapes import Work
from compare.summary import markdown, summarize

PACKAGES = ("torch", "transformers", "deepspeed", "safetensors")
UNMEASURED = ("GPU", "Liger")


def side_by_side(work: Work, rounds: int) -> dict[str, Any]:
    """Compare slapo_zoo, plain `transformers` and other libraries that support the family, on the CPU.

    `rounds` is the number of timed steps of each.

    Returns:
        {"green": whether slapo_zoo computed the plain model's losses, "parity": table, "speed": table (empty if
        not green), "work": facts of the run}
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(work.folder, trust_remote_code=False)
    refused = {name: cls.why_not(config) for name, cls in CONTENDERS.items()}
    teams = compete([name for name, why in refused.items() if not why], work, rounds)
    found = summarize(teams, work, {name: why for name, why in refused.items() if why})
    facts = asdict(work) | {"rounds": rounds, "family": config.model_type, "dtype": "float32"}
    del facts["folder"]
    return {"work": facts, **found}


def surroundings() -> dict[str, Any]:
    """Return the hardware and software that the figures depend on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cores": os.cpu_count(), "processor": _processor(), "memory_gib": round(memory / 2**30, 1),
        "kernel": platform.release(), "python": platform.python_version(), "backend": "gloo",
        **{name: _version(name) for name in PACKAGES},
    }  # fmt: skip


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "-"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def write_report(
    results: Mapping[str, Mapping[str, Any]], folder: Path, command: str
) -> list[Path]:
    """Write side.json, side.md and (with matplotlib) side.png; return their paths.

    Args:
        results: title --> result of `side_by_side`.
        folder: folder of the files; it is created if missing.
        command: command that makes the figures again, for the report.
    """
    folder.mkdir(parents=True, exist_ok=True)
    around = surroundings()
    data = {"command": command, "machine": around, "unmeasured": UNMEASURED, "results": results}
    files = [folder / "side.json", folder / "side.md"]
    files[0].write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    files[1].write_text(_text(results, around, command), encoding="utf-8")
    if any(result["speed"] for result in results.values()):
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            return files
        from compare.picture import draw

        files.append(folder / "side.png")
        draw(results, files[-1])
    return files


def _text(results: Mapping[str, Mapping[str, Any]], around: Mapping[str, Any], command: str) -> str:
    parts = [f"# Side by side\n\nMade by `{command}`.\n"]
    parts.append(", ".join(f"{name} {value}" for name, value in around.items()) + ".\n")
    parts.append(
        "A step is forward, backward and AdamW; contenders take turns of one step, each in its own processes. "
        "Those with one rank have as many threads as the others have ranks. `time / ours` is the median of the rounds' "
        "ratios: above 1 ours is faster. A speed is told only of those whose losses and gradient norm agree with plain "
        "transformers in this run. `read MiB` is what a rank's ledger counts; the others keep none. `save s` ends when all "
        "ranks are through; only ours is on the disk then (fsync), and `-` marks who has no one call for it. `plan lines` are "
        f"what a person writes for the family. Unmeasured: {', '.join(UNMEASURED)}.\n"
    )
    for name, result in results.items():
        facts = ", ".join(f"{key} {value}" for key, value in result["work"].items())
        parts.append(f"## {name}\n\n{facts}\n")
        parts.append(markdown("Parity", result["parity"]))
        parts.append(
            markdown("Speed and memory", result["speed"]) or "No speed: parity is not green.\n"
        )
    return "\n".join(parts)
