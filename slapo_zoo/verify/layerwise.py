"""Verification of a model that is larger than the memory, a few layers at a time.

Each run builds the embeddings, the head and LAYERS_AT_ONCE (2) consecutive layers in their true widths.
Layers whose config and directives equal those of layers before them are skipped: the zoo's schedule of
96 layers costs one run, and a schedule that treats layer 17 differently costs two.
"""

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from slapo_zoo.errors import SlapoError
from slapo_zoo.hf import models as hf
from slapo_zoo.language.schedule import Step
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.verify.compare import Divergence
from slapo_zoo.verify.core import verify
from slapo_zoo.verify.report import Report
from slapo_zoo.zoo.outline import Outline
from slapo_zoo.zoo.table import base_prefix
from slapo_zoo.zoo.tiny_config import layer_fields

LAYERS_AT_ONCE = 2
BYTES_PER_PARAMETER = 150  # measured: weights, gradients, optimizer; two of the runs are in fp64
ENDS = {"divide_tokens": 0, "join_tokens": -1}  # directives of the first or the last of the blocks


@hf.no_progress_bars()
def verify_layers(
    config: Any, auto_class: Any = None, mesh: tuple[int, int, int] = (2, 1, 1),
    schedule: Any = "zoo", seed: int = 0, **knobs: Any,
) -> Report:  # fmt: skip
    """Compare a sharded with the plain model, LAYERS_AT_ONCE (2) layers at a time, up to the first that are wrong. The
    paths in the report carry the layer numbers of the given model.

    Args:
        config: a config of `transformers`.
        auto_class: class of the model with its head; None takes the config's own class.
        mesh: sizes of tp, pp and dp; pp must be 1, as pipeline cuts are verified on a small model.
        schedule: "zoo" (built in), a Schedule, a list of (pattern, directive), or a function that shards a Schedule.
        seed: seed of weights, batch and dropout.
        knobs: values of sequence_parallel and checkpoint_ratio.

    Raises:
        SlapoError: pp > 1, too little memory, or the config does not say how many layers there are.
    """
    if mesh[1] > 1:
        problem = "layers that are verified a few at a time have no pipeline stages"
        hint = "verify the cuts with `slapo-zoo verify --pp N`, on a small model"
        raise SlapoError("verify", f"pp={mesh[1]}", problem, hint)
    cls = hf.resolve_class(config, auto_class)
    require_memory(few_layers(config, 0), cls)
    given = copy.deepcopy(config)
    outline = Outline(given, cls, Mesh(*mesh), torch.float32, seed=seed, schedule=schedule, **knobs)
    numbers, reports = _Numbers(outline), []
    for start in _starts(config, outline, numbers):
        few = few_layers(config, start)
        steps = numbers.moved(outline.schedule.history, start)
        found = verify(few, cls.__name__, mesh, steps, quick=False, seed=seed)
        reports.append(numbers.as_named(found, start))
        if not found.ok:
            break
    return _merged(reports)


def require_memory(config: Any, cls: Any) -> None:
    """Raise a SlapoError if a verification of this config needs more memory than is free."""
    needed = BYTES_PER_PARAMETER * hf.count_parameters(config, cls.__name__)
    free = _available()
    if free is not None and needed > free:
        problem = f"needs about {needed / 1e9:.0f} GB of memory, {free / 1e9:.0f} GB are free"
        hint = "leave --full and --layers out: a small model of the same family is verified then"
        raise SlapoError("verify", cls.__name__, problem, hint)


def _available() -> int | None:
    """Return the bytes of memory that are available without swapping; None if the system does not say."""
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.exists() else []
    sizes = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
    return sizes[0] if sizes else None


def few_layers(config: Any, start: int) -> Any:
    """Return a copy of the config with only the LAYERS_AT_ONCE (2) layers from number `start` on, in their full widths."""
    few, counts, stop = copy.deepcopy(config), layer_fields(config), start + LAYERS_AT_ONCE
    for name, listed in vars(config).items():
        if "layer" in name and isinstance(listed, list) and len(listed) in counts.values():
            setattr(few, name, listed[start:stop])
    if getattr(config, "attention_types", None):  # GPT-Neo: the list of layers follows from it
        few.attention_types = [[config.attention_layers[start:stop], 1]]
    for name, count in counts.items():
        setattr(few, name, min(count, LAYERS_AT_ONCE))
    return few


def _starts(config: Any, outline: Outline, numbers: "_Numbers") -> Iterator[int]:
    """Yield the number of the first layer of each group of 2 layers (LAYERS_AT_ONCE) that differs from all groups
    before: in config values per layer, or in directives (`shard`, ...) of `outline`, whose block numbers `numbers`
    makes relative to the group's first layer.
    """
    counts = layer_fields(config).values()
    if not counts:
        problem = f"a {type(config).__name__} does not say how many layers there are"
        raise SlapoError("verify", "--layers", problem, "leave it out, or pass --full instead")
    last, seen = max(0, max(counts) - LAYERS_AT_ONCE), set()
    if outline.table.calls:  # one shared block: every stretch is the same
        last = 0
    for start in dict.fromkeys([*range(0, last, LAYERS_AT_ONCE), last]):
        steps = numbers.moved(outline.schedule.history, start)
        key = (few_layers(config, start).to_json_string(), tuple(map(str, steps)))
        if key not in seen:
            seen.add(key)
            yield start


class _Numbers:
    """Conversion of the block numbers in paths and patterns between the full model and a model with few of its layers."""

    def __init__(self, outline: Outline):
        prefix = base_prefix(outline.model)
        shapes = [re.escape(prefix + b).replace(r"\*\*", ".*") for b in outline.table.blocks]
        self._known = re.compile("|".join(f"(?:{s.removesuffix(chr(92) + '*')})(?=[0-9])" for s in shapes))  # fmt: skip
        self._shared = bool(outline.table.calls)

    def moved(self, steps: Sequence[Step], start: int) -> list[Step]:
        """Return those of `steps`, the model's directives (`shard`, ...), that change layers `start` and `start` + 1
        (as blocks 0 and 1) or modules outside of blocks, for a model that has only these two layers.
        """
        if self._shared:
            return list(steps)
        found = []
        for pattern, directive in steps:
            number = self._number(pattern)
            end = ENDS.get(str(getattr(directive, "sync_op_or_fn", "")))
            if number is not None and end is not None:
                found.append((self._with(pattern, end % LAYERS_AT_ONCE), directive))
            elif number is None:
                found.append((pattern, directive))
            elif start <= number < start + LAYERS_AT_ONCE:
                found.append((self._with(pattern, number - start), directive))
        return found

    def as_named(self, report: Report, start: int) -> Report:
        """Return a copy of a report on layers `start` and `start` + 1, with the full model's block numbers in paths."""

        def named(path: str) -> str:
            number = None if self._shared else self._number(path)
            return path if number is None else self._with(path, number + start)

        where = report.divergence
        if where is not None:
            suspects = tuple(map(named, where.suspects))
            where = Divergence(named(where.path), where.phase, named(where.what), where.rank, suspects)  # fmt: skip
        return replace(
            report, divergence=where,
            findings=[replace(f, what=named(f.what)) for f in report.findings],
            directives=[(named(path), text) for path, text in report.directives],
        )  # fmt: skip

    def _split(self, path: str) -> tuple[int, int] | None:
        """Return (begin, end) of the block number within a path, as indices of characters; None if the path has none."""
        found = self._known.match(path)
        digits = re.compile("[0-9]+").match(path, found.end()) if found else None
        return digits.span() if digits else None

    def _number(self, path: str) -> int | None:
        span = self._split(path)
        return int(path[slice(*span)]) if span else None

    def _with(self, path: str, number: int) -> str:
        begin, end = self._split(path) or (0, 0)
        return f"{path[:begin]}{number}{path[end:]}"


def _merged(reports: Sequence[Report]) -> Report:
    """Merge the reports of all runs: add up counts and seconds, keep the largest errors and the last report's findings."""
    last, checks = reports[-1], dict(reports[0].checks)
    for report in reports[1:]:
        for check, found in report.checks.items():
            before = checks[check]
            if isinstance(found, dict) and isinstance(before, dict):
                checks[check] = {
                    "compared": before["compared"] + found["compared"],
                    "worst": max(before["worst"], found["worst"]),
                }
            elif isinstance(found, dict):
                checks[check] = found
    seconds = round(sum(report.seconds for report in reports), 2)
    return replace(last, checks=checks, seconds=seconds, config="layer by layer")
