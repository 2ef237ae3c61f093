"""The argument `schedule="auto"`: get sharding rules (a table) from a cache, or from a process that derives them from
the model's modules and compares a tiny sharded model with the unsharded one."""

import copy
import hashlib
import importlib.metadata
import inspect
import json
import os
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from slapo_zoo.errors import SlapoError
from slapo_zoo.hf import models as hf
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.ranks.agreement import together
from slapo_zoo.parallel.ranks.apart import ProcessApart, python_apart
from slapo_zoo.verify.apart import CHILD
from slapo_zoo.verify.cut_classes import class_by_token, with_positions
from slapo_zoo.zoo.derivation.table_document import from_document
from slapo_zoo.zoo.derivation.table_rows import undivided_table
from slapo_zoo.zoo.options import BuildOptions
from slapo_zoo.zoo.schedule_source import find_table, structure
from slapo_zoo.zoo.table import Table

TIMEOUT_S, EVERY_S = 900.0, 0.5
IN_MAIN = (
    "schedule='auto'", "class", "the process that derives a schedule cannot import a class of __main__",
    "move the class into a file that your program imports",
)  # fmt: skip
PROVEN: dict[Path, Table] = {}
KNOBS = ("sequence_parallel", "pipeline_order", "stages_per_rank")  # what a proof depends on


def proven_table(config: Any, cls: Any, mesh: Mesh, options: BuildOptions) -> Table:
    """Return sharding rules (a `Table`) for a model whose family has none, the same on all ranks; a collective call.

    The rules are derived from the model's modules and proven: a tiny sharded model has the outputs, loss and gradients
    of the unsharded one, up to rounding. They are cached on disk; if the cache lacks them, rank 0 starts a process that
    finds them. If no table can be proven and tp = pp = cp = 1, the result shards nothing and forbids micro-batches.

    Raises:
        SlapoError: no table can be proven; the module that prevents it is named.
    """
    sizes = (mesh.tp, mesh.pp, min(mesh.dp, 2))
    cut, way = min(mesh.size("cp"), 2), options.cp_attention
    file = cache_file(config, cls, (*sizes, cut, way), options)
    if file not in PROVEN:
        knobs = {knob: getattr(options, knob) for knob in KNOBS}
        request = {
            "config": _plain(config), "cls": cls.__name__,
            "sizes": sizes, "knobs": knobs | ({"cp": cut, "cp_attention": way} if cut > 1 else {}),
        }  # fmt: skip
        if not cls.__module__.startswith(("transformers.", "slapo_zoo.")):
            request["module"] = cls.__module__
        in_main: dict[str, Any] = {"error_of": IN_MAIN}
        found = in_main if cls.__module__ == "__main__" else _document(request, file, mesh)
        if "error_of" not in found:
            PROVEN[file] = from_document(found["table"])
        elif mesh.tp * mesh.pp * cut > 1:
            raise SlapoError(*found["error_of"])
        else:
            empty = hf.build_on_meta(cls, copy.deepcopy(config), torch.float32, False)
            PROVEN[file] = undivided_table(config, empty)
    return PROVEN[file]


def zoo_table_for_cp(config: Any, cls: Any, mesh: Mesh, options: BuildOptions) -> Table:
    """Return the family's sharding rules, completed by how cp ranks shard the tokens of a model of class `cls`.

    A collective call. If the rules do not name the class, a tiny model runs in a separate process, to find modules
    that mix the tokens of different ranks (`slapo_zoo.verify.leak_probe`); the answer is cached on disk.

    Raises:
        SlapoError: a module, which is named, mixes tokens in a way that does not allow to shard them.
    """
    table, tp, way = find_table(config), min(mesh.tp, 2), options.cp_attention
    if table.positions_of(cls) is not None:
        return table
    cls = class_by_token(cls)  # a head of whole rows gets all tokens: only its blocks matter
    file = cache_file(config, cls, ("cut", tp, way), options)
    if file not in PROVEN:
        request = {"config": _plain(config), "cls": cls.__name__, "cut": tp, "way": way}
        found = _document(request, file, mesh)
        if "error_of" in found:
            raise SlapoError(*found["error_of"])
        PROVEN[file] = with_positions(table, cls, found["positions"])
    return PROVEN[file]


def _plain(config: Any) -> dict[str, Any]:
    return json.loads(json.dumps(config.to_dict(), default=str))


def _document(request: dict[str, Any], file: Path, mesh: Mesh) -> dict[str, Any]:
    """Return on all ranks the JSON answer to `request`, or {"error_of": arguments of a SlapoError}.

    `request` (config, class, ...) asks for sharding rules, or for how cp shards the tokens. Rank 0 reads the
    answer from the cache `file`, or starts a process that finds it.
    """
    cached = _read(file) if mesh.rank == 0 else None
    process = python_apart(CHILD, request) if mesh.rank == 0 and cached is None else None
    try:
        while True:
            ask = lambda: cached or (process and _outcome(process, file))  # noqa: E731
            if found := together(mesh, "schedule", ask)[0]:
                return found
            time.sleep(EVERY_S)
    finally:
        if process is not None and process.process.poll() is None:  # this call has failed
            process.end()


def _outcome(process: ProcessApart, file: Path) -> dict[str, Any] | None:
    """Return the JSON answer (e.g. sharding rules) of the ended `process`, and cache it in `file`; None while it runs.
    If the process failed, return {"error_of": arguments of its SlapoError}.
    """
    ended = process.poll(TIMEOUT_S)
    if ended is None:
        return None
    if (found := ended.document()) is not None:
        if "error_of" not in found:
            _write(file, found)
        return found
    return {"error_of": ["schedule='auto'", "derivation", ended.last_words(), "write a table of sharding rules (docs/adding_an_architecture.md)"]}  # fmt: skip


def cache_file(config: Any, cls: Any, sizes: tuple[Any, ...], options: BuildOptions) -> Path:
    """Return the path of the file that caches this model's derived sharding rules, or how cp shards its tokens.

    The name of the file has a digest of code, config, sizes and versions. `cls` is the model class, `sizes` are
    those of the mesh dims.
    """
    from huggingface_hub import constants

    asked = [sizes, *(getattr(options, knob) for knob in KNOBS)]
    code = b"" if cls.__module__ == "__main__" else Path(inspect.getfile(cls)).read_bytes()
    versions = [importlib.metadata.version(name) for name in ("torch", "transformers")]
    text = json.dumps([structure(config, cls), asked, versions, own_code()])
    key = hashlib.sha256(text.encode() + code).hexdigest()[:32]
    folder = Path(constants.HF_HOME) / "slapo_zoo" / "derived"
    return folder / f"{config.model_type}-{key}.json"


@cache
def own_code() -> str:
    """Return a digest of the source code of slapo_zoo."""
    found = hashlib.sha256()
    for file in sorted(Path(__file__).parents[2].rglob("*.py")):
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
