"""A derivation in a process of its own: a request on stdin, the proof on the last line of stdout.

{"config": {...}, "cls": "BloomForCausalLM", "sizes": [2, 1, 1], "knobs": {}}
"""

import json
import sys
from typing import Any

from slapo_zoo.errors import SlapoError
from slapo_zoo.hf import models as hf
from slapo_zoo.verify.derived import derive


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The document of one request."""
    import transformers

    hf.register_models()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config = transformers.AutoConfig.for_model(**request["config"])
    cls = hf.resolve_class(config, request["cls"])
    knobs = {name: value for name, value in request["knobs"].items() if value}
    return derive(config, cls, tuple(request["sizes"]), **knobs).document()


def main() -> None:
    """Read a request; the last line of the output is the document."""
    try:
        found = answer(json.load(sys.stdin))
    except SlapoError as error:
        found = {"error_of": (str(error.where), str(error.what), error.problem, error.hint)}
    sys.stdout.write(f"\n{json.dumps(found)}\n")


if __name__ == "__main__":
    main()
