"""Steps of a user of the Hub: each line `NAME FOLDER` on stdin is run in a fork of this process, which has only imported.

HF_ENDPOINT is read when the client is imported, so the unmodified client wants a fresh process.
"""

import json
import os
import sys
import traceback
from pathlib import Path

import torch
import transformers

from slapo_zoo import AutoScheduledModel, Mesh
from slapo_zoo.errors import CardError
from slapo_zoo.verify import card_check, child
from slapo_zoo.zoo.cards.card import read_card
from slapo_zoo.zoo.cards.hub import Reference, pull, push
from slapo_zoo.zoo.cards.make import zoo_card
from slapo_zoo.zoo.cards.resolve_card import load_card

REPO = "me/gpt2-tiny"


def tiny():
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 65, "n_positions": 32}
    return transformers.GPT2Config(**sizes, architectures=["GPT2LMHeadModel"])


def refused(action, *args, **kwargs):
    try:
        action(*args, **kwargs)
    except CardError as error:
        return str(error)
    raise AssertionError("it was accepted")


def publish(folder):
    """Publish a card, a second version and a model's weights; provoke conflicts."""
    card = folder / "card"
    card.mkdir()
    zoo_card(tiny(), None, Mesh(), "gpt2").write(card)
    first = push(card, REPO, tag="v1")
    zoo_card(tiny(), None, Mesh(), "gpt2", checkpoint_ratio=0.5).write(card)
    late = refused(push, card, REPO, parent="1" * 40)
    twice = refused(push, card, REPO, tag="v1")
    second = push(card, REPO, tag="v2")
    model = AutoScheduledModel.from_config(tiny())
    live = model.push_schedule_to_hub("me/live", any_size=True)
    model.push_to_hub("me/model")
    (card / "plot.png").write_bytes(b"\x89PNG" + bytes(5000))
    picture = push(card, "me/picture")
    return {"first": str(first), "second": str(second), "live": live, "late": late,
            "twice": twice, "picture": str(picture)}  # fmt: skip


def load(folder):
    """Load from an empty cache by sha, by tag and through the loader, also a schedule in Python; request what is missing."""
    known = json.loads((folder / "published.json").read_text())
    by_sha, by_tag = load_card(known["first"]), load_card(f"{REPO}@v1")
    card_check.verify_apart = child.answer  # one process more would import torch again
    model = AutoScheduledModel.from_config(tiny(), schedule=known["second"])
    bigger = transformers.GPT2Config(**{**tiny().to_dict(), "n_embd": 64})
    # one card is verified; the others are read
    any_size = AutoScheduledModel.from_config(bigger, schedule=known["live"], verify="off")
    both = AutoScheduledModel.from_pretrained("me/model", schedule="me/model@main", verify="off")
    plain = transformers.GPT2LMHeadModel.from_pretrained("me/model").state_dict()
    picture = pull(Reference.parse(known["picture"]))
    return {
        "same": by_sha == by_tag,
        "hash": by_sha.program.hash,
        "program": str(model.schedule),
        "weights": all(torch.equal(p, plain[n]) for n, p in both.named_parameters()),
        "both": str(both.schedule) == str(AutoScheduledModel.from_config(tiny()).schedule),
        "loss": float(model.train_step({k: torch.ones(2, 8, dtype=torch.int64) for k in ("input_ids", "labels")})),
        "any_size": len(any_size.schedule.history),
        "pictures": sorted(p.name for p in picture.folder.iterdir()),
        "none": refused(load_card, "me/none@v1"),
        "tag": refused(load_card, f"{REPO}@v9"),
        "sha": refused(load_card, f"{REPO}@{'0' * 40}"),
        "structure": refused(AutoScheduledModel.from_config, bigger, schedule=known["first"]),
        "no card": refused(load_card, "me/weights@main"),
        "python": python(folder),
    }  # fmt: skip


def moved(folder):
    """Load after the tag was moved, and after a file of the repository was tampered with."""
    known = json.loads((folder / "published.json").read_text())
    return {
        "moved": refused(load_card, f"{REPO}@v1"),
        "by sha": load_card(known["first"]).program.hash,
        "tampered": refused(load_card, "me/tampered@main"),
        "read": read_card(pull(Reference.parse(known["first"])).folder, Path("/")).program.hash,
    }


def offline(folder):
    """Load from the cache with HF_HUB_OFFLINE=1."""
    known = json.loads((folder / "published.json").read_text())
    return {
        "by sha": load_card(known["first"]).program.hash,
        "by tag": load_card(f"{REPO}@v1").program.hash,
        "not there": refused(load_card, f"{REPO}@v2"),
        "no sha": refused(load_card, f"{REPO}@{'2' * 40}"),
    }


def python(folder):
    """Load a schedule written in Python, with and without trust_remote_code and a pinned sha."""
    known = json.loads((folder / "published.json").read_text())
    at = {"config": tiny()}
    main = refused(AutoScheduledModel.from_config, **at, schedule="me/python@main", trust_remote_code=True)  # fmt: skip
    untrusted = refused(AutoScheduledModel.from_config, **at, schedule=known["python"])
    ran = folder / "ran"
    before = ran.exists()
    model = AutoScheduledModel.from_config(**at, schedule=known["python"], trust_remote_code=True)
    return {"main": main, "untrusted": untrusted, "before": before, "ran": ran.exists(),
            "program": str(model.schedule)}  # fmt: skip


def run(name, folder):
    """Run a step: its result goes to FOLDER/NAME.json, what it says to FOLDER/NAME.err."""
    said = os.open(folder / f"{name}.err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 2)
    try:
        outcome = globals()[name](folder)
        (folder / f"{name}.json").write_text(json.dumps(outcome))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    for line in sys.stdin:
        step, _, place = line.rstrip("\n").partition(" ")
        process = os.fork() or run(step, Path(place))
        print("ended", os.waitpid(process, 0)[1], flush=True)
