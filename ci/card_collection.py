"""The cards of hub_cards/: one per family, at the layout of one node of eight devices.

`card_collection.py --verify` also runs each card whose program was not verified yet on eight emulated
ranks, beside plain transformers (half a minute each), and writes the outcome into its verify.json.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from slapo_zoo.cards.card import Card, read_card
from slapo_zoo.cards.check import verify_card
from slapo_zoo.cards.make import zoo_card
from slapo_zoo.errors import SlapoError
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.zoo.arguments import config_of
from slapo_zoo.zoo.table import families

NODE = Mesh(tp=4, pp=2)


def cards() -> Iterator[tuple[str, Card]]:
    """(family, card), sizes left open where the table allows; measured figures are not in it."""
    for family in families():
        config, head = config_of(family)
        yield family, zoo_card(config, head, NODE, family, any_size=True)


def write_all(folder: Path) -> list[Path]:
    """Write every card anew; what was measured and verified is kept while the program is the same."""
    written = []
    for family, card in cards():
        place = folder / family
        if place.exists():
            before = read_card(place)
            same = before.program == card.program
            kept = {name: getattr(before, name) for name in ("verify", "bench", "tuning")}
            card = replace(card, **kept) if same else card
        card.write(place)
        written.append(place)
    return written


def is_verified(place: Path) -> bool:
    """Whether the very program of a card was run and found right."""
    card = read_card(place)
    return card.verify.get("verdict") == "verified" and card.verify["program"] == card.program.hash


if __name__ == "__main__":
    for path in write_all(Path("hub_cards")):
        verdict = ""
        if "--verify" in sys.argv and not is_verified(path):
            try:
                verdict = verify_card(path, config_of(read_card(path).base_model)[0])["verdict"]
            except SlapoError as error:  # the other cards are none the worse for it
                verdict = str(error)
        print(path, verdict, flush=True)
