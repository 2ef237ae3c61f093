"""Program of the child process that verifies or derives: a JSON request on stdin, a JSON document on stdout.

A request to verify, one to derive a table, and one to probe whether cp can shard the tokens:
{"config": {...}, "cls": "GPT2LMHeadModel", "mesh": [2, 1, 1], "program": null, "quick": true,
 "layers": false, "folder": null, "knobs": {}}
{"config": {...}, "cls": "BloomForCausalLM", "sizes": [2, 1, 1], "knobs": {}}
{"config": {...}, "cls": "BloomForCausalLM", "cut": 1, "way": "gather"}
"""

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from slapo_zoo.errors import SlapoError
from slapo_zoo.hf import models as hf
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.verify.core import verify
from slapo_zoo.verify.derive import cut_table, derive
from slapo_zoo.verify.layerwise import require_memory, verify_layers
from slapo_zoo.verify.report import UNMEASURED, Report
from slapo_zoo.zoo.cards.program import Program
from slapo_zoo.zoo.table import table_for
from slapo_zoo.zoo.tiny_config import tiny_like

MANY_PARAMETERS = 2e8  # a card that fits no small model is verified on one up to this size


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Do the task of a request; return its outcome as JSON data. Its keys choose the task:

    - "sizes" (tp, pp, dp): derive a table of sharding rules.
    - "cut" (size of tp) and "way" (`cp_attention`): find how cp shards the tokens of a class.
    - neither: verify a schedule on "mesh" (tp, pp, dp). Optional are "program" (text of a schedule.json), "knobs" and
      "folder" (of `core.verify`), "quick" (bool: a small model) and "layers" (bool: compare a few layers at a time).

    Every request has "config" (a dict) and "cls" (name of the class).
    """
    import transformers

    hf.register_models()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
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
    if request.get("layers"):
        arguments.pop("folder")
        steps = program.resolve(config, _sizes(program, request["mesh"])) if program else "zoo"
        report = verify_layers(config, schedule=steps, **arguments)
    elif program:
        report = _of_program(program, config, quick, arguments)
    else:
        report = verify(config, quick=quick, **arguments)
    if report is None:
        return {"verdict": UNMEASURED, "text": "it fits no small model, and this one is large"}
    return {**report.document(), "text": str(report)}


def _sizes(program: Program, mesh: Sequence[int]) -> dict[str, int]:
    """Return the sizes of a mesh (tp, pp, dp) by name, and the number of stages that a card's program makes."""
    stages = 1 + sum(name == "cut_pipeline_stage" for _, name, _ in program.steps)
    return {**dict(zip(("tp", "pp", "dp"), mesh, strict=True)), "stages": stages}


def _of_program(
    program: Program, config: Any, quick: bool, arguments: dict[str, Any]
) -> Report | None:
    """Verify the schedule of a card: with `quick` on a small model if one fits it, else on the given config.

    Return None if `quick` is set, no small model fits and the given one has over MANY_PARAMETERS (2e8) parameters.

    `arguments` are those of `verify` besides the schedule; "mesh" is one of them.
    """
    mesh, sizes, steps = arguments["mesh"], _sizes(program, arguments["mesh"]), None
    if quick:
        fixed = any(text.isdigit() for text in program.numbers.values())
        small = tiny_like(config, Mesh(*mesh), None, keep_head_size=fixed)
        small.architectures = [program.model_class]
        with suppress(SlapoError):
            steps = program.resolve(small, sizes)
    if steps is not None:
        report = verify(small, schedule=steps, quick=False, **arguments)
        return replace(report, config="shrunken")
    if quick and hf.count_parameters(config, program.model_class) > MANY_PARAMETERS:
        return None
    return verify(config, schedule=program.resolve(config, sizes), quick=False, **arguments)


def main() -> None:
    """Read a request from stdin, and write the outcome as JSON in the last line of stdout."""
    try:
        found = answer(json.load(sys.stdin))
    except SlapoError as error:
        parts = error.where, str(error.what), error.problem, error.hint
        found = {"error_of": parts}
    sys.stdout.write(f"\n{json.dumps(found)}\n")


if __name__ == "__main__":
    main()
