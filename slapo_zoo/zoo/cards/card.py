"""Schedule card: a published schedule with its measurements and its README page."""

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slapo_zoo.errors import CardError
from slapo_zoo.parallel.mesh import ALWAYS
from slapo_zoo.zoo.cards import files, readme, strict_json
from slapo_zoo.zoo.cards.plans import plans_of
from slapo_zoo.zoo.cards.program import Program

UNMEASURED = "unmeasured"
MEASURES = ("device", "step_ms_p50", "tokens_per_s", "peak_memory_gib", "baselines")
LICENCE = "apache-2.0"


@dataclass(frozen=True)
class Card:
    """Published schedule with its reports and README page: the content of one card folder.

    Args:
        program: the schedule as data, stored in schedule.json.
        mesh: sizes of tp, pp and dp that the schedule was made for, by name; and of cp, if it was used.
        base_model: Hub id of the checkpoint; the model family if the card is for no single checkpoint.
        verify: report of `verify_card`, which compares loss and gradients with the plain model's; {"verdict":
            "verified", ...} if they agree, {"verdict": "unmeasured"} before a comparison.
        bench: name of a measure, e.g. "tokens_per_s" --> measured value, or "unmeasured".
        tuning: device name --> results of `slapo-zoo tune`; "simulated" --> mesh sizes and options simulated as fastest.
        software: package name --> version that the card was made with.
        repo_id: Hub reference, org/name@sha, that the README page tells users to load.
    """

    program: Program
    mesh: Mapping[str, int]
    base_model: str
    verify: Mapping[str, Any] = field(default_factory=lambda: {"verdict": UNMEASURED})
    bench: Mapping[str, Any] = field(default_factory=lambda: dict.fromkeys(MEASURES, UNMEASURED))
    tuning: Mapping[str, Any] = field(default_factory=dict)
    software: Mapping[str, str] = field(default_factory=dict)
    repo_id: str = "org/name@sha"

    def metadata(self) -> dict[str, Any]:
        """Return the model-card metadata (license, tags, schedule hash, mesh sizes, ...) of README.md."""
        program, sizes = self.program, dict(self.mesh)
        layout = [f"{name}-{size}" for name, size in sizes.items()]
        found: dict[str, Any] = {
            "library_name": "slapo_zoo",
            "license": LICENCE,
            "tags": ["slapo-zoo", "schedule", program.model_type, *layout],
            "schedule": {
                "format": program.document()["format"],
                "architecture": program.model_class,
                "hash": program.hash,
                "structure_hash": program.structure,
                "constraints": list(program.constraints),
                "params": sizes,
                "hardware": self.bench.get("device", UNMEASURED),
                "software": dict(self.software),
                "measured": {k: v for k, v in self.bench.items() if k != "device"},
                "verified": self.verify.get("verdict", UNMEASURED),
            },
        }
        return found | ({"base_model": [self.base_model]} if "/" in self.base_model else {})

    def page(self) -> str:
        """Return the text of the card's README.md, its YAML metadata included."""
        program = self.program
        exact = "exactly the module tree it was made for"
        cut = f", cp={self.mesh['cp']}" if "cp" in self.mesh else ""
        values = {
            "title": f"{program.model_class}, tp={self.mesh['tp']}, pp={self.mesh['pp']}{cut}",
            "model_class": program.model_class,
            "model_type": program.model_type,
            "mesh": dict(self.mesh),
            "base_model": self.base_model,
            "repo_id": self.repo_id,
            "constraints": program.constraints,
            "structure": exact if program.structure else "any size that meets these constraints",
            "primitives": sorted(Counter(name for _, name, _ in program.steps).items()),
            "measured": [(name, self.bench.get(name, UNMEASURED)) for name in MEASURES],
            "verdict": self.verify.get("verdict", UNMEASURED),
            "plans": plans_of(self.tuning),
        }
        return readme.render(self.metadata(), values)

    def contents(self) -> dict[str, bytes]:
        """Return every file of the card folder: file name --> bytes."""
        reports = dict(zip(files.REPORTS, (self.verify, self.bench, self.tuning), strict=True))
        return {
            files.README: self.page().encode(),
            files.PROGRAM: self.program.to_bytes(),
            **{
                name: (json.dumps(dict(r), indent=1) + "\n").encode() for name, r in reports.items()
            },
        }

    def write(self, folder: Path) -> None:
        """Write the card's files into a folder; CardError if it holds other files than a card's or cannot be written to."""
        contents = self.contents()
        _check_page(self.program, contents[files.README])
        try:
            folder.mkdir(parents=True, exist_ok=True)
            files.names_of(folder)
            for name, data in contents.items():
                part = folder / f".git-part-{name}"  # a name that no card has
                part.write_bytes(data)
                os.replace(part, folder / name)
        except OSError as error:
            problem = f"the card cannot be written: {error.strerror} ({error.filename})"
            hint = "name a folder, new or of a card, in which you may write, or free disk space"
            raise CardError("card", str(folder), problem, hint) from error


def read_card(folder: Path, root: Path | None = None) -> Card:
    """Read the folder of a card (a published schedule) and check it; no code from the card is executed.

    Args:
        folder: folder with the card's files.
        root: None refuses symbolic links; a directory of the Hub's cache allows links to files below it.

    Raises:
        CardError: a file is missing or malformed, or README.md names another hash than schedule.json has.
    """
    names = files.names_of(folder) if root is None else [p.name for p in folder.iterdir()]
    for needed in (files.PROGRAM, files.README):
        if needed not in names:
            hint = "make one with `slapo-zoo card make`"
            raise CardError("card", str(folder), f"{needed} is missing", hint)
    program = Program.parse(files.read(folder, files.PROGRAM, root))
    metadata = _check_page(program, files.read(folder, files.README, root))
    reports = {
        name: _report(strict_json.parse(files.read(folder, name, root), name), name)
        for name in files.REPORTS
        if name in names
    }
    verify, bench, tuning = (reports.get(name, {}) for name in files.REPORTS)
    schedule, base = metadata["schedule"], metadata.get("base_model") or [program.model_type]
    return Card(
        program, _sizes(schedule.get("params")), str(base[0] if isinstance(base, list) else base),
        verify, bench, tuning, _texts(schedule.get("software")),
    )  # fmt: skip


def _check_page(program: Program, page: bytes) -> dict[str, Any]:
    metadata = readme.metadata_of(page)
    schedule = metadata.get("schedule")
    found = schedule.get("hash") if isinstance(schedule, dict) else None
    if found != program.hash:
        problem = f"README.md says {found!r:.90}, schedule.json has {program.hash!r}"
        hint = "one of them was changed after the card was made; do not use the card, or make it again with `slapo-zoo card make`"
        raise CardError("card", "hash of the schedule", problem, hint)
    return metadata


def _report(document: Any, name: str) -> dict[str, Any]:
    if not isinstance(document, dict):
        problem = f"found {document!r:.60}, expected a JSON object"
        raise CardError(name, "document", problem, "write a JSON object; {} if it has no entries")
    return document


def _sizes(params: Any) -> dict[str, int]:
    known = params if isinstance(params, dict) else {}
    names = (*ALWAYS, "cp") if "cp" in known else ALWAYS  # cards made without cp do not name it
    sizes: dict[str, Any] = {name: known.get(name) for name in names}
    if any(type(size) is not int or not 1 <= size <= 2**20 for size in sizes.values()):
        problem = f"found {sizes}, expected integers from 1 to {2**20} for {', '.join(names)}"
        hint = "write them as integers, e.g. {tp: 4, pp: 2, dp: 1}"
        raise CardError("README.md", "schedule.params", problem, hint)
    return sizes


def _texts(value: Any) -> dict[str, str]:
    return {str(k): str(v) for k, v in value.items()} if isinstance(value, dict) else {}
