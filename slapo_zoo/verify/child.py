"""Program of the child process that verifies or derives: a JSON request on stdin, a JSON document on stdout.

A request to verify, and one to derive a table:
{"config": {...}, "cls": "GPT2LMHeadModel", "mesh": [2, 1, 1], "program": null, "quick": true,
 "layers": false, "folder": null, "knobs": {}}
{"config": {...}, "cls": "BloomForCausalLM", "sizes": [2, 1, 1], "knobs": {}}
"""

import json
import sys
from pathlib import Path
from typing import Any

from slapo_zoo.cards.program import Program
from slapo_zoo.errors import SlapoError
from slapo_zoo.hf import models as hf
from slapo_zoo.verify.core import verify
from slapo_zoo.verify.derive import derive
from slapo_zoo.verify.layerwise import require_memory, verify_layers
from slapo_zoo.verify.report import UNMEASURED, Report
from slapo_zoo.zoo.shrink import shrink_for

MANY_PARAMETERS = 2e8  # a card that fits no small model is verified on one up to this size


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Verify a schedule or derive a table, as a JSON request says; return the outcome as JSON data."""
    import transformers

    hf.register_models()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config = transformers.AutoConfig.for_model(**request["config"])
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
    if request.get("layers"):
        arguments.pop("folder")
        report = verify_layers(config, schedule=_steps(request, config) or "zoo", **arguments)
    elif request.get("program") is None:
        report = verify(config, quick=quick, **arguments)
    else:
        program = Program.parse(request["program"].encode())
        report = _of_program(program, config, quick, arguments)
    if report is None:
        return {"verdict": UNMEASURED, "text": "it fits no small model, and this one is large"}
    return {**report.document(), "text": str(report)}


def _steps(request: dict[str, Any], config: Any) -> Any:
    """Return the (pattern, directive) list of the card in the request; None where the request has no card."""
    if request.get("program") is None:
        return None
    tp, pp, dp = request["mesh"]
    sizes = {"tp": tp, "pp": pp, "dp": dp, "stages": pp}
    return Program.parse(request["program"].encode()).resolve(config, sizes)


def _of_program(
    program: Program, config: Any, quick: bool, arguments: dict[str, Any]
) -> Report | None:
    """Verify the schedule of a card: with `quick` on a small model if one fits it, else on the given config.

    Return None if `quick` is set, no small model fits and the given one has over MANY_PARAMETERS parameters.
    """
    sizes: dict[str, int] = dict(zip(("tp", "pp", "dp"), arguments["mesh"], strict=True))
    stages = 1 + sum(name == "cut_pipeline_stage" for _, name, _ in program.steps)
    sizes["stages"] = stages
    if quick and (found := shrink_for(program, config, sizes, arguments["auto_class"])):
        small, steps = found
        report = verify(small, schedule=steps, quick=False, **arguments)
        return Report(**{**vars(report), "config": "shrunken"})
    if quick and hf.count_parameters(config, arguments["auto_class"]) > MANY_PARAMETERS:
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
