"""Program of the child process that verifies a schedule or derives one: JSON request on stdin, JSON outcome on stdout.

Requests to verify a schedule, to derive a sharding table, and to find how cp ranks get positions (keys: see `answer`):
{"config": {...}, "cls": "GPT2LMHeadModel", "mesh": [2, 1, 1], "program": null, "quick": true,
 "layers": false, "folder": null, "knobs": {}}
{"config": {...}, "cls": "BloomForCausalLM", "sizes": [2, 1, 1], "knobs": {}}
{"config": {...}, "cls": "BloomForCausalLM", "cut": 1, "way": "gather"}
"""

import gc
import importlib
import json
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from slapo_zoo.errors import SlapoError
from slapo_zoo.hf import models as hf
from slapo_zoo.model.context_parallel import check_steps
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.token_cut import WAYS
from slapo_zoo.verify.core import verify
from slapo_zoo.verify.derive import cut_table, derive
from slapo_zoo.verify.layerwise import require_memory, verify_layers
from slapo_zoo.verify.report import UNMEASURED, Report
from slapo_zoo.zoo.cards.program import Program
from slapo_zoo.zoo.schedule_source import CardProgram
from slapo_zoo.zoo.table import Table, table_for
from slapo_zoo.zoo.tiny_config import tiny_like

MANY_PARAMETERS = 2e8  # a card that fits no small model is verified on one up to this size


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Do the task of a JSON request; return its outcome as JSON data. The keys of the request choose the task:

    - "sizes" (tp, pp, dp): derive a table of sharding rules; the outcome has "table", "sizes", "share", ... of `Proof`.
    - "cut" (number of tp ranks) and "way" (the loader's `cp_attention`): find out how token positions are made when cp
      shards the tokens; the outcome is {"positions": a value of `Table.cut_tokens`, e.g. "counted" for 0, 1, 2, ...}.
    - neither: compare a sharded model with the plain one on "mesh" (tp, pp, dp); the outcome is "verdict", "text" and
      the fields of `Report`. Optional: "program" (text of a schedule.json), "knobs" and "folder" (arguments of
      `core.verify`), "quick" (bool: a small model) and "layers" (bool: a few layers at a time).

    Every request has "config" (a dict) and "cls" (name of the class), and "module" if `transformers` lacks the class.
    """
    import transformers

    hf.register_models()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if "module" in request:  # the user's own class
        cls = getattr(importlib.import_module(request["module"]), request["cls"])
        model_type = request["config"]["model_type"]
        transformers.AutoConfig.register(model_type, cls.config_class, exist_ok=True)
        request = {**request, "cls": cls}
    config = transformers.AutoConfig.for_model(**request["config"])
    if "cut" in request:
        cls = hf.resolve_class(config, request["cls"])
        table = cut_table(config, cls, table_for(config.model_type), request["cut"], request["way"])
        return {"positions": table.positions_of(cls)}
    if "sizes" in request:
        cls = hf.resolve_class(config, request["cls"])
        knobs = {name: value for name, value in request["knobs"].items() if value}
        return derive(config, cls, tuple(request["sizes"]), **knobs).document()
    folder = request.get("folder")
    arguments: dict[str, Any] = {
        "auto_class": request["cls"], "mesh": tuple(request["mesh"]),
        "folder": Path(folder) if folder else None, **request.get("knobs", {}),
    }  # fmt: skip
    quick = request.get("quick", True)
    if not quick:
        require_memory(config, hf.resolve_class(config, request["cls"]))
    program = request.get("program") and Program.parse(request["program"].encode())
    table = _table(config, arguments)
    if request.get("layers"):
        arguments.pop("folder")
        steps = program.resolve(config, _sizes(program, arguments)) if program else "zoo"
        report = verify_layers(config, schedule=steps, **arguments)
    elif program:
        report = _of_program(program, config, quick, arguments, table)
    else:
        report = verify(config, quick=quick, schedule=table or "zoo", **arguments)
    if report is None:
        return {"verdict": UNMEASURED, "text": "it fits no small model, and this one is large"}
    return {**report.document(), "text": str(report)}


def _table(config: Any, arguments: Mapping[str, Any]) -> Table | None:
    """Return the family's sharding rules with what they lack for cp > 1: how token positions are made, found by runs of
    a tiny model. Return None if cp is 1 or nothing is lacking: the rules are used as is. `arguments` are `verify`'s.
    """
    if arguments.get("cp", 1) == 1:
        return None
    table, cls = table_for(config.model_type), hf.resolve_class(config, arguments["auto_class"])
    if table.positions_of(cls) is not None:
        return None
    way = arguments.get("cp_attention", WAYS[0])
    return cut_table(config, cls, table, min(arguments["mesh"][0], 2), way)


def _sizes(program: Program, arguments: Mapping[str, Any]) -> dict[str, int]:
    """Return {"tp", "pp", "dp", "cp": size of the mesh dim, "stages": number of pipeline stages that `program` makes}.
    `program` is the schedule of a card, `arguments` are keyword arguments of `core.verify`.
    """
    stages = 1 + sum(name == "cut_pipeline_stage" for _, name, _ in program.steps)
    sizes = dict(zip(("tp", "pp", "dp"), arguments["mesh"], strict=True))
    return {**sizes, "cp": arguments.get("cp", 1), "stages": stages}


def _of_program(
    program: Program, config: Any, quick: bool, arguments: dict[str, Any], table: Table | None
) -> Report | None:
    """Verify `program`, the schedule of a card: with `quick` on a small model if one fits it, else on the given config.

    Return None if `quick` is set, no small model fits and the given model has over MANY_PARAMETERS (2e8) parameters.
    `arguments` are keyword arguments of `core.verify`; `table` has the sharding rules for cp > 1, None: the family's.
    """
    mesh, sizes, steps, kind = arguments["mesh"], _sizes(program, arguments), None, "given"
    if quick:
        fixed = any(text.isdigit() for text in program.numbers.values())
        small = tiny_like(config, Mesh(*mesh), None, keep_head_size=fixed)
        small.architectures = [program.model_class]
        with suppress(SlapoError):
            steps = program.resolve(small, sizes)
            config, kind = small, "shrunken"
        if steps is None and hf.count_parameters(config, program.model_class) > MANY_PARAMETERS:
            return None
    steps = program.resolve(config, sizes) if steps is None else steps
    check_steps(steps, sizes["cp"], arguments.get("cp_attention", WAYS[0]))
    schedule: Any = steps
    if sizes["cp"] > 1:
        schedule = CardProgram(lambda sch: sch.replay(steps), table or table_for(config.model_type))
    report = verify(config, schedule=schedule, quick=False, **arguments)
    return replace(report, config=kind)


def main() -> None:
    """Read a JSON request, as `answer` takes it, from stdin; write its answer as JSON in the last line of stdout."""
    gc.freeze()  # else the collector scans all objects of torch again after each emulation of ranks
    try:
        found = answer(json.load(sys.stdin))
    except SlapoError as error:
        parts = error.where, str(error.what), error.problem, error.hint
        found = {"error_of": parts}
    except Exception as error:  # in the answer, as libraries write to stderr until the very end
        traceback.print_exc()
        hint = "slapo_zoo.verify(...) runs the same check in your own process"
        found = {"error_of": ("verify", "", f"{type(error).__name__}: {error}", hint)}
    sys.stdout.write(f"\n{json.dumps(found)}\n")


if __name__ == "__main__":
    main()
