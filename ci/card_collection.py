"""Write the cards of hub_cards/: one per family, for one node of eight devices (tp=4, pp=2).

`card_collection.py --verify` also runs each card that was not verified yet on eight emulated ranks, compares it with
plain transformers (half a minute each), and writes the outcome into its verify.json. `card_collection.py --tune
[FAMILY ...]` simulates the fastest layout on each cluster of `card_sizes`, for the size of the family given there,
and writes it into the card's tuning.json; the result is the same on each run.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from card_plan import plan_for, with_plans
from card_sizes import CLUSTERS, LENGTH, MOST_TOKENS, ROOM, ROWS, SIZES

from slapo_zoo.errors import SlapoError
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.tune.planner.hardware import HARDWARE
from slapo_zoo.tune.planner.layout_search import Planner
from slapo_zoo.verify.card_check import verify_card
from slapo_zoo.zoo.argument_values import config_of
from slapo_zoo.zoo.cards.card import Card, read_card
from slapo_zoo.zoo.cards.make import zoo_card
from slapo_zoo.zoo.cards.plans import Plan, plans_of
from slapo_zoo.zoo.table import families, table_for
from slapo_zoo.zoo.tuned import CARDS

NODE = Mesh(tp=4, pp=2)
# the first head that a family has is used; a model without a loss cannot be planned
HEADS = ("AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModelForCausalLM", "AutoModelForSpeechSeq2Seq",
         "AutoModelForImageClassification")  # fmt: skip


def cards() -> Iterator[tuple[str, Card]]:
    """Yield (family, card) for every family, for any model size where the table allows; without measurements."""
    for family in families():
        yield family, card_of(family)


def card_of(family: str) -> Card:
    """Return the card of a family; a published card keeps its head."""
    config, head = config_of(family)
    if (CARDS / family).exists():
        head = read_card(CARDS / family).program.model_class
    return zoo_card(config, head, NODE, family, any_size=True)


def write_all(folder: Path) -> list[Path]:
    """Write every card below `folder`, and return their folders.

    Measurements and verification of an existing card are kept if its schedule is unchanged.
    """
    written = []
    for family, card in cards():
        place = folder / family
        if place.exists():
            before = read_card(place)
            same = before.program == card.program
            kept = {name: getattr(before, name) for name in ("verify", "bench", "tuning")}
            plans = with_plans({}, plans_of(before.tuning))  # plans do not depend on the program
            card = replace(card, **kept) if same else replace(card, tuning=plans)
        card.write(place)
        written.append(place)
    return written


def is_verified(place: Path) -> bool:
    """Return whether the card in folder `place` was verified with exactly the schedule that it has now."""
    card = read_card(place)
    return card.verify.get("verdict") == "verified" and card.verify["program"] == card.program.hash


def sized(family: str) -> tuple[str, Any, str]:
    """Return (name, config, head class with a loss) of the size in which a family is planned."""
    import transformers

    config, own = config_of(family)
    name, changes = SIZES.get(family, (f"{type(config).__name__} by itself", {}))
    config = type(config)(**{**table_for(family).defaults, **changes})
    heads = [head for head in HEADS if type(config) in getattr(transformers, head)._model_mapping]
    return name, config, (heads or [own or "AutoModel"])[0]


def plans(family: str) -> Iterator[Plan]:
    """Yield the fastest layout of a family on each cluster; print the clusters where none fits."""
    name, config, head = sized(family)
    tokens = min(getattr(config, "max_position_embeddings", None) or LENGTH, MOST_TOKENS)
    planner = Planner(config, HARDWARE[CLUSTERS[0][0]], tokens, CLUSTERS[0][2], "kernels", head)
    for device, gpus, precision in CLUSTERS:
        hardware = HARDWARE[device]
        on = planner.on(replace(hardware, memory=ROOM * hardware.memory), precision)
        try:
            yield plan_for(on, device, gpus, ROWS, name, precision)
        except SlapoError as error:
            print(f"{family}: {error}", flush=True)


def tune(family: str, folder: Path) -> None:
    """Simulate the fastest layouts of a family, and write them into its card below `folder`."""
    card = read_card(folder / family)
    tuning = with_plans(card.tuning, list(plans(family)))
    replace(card, tuning=tuning).write(folder / family)


if __name__ == "__main__" and "--tune" in sys.argv:
    chosen = [name for name in sys.argv[1:] if not name.startswith("-")]
    for name in chosen or families():
        tune(name, Path("hub_cards"))
        print("hub_cards", name, flush=True)
elif __name__ == "__main__":
    for path in write_all(Path("hub_cards")):
        verdict = ""
        if "--verify" in sys.argv and not is_verified(path):
            try:
                verdict = verify_card(path, config_of(read_card(path).base_model)[0])["verdict"]
            except SlapoError as error:  # the other cards are still verified
                verdict = str(error)
        print(path, verdict, flush=True)
