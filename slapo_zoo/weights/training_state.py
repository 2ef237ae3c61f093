"""The part of a training checkpoint that is no tensor: `training_state.json`."""

import json
from pathlib import Path
from typing import Any

from slapo_zoo.errors import WeightsError

FILE, FORMAT = "training_state.json", "slapo-zoo-training-state/1"
FIELDS = {
    "step": int, "mesh": dict, "random": dict, "torch_random": dict,
    "optimizer": dict | None, "scheduler": dict | None, "data_position": object, "extra": object,
}  # fmt: skip


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Write the fields of a training checkpoint."""
    text = json.dumps({"format": FORMAT, **state}, indent=1)
    (folder / FILE).write_text(text + "\n", encoding="utf-8")


def read_state(folder: Path) -> dict[str, Any]:
    """The JSON part, checked as far as its own fields go."""
    place, again = str(folder / FILE), "pass the folder that save_checkpoint wrote"
    try:
        state = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        hint = f"{again}; weights alone are loaded by from_pretrained"
        raise WeightsError(place, "", "found no such file", hint) from None
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(place, "", f"found no JSON: {error}", again) from error
    found = state.get("format") if isinstance(state, dict) else type(state).__name__
    if found != FORMAT:
        raise WeightsError(place, "format", f"found {found!r:.80}, expected {FORMAT!r}", again)
    for name, kind in FIELDS.items():
        if name not in state or not isinstance(state[name], kind):
            found = type(state[name]).__name__ if name in state else "nothing"
            raise WeightsError(place, name, f"found {found}, expected {kind}", again)
    return state
