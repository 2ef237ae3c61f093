"""Store tuned values beside a schedule card: `tuning.json`, one entry per device and setting."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slapo_zoo.tune.database import Scope
from slapo_zoo.tune.outcome import Outcome
from slapo_zoo.zoo.cards import files
from slapo_zoo.zoo.cards.card import read_card
from slapo_zoo.zoo.tuned import TUNING


def record(card: Path, scope: Scope, point: Mapping[str, Any], outcome: Outcome) -> None:
    """Write the fastest configuration of a search, `point` (knob --> value), into a card's `tuning.json`.

    `scope` has the conditions of the measurement, `outcome` its result.

    Raises:
        CardError: the folder `card` is no complete card.
    """
    read_card(card)  # raises CardError if it is no card
    before = json.loads(files.read(card, TUNING)) if (card / TUNING).exists() else {}
    setting = ", ".join(f"{name}={value}" for name, value in sorted(scope.setting.items()))
    entry = {
        "point": dict(point), "rows_per_s": round(outcome.throughput, 4),
        "peak_memory_bytes": outcome.peak_memory, "steps": outcome.steps, "model": scope.model,
        "setting": dict(scope.setting), "software": dict(scope.versions),
    }  # fmt: skip
    before.setdefault(scope.device, {})[setting or "-"] = entry
    part = card / f".git-part-{TUNING}"  # a name that no card has
    part.write_text(json.dumps(before, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(part, card / TUNING)
