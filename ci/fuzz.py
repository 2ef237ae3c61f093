"""Feed mutated files to every parser of untrusted files, and count findings.

    python ci/fuzz.py --inputs 1000000 [--seed 0] [--only page]

A corpus of valid files is mutated: bits, bytes, numbers, brackets and slices; in half of the inputs that are JSON (or
a safetensors header) values and keys instead, so that the JSON stays valid. Inputs that a parser accepts join the
corpus, and so do those that it refuses at a source line where it refused none before. A SlapoError is a correct
answer. Any other exception is a finding, and so is an input that takes more than 50 ms per 10 kB three times. One
JSON line is printed: inputs, findings, and the slowest input per 10 kB. The exit code is 1 if there are findings.
"""

import argparse
import contextlib
import copy
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config

from slapo_zoo import AutoScheduledModel, Mesh, SlapoError, save_checkpoint
from slapo_zoo.weights.checksums import read_checksums
from slapo_zoo.weights.index import read_index
from slapo_zoo.weights.safetensors_file import SafetensorsFile
from slapo_zoo.weights.training_state import read_state
from slapo_zoo.zoo.argument_values import changed_config
from slapo_zoo.zoo.cards import Program
from slapo_zoo.zoo.cards.make import zoo_card
from slapo_zoo.zoo.cards.readme import metadata_of

PIECES = [b"[", b"]", b"{", b"}", b'"', b"\\", b":", b",", b"null", b"true", b"NaN", b"1e999", b"-1",
          b"9" * 20, b"\xff", b"\x00", b"\\ud800", b"$tensor", b"- ", b"? ", b"&a ", b"!!x "]  # fmt: skip
ODD = [None, True, -1, 0, 2**63, 1e308, float("nan"), "", "x" * 300, "../x", "\ud800", [], {}, [[]],
       {"": 0}, [0] * 40, "$tensor", "0", 0.5, -(2**31)]  # fmt: skip
MOST = 256  # inputs that a corpus keeps
LIMIT_MS = 50.0  # for 10 kB
Parser = Callable[[Path, bytes], object]


def written(name: str, parse: Callable[[Path], object]) -> Parser:
    """Return a parser that writes its input to the file `name` in a folder, then calls `parse` with the path."""

    def run(folder: Path, data: bytes) -> object:
        (folder / name).write_bytes(data)
        return parse(folder / name)

    return run


def targets(folder: Path) -> dict[str, tuple[Parser, bytes]]:
    """Return {kind of file: (parser, bytes of a valid file)}; the files are made in `folder`."""
    config = GPT2Config(
        n_embd=8, n_head=2, n_layer=1, vocab_size=11, n_positions=8,
        architectures=["GPT2LMHeadModel"],
    )  # fmt: skip
    model = AutoScheduledModel.from_config(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    save_checkpoint(model, folder / "one", optimizer, step=1, max_shard_size="1KB")
    card = zoo_card(config, None, Mesh(tp=2), "gpt2").contents()
    shard = min((folder / "one").glob("model-*.safetensors"))

    def read(name: str) -> bytes:
        return (folder / "one" / name).read_bytes()

    def program(_: Path, data: bytes) -> object:
        return Program.parse(data)

    def page(_: Path, data: bytes) -> object:
        return metadata_of(data)

    place = Path
    return {
        "card": (program, card["schedule.json"]),
        "page": (page, card["README.md"]),
        "header": (written("x.safetensors", lambda p: SafetensorsFile(p).close()), shard.read_bytes()),
        "state": (written("training_state.json", lambda p: read_state(p.parent)), read("training_state.json")),
        "sums": (written("checksums.json", lambda p: read_checksums(p.parent)), read("checksums.json")),
        "index": (written("one/model.safetensors.index.json", read_index), read("model.safetensors.index.json")),
        "config": (written("config.json", lambda p: changed_config(place(p.parent), {})), read("config.json")),
    }  # fmt: skip


def mutated(data: bytes, corpus: list[bytes], draw: random.Random) -> bytes:
    """Return `data` with a few random changes, some of them slices of other inputs of the corpus."""
    found = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        place, kind = draw.randrange(len(found) + 1), draw.randrange(6)
        stop = min(len(found), place + draw.randint(1, 64))
        if kind == 0 and place < len(found):
            found[place] ^= 1 << draw.randrange(8)
        elif kind == 1:
            found[place:place] = draw.choice(PIECES) * draw.choice([1, 1, 1, 40])
        elif kind == 2:
            del found[place:stop]
        elif kind == 3:
            found[place:place] = found[place:stop] * draw.choice([1, 2, 100])
        elif kind == 4:
            other = draw.choice(corpus)
            start = draw.randrange(len(other) + 1)
            found[place:stop] = other[start : start + draw.randint(1, 64)]
        elif place < len(found):
            found[place] = draw.randrange(256)
    return bytes(found[: 2**17])


def places_in(value: Any) -> list[tuple[Any, Any]]:
    """Return (container, key or index) of every value inside a JSON value."""
    if not isinstance(value, dict | list):
        return []
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    return [(value, key) for key in keys] + [p for key in keys for p in places_in(value[key])]


def bent(data: bytes, draw: random.Random) -> bytes | None:
    """Return the JSON in `data` with a few other values and keys; None if `data` is no JSON."""
    size = int.from_bytes(data[:8], "little")
    head = (
        8 if 2 <= size <= len(data) - 8 else 0
    )  # a safetensors file: a length before the JSON, bytes after it
    try:
        found = json.loads(data[head : head + size] if head else data)
    except (ValueError, RecursionError):
        return None
    for _ in range(draw.randint(1, 3)):
        if not (places := places_in(found)):
            return None
        (inside, key), (other, name) = draw.choice(places), draw.choice(places)
        kind = draw.randrange(4)
        if kind == 0:
            inside[key] = copy.deepcopy(draw.choice(ODD))
        elif kind == 1:
            inside[key] = json.loads(json.dumps(other[name]))
        elif kind == 2:
            del inside[key]
        elif isinstance(inside, dict):
            inside[draw.choice(["", "x", "\ud800", str(name), str(key) + "x"])] = inside.pop(key)
    text = json.dumps(found).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + size :] if head else text


def refused_at(error: BaseException) -> tuple[tuple[str, int], ...]:
    """Return (file, line) of each frame in the traceback of an error, the outermost first."""
    found, step = [], error.__traceback__
    while step is not None:
        found.append((step.tb_frame.f_code.co_filename, step.tb_lineno))
        step = step.tb_next
    return tuple(found)


def cost(parse: Parser, folder: Path, data: bytes, begin: float) -> float:
    """Return milliseconds of CPU time per 10 kB since `begin`; a slow input is parsed twice more, and the least counts."""
    found = [time.thread_time() - begin]
    scale = 1e3 / max(1.0, len(data) / 1e4)
    while found[0] * scale > LIMIT_MS and len(found) < 3:
        begin = time.thread_time()
        with contextlib.suppress(Exception):
            parse(folder, data)
        found.append(time.thread_time() - begin)
    return min(found) * scale


def main() -> int:
    """Parse the mutated inputs, print the report, and return 1 if there are findings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="one kind of file")
    options = parser.parse_args()
    draw, count, findings = random.Random(options.seed), Counter(), Counter()  # noqa: S311
    slowest: dict[str, float] = {}
    paths: set[tuple[str, tuple[tuple[str, int], ...]]] = set()
    with tempfile.TemporaryDirectory() as name:
        known = targets(Path(name))
        corpora = {key: [data] for key, (_, data) in known.items()}
        names = [name for name in sorted(known) if options.only in (None, name)]
        for number in range(options.inputs):
            key = names[number % len(names)]
            parse, corpus = known[key][0], corpora[key]
            data = draw.choice(corpus)
            data = (draw.random() < 0.5 and bent(data, draw)) or mutated(data, corpus, draw)
            begin = time.thread_time()
            try:
                parse(Path(name), data)
                count[f"{key} accepted"] += 1
                if len(corpus) < MOST:
                    corpus.append(data)
            except SlapoError as error:
                count[f"{key} refused"] += 1
                if (path := (key, refused_at(error))) not in paths:
                    paths.add(path)
                    corpus.append(data)
            except Exception as error:
                findings[f"{key}: {type(error).__name__}: {str(error)[:80]}"] += 1
            taken = cost(parse, Path(name), data, begin)
            if taken > LIMIT_MS:
                findings[f"{key}: {taken:.0f} ms per 10 kB: {data[:80]!r}"] += 1
            slowest[key] = max(slowest.get(key, 0.0), round(taken, 1))
    report = {
        "inputs": options.inputs,
        "findings": dict(findings),
        "paths": len(paths),
        "ms per 10 kB": slowest,
    }
    sys.stdout.write(json.dumps({**report, "counts": dict(sorted(count.items()))}) + "\n")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
