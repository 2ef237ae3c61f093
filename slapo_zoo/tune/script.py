"""The older command form: a config file that defines a space, and a training script to run at each point.

The config is Python and may define

    update_space(args, space)      symbols of the space, from what is fixed by then
    get_bs_range(args)             (least, most, step) of `batch_size`; `ckpt_ratio` is a symbol too then
    throughput(text)               rows per second, from what the script printed

Words of the script's arguments that are names of symbols stand for their values, and every symbol is an
environment variable of the script.
"""

import hashlib
import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slapo_zoo.errors import SlapoError
from slapo_zoo.tune.outcome import CRASH, OK, Outcome
from slapo_zoo.tune.space import Point, Space
from slapo_zoo.tune.worker import run_trial

RATIOS = [0.25, 0.34, 0.5, 0.67, 0.84, 0.92, 1.0]
RATE = re.compile(
    r"([\d.]+(?:e[+-]?\d+)?)\s*(?:samples|rows|sequences|examples)\s*(?:/|per )\s*s"
    r"|(?:throughput|thrpt|samples/s\w*|rows/s\w*)\s*[:=]\s*([\d.]+(?:e[+-]?\d+)?)",
    re.IGNORECASE,
)


def load_config(path: Path) -> Any:
    """The module of a config file; it is the user's own code and is run."""
    if not path.is_file():
        raise SlapoError(
            "tune", f"--config {path}", "no such file", "name a Python file with a space"
        )
    spec: Any = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not any(hasattr(module, name) for name in ("update_space", "get_bs_range")):
        problem = "it defines neither update_space(args, space) nor get_bs_range(args)"
        raise SlapoError("tune", f"--config {path}", problem, "see docs/tuning.md")
    return module


def arguments_of(words: Sequence[str]) -> dict[str, Any]:
    """The arguments of a script by name: numbers as such, several values as a list, a flag as 1.

    >>> arguments_of(["--gpus", "8", "--fp16", "--sizes", "1", "2.5"])
    {'gpus': 8, 'fp16': 1, 'sizes': [1, 2.5]}
    """
    found: dict[str, list[Any]] = {}
    name = ""
    for word in words:
        if re.match(r"-{1,2}[A-Za-z]", word):
            name, _, value = word.lstrip("-").partition("=")
            found[name] = [typed(value)] if value else []
        elif name:
            found[name].append(typed(word))
        else:
            found[word] = []
    return {n: v[0] if len(v) == 1 else v or 1 for n, v in found.items()}


def typed(word: str) -> Any:
    """Convert a word to a number, if it is one."""
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def space_of(config: Any, arguments: Mapping[str, Any]) -> list[Point]:
    """Return the configurations that a config file defines."""
    space = Space()
    if hasattr(config, "update_space"):
        return space.all_points(arguments, config.update_space)
    least, most, step = config.get_bs_range(arguments)
    space.create_symbol("batch_size", range(least, most + 1, step))
    space.create_symbol("ckpt_ratio", RATIOS)
    return space.all_points()


def command_at(script: str, words: Sequence[str], point: Mapping[str, Any]) -> list[str]:
    """The command of a point; a whole word, or what follows `=`, that names a symbol is its value."""
    filled = []
    for word in words:
        name, equals, value = word.partition("=")
        filled.append(
            f"{name}={point[value]}" if equals and value in point else str(point.get(word, word))
        )
    return [sys.executable, script, *filled]


def rate_in(text: str) -> float | None:
    """Return the last throughput that a program's output names."""
    found = [a or b for a, b in RATE.findall(text)]
    return float(found[-1]) if found else None


def measure_script(
    script: str,
    words: Sequence[str],
    point: Mapping[str, Any],
    timeout_s: float,
    config: Any = None,
) -> Outcome:
    """Run a training script at a point and read the throughput that it prints."""
    environment = {name: str(value) for name, value in point.items()}
    outcome, printed = run_trial(command_at(script, words, point), timeout_s, environment)
    if outcome is not None:
        return outcome
    read = getattr(config, "throughput", rate_in)
    rate = read(printed)
    if not rate:
        return Outcome(CRASH, message="the script ended well, but printed no throughput")
    return Outcome(OK, float(rate))


def hash_of(*paths: Path) -> str:
    """Hash the files that decide what a measurement means."""
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in paths)).hexdigest()[:12]
