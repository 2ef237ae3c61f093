"""Where the derived table of a model comes from: this process, the cache, or a process that proves it."""

import copy
import hashlib
import importlib.metadata
import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from slapo_zoo.errors import SlapoError
from slapo_zoo.hf import models as hf
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.ranks.agreement import together
from slapo_zoo.verify.apart import apart_environment
from slapo_zoo.zoo.derivation.card import from_document
from slapo_zoo.zoo.derivation.rows import undivided_table
from slapo_zoo.zoo.options import BuildOptions
from slapo_zoo.zoo.schedule_source import structure
from slapo_zoo.zoo.table import Table

TIMEOUT_S, EVERY_S = 900.0, 0.5
PROVEN: dict[Path, Table] = {}
KNOBS = ("sequence_parallel", "pipeline_order", "stages_per_rank")  # what a proof depends on


def proven_table(config: Any, cls: Any, mesh: Mesh, options: BuildOptions) -> Table:
    """Return the proven table of a model, the same on all ranks.

    It is looked up in the cache of this user; if it is not there, rank 0 has it derived by a process
    of its own, and the others wait. Without tp and pp a model that cannot be proven has a table all the
    same: the one that takes a batch in one piece.

    Raises:
        ArchitectureError: none is right; the module in the way is named.
    """
    sizes = (mesh.tp, mesh.pp, min(mesh.dp, 2))
    file = cache_file(config, cls, sizes, options)
    if file not in PROVEN:
        request = {
            "config": json.loads(json.dumps(config.to_dict(), default=str)), "cls": cls.__name__,
            "sizes": sizes, "knobs": {knob: getattr(options, knob) for knob in KNOBS},
        }  # fmt: skip
        found = _document(request, file, mesh)
        if "error_of" not in found:
            PROVEN[file] = from_document(found["table"])
        elif mesh.tp * mesh.pp > 1:
            raise SlapoError(*found["error_of"])
        else:
            empty = hf.build_on_meta(cls, copy.deepcopy(config), torch.float32, False)
            PROVEN[file] = undivided_table(config, empty)
    return PROVEN[file]


def _document(request: dict[str, Any], file: Path, mesh: Mesh) -> dict[str, Any]:
    child = _Child(request, file) if mesh.rank == 0 else None
    while True:
        found = together(mesh, "schedule", lambda: child.outcome() if child else None)[0]
        if found is not None:
            return found
        time.sleep(EVERY_S)


class _Child:
    """Proof that rank 0 asks for: from the cache, else from a process of its own."""

    def __init__(self, request: dict[str, Any], file: Path):
        self.file, self.cached = file, _read(file)
        self.process: Any = None
        if self.cached is None:
            self._start(request)

    def _start(self, request: dict[str, Any]) -> None:
        self.output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open while the process runs
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.begin = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "slapo_zoo.verify.child"], stdin=subprocess.PIPE,
            stdout=self.output, stderr=self.errors, text=True, env=apart_environment(),
        )  # fmt: skip
        self.process.stdin.write(json.dumps(request))
        self.process.stdin.close()

    def outcome(self) -> dict[str, Any] | None:
        """The document, what went wrong, or None while the process runs."""
        if self.cached is not None:
            return self.cached
        if self.process.poll() is None:
            if time.monotonic() - self.begin < TIMEOUT_S:
                return None
            self.process.kill()
        for file in (self.output, self.errors):
            file.seek(0)
        with self.output, self.errors:
            return self._ended()

    def _ended(self) -> dict[str, Any]:
        with suppress(ValueError, IndexError):
            found = json.loads(self.output.read().splitlines()[-1])
            if "error_of" not in found:
                _write(self.file, found)
            return found
        last = " / ".join(self.errors.read().strip().splitlines()[-3:])
        problem = f"its process ended with exit status {self.process.wait()}: {last}"
        return {"error_of": ["schedule='auto'", "derivation", problem, "write a table"]}


def cache_file(config: Any, cls: Any, sizes: tuple[int, ...], options: BuildOptions) -> Path:
    """Where the proof of a model on a mesh is kept: by its code and config, ours, and the versions."""
    from huggingface_hub import constants

    asked = [sizes, *(getattr(options, knob) for knob in KNOBS)]
    code = Path(inspect.getfile(cls)).read_bytes()
    versions = [importlib.metadata.version(name) for name in ("torch", "transformers")]
    text = json.dumps([structure(config, cls), asked, versions, own_code()])
    key = hashlib.sha256(text.encode() + code).hexdigest()[:32]
    folder = Path(constants.HF_HOME) / "slapo_zoo" / "derived"
    return folder / f"{config.model_type}-{key}.json"


@cache
def own_code() -> str:
    """A digest of the source of this package."""
    found = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        found.update(file.read_bytes())
    return found.hexdigest()


def _read(file: Path) -> dict[str, Any] | None:
    with suppress(OSError, ValueError):
        return json.loads(file.read_text(encoding="utf-8"))
    return None


def _write(file: Path, document: dict[str, Any]) -> None:
    with suppress(OSError):  # without a cache the next load proves again
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(document, indent=1), encoding="utf-8")
        os.replace(part, file)
