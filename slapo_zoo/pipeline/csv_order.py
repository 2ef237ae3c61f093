"""Read a custom pipeline order from a CSV file; every cell is checked before any work starts.

A row per rank, a cell per action: `2F0` is the forward of micro-batch 0 in stage 2, `B` a whole backward, `I`
and `W` its two parts (of inputs, of weights). Empty cells are idle; two actions side by side are written
`(4F1;3B0)OVERLAP_F_B`. torch.distributed.pipelining writes such files with `_dump_csv(file,
format="compute_only")`; its runtime adds the communication.
"""

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from slapo_zoo.errors import MeshError
from slapo_zoo.pipeline.timeline import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    NAMES,
    Action,
    Stuck,
    needs,
    simulate,
)  # fmt: skip

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_TWO = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_COMMUNICATION = re.compile(r"\d+(SEND|RECV|UNSHARD|RESHARD|REDUCE_GRAD)")


@dataclass(frozen=True)
class CsvOrder:
    """A pipeline order that was read from a CSV file and checked.

    Args:
        actions: parsed actions in order, one tuple per rank.
        rank_of_stage: pp rank that holds each stage.
        micro_batches: number of micro-batches that the order is for.
    """

    actions: tuple[tuple[Action, ...], ...]
    rank_of_stage: tuple[int, ...]
    micro_batches: int


class _Places:
    """Row and column of every action in the CSV file, for error messages."""

    def __init__(self, path: str):
        self.path = path
        self.of: dict[Action, tuple[int, int]] = {}

    def error(self, row: int, column: int, cell: str, problem: str, hint: str = "") -> MeshError:
        where = f"{self.path}, row {row + 1} (rank {row}), cell {column + 1}"
        return MeshError(where, repr(cell), problem, hint)

    def at(self, action: Action, problem: str, hint: str = "") -> MeshError:
        return self.error(*self.of[action], str(action), problem, hint)


def read_order(path: str, pp: int) -> CsvOrder:
    """Read and check the CSV file of an order for `pp` ranks; MeshError names the wrong cell."""
    cells, places = _read(path, pp), _Places(path)
    ranks: list[list[Action]] = []
    for row, line in enumerate(cells):
        ranks.append([])
        for column, cell in enumerate(line):
            for action in _parse(places, row, column, cell):
                if action in places.of:
                    raise places.error(row, column, str(action), "it stands twice in the file")
                places.of[action] = row, column
                ranks[row].append(action)
    homes = _homes(places, ranks)
    count = _check_complete(places, len(homes))
    _check_runs(places, ranks, len(homes))
    return CsvOrder(tuple(map(tuple, ranks)), homes, count)


def _read(path: str, pp: int) -> tuple[tuple[str, ...], ...]:
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            rows = [tuple(cell.strip() for cell in row) for row in csv.reader(file) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        hint = "name a CSV file, or one of the built-in orders"
        raise MeshError("pipeline", f"pipeline_order={path!r}", str(error), hint) from None
    if len(rows) != pp:
        problem = f"found {len(rows)} rows, expected one per rank: pp={pp}"
        raise MeshError(path, "rows", problem, f"use pp={len(rows) or 1}, or another file")
    return tuple(rows)


def _parse(places: _Places, row: int, column: int, cell: str) -> Iterator[Action]:
    """Yield the actions in the text `cell` at a row and column of the CSV file: none, one, or two
    that overlap; MeshError for other text. `places` says where actions stand, for errors.
    """
    two = _TWO.fullmatch(cell)
    parts = [part.strip() for part in two[1].split(";")] if two else [cell] if cell else []
    for part in parts:
        match = _ACTION.fullmatch(part)
        if not match and _COMMUNICATION.match(part):
            hint = 'leave communication out: it is added (_dump_csv(..., format="compute_only"))'
            raise places.error(row, column, cell, "found an action that computes nothing", hint)
        if not match:
            hint = "write stage, F B I or W, micro-batch: 2F0; leave idle cells empty"
            raise places.error(row, column, cell, "it is no action", hint)
        yield Action(int(match[1]), match[2], int(match[3]))


def _homes(places: _Places, ranks: list[list[Action]]) -> tuple[int, ...]:
    """Return the pp rank of each stage; MeshError if a stage is on two ranks or ranks hold unequal numbers of stages."""
    homes: dict[int, int] = {}
    for rank, actions in enumerate(ranks):
        for action in actions:
            if homes.setdefault(action.stage, rank) != rank:
                problem = f"stage {action.stage} is on rank {homes[action.stage]} already"
                raise places.at(action, problem, "keep each stage on one rank")
    missing = sorted(set(range(max(homes, default=0) + 1)) - set(homes))
    if missing:
        problem = f"no cell names stage {missing[0]}, but a cell names stage {max(homes)}"
        raise MeshError(places.path, "stages", problem, "number the stages without gaps")
    counts = [list(homes.values()).count(rank) for rank in range(len(ranks))]
    if len(set(counts)) > 1:
        problem = f"the ranks hold {counts} stages"
        raise MeshError(places.path, "stages", problem, "give every rank the same number of stages")
    return tuple(homes[stage] for stage in range(len(homes)))


def _check_complete(places: _Places, num_stages: int) -> int:
    """Return the number of micro-batches; MeshError unless each has one forward and one backward per stage."""
    count = 1 + max(action.micro_batch for action in places.of)
    for stage, micro_batch in product(range(num_stages), range(count)):
        found = {kind for kind in NAMES if Action(stage, kind, micro_batch) in places.of}
        parts = found & {BACKWARD_INPUT, BACKWARD_WEIGHT}
        if BACKWARD in found and parts:
            problem = f"there is a whole backward {stage}B{micro_batch} as well"
            hint = "name either a whole backward (B), or its two parts (I and W)"
            raise places.at(Action(stage, min(parts), micro_batch), problem, hint)
        wanted = (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT) if parts else (FORWARD, BACKWARD)
        for kind in wanted:
            if kind not in found:
                problem = f"found no cell {Action(stage, kind, micro_batch)}"
                hint = f"add a cell with this {NAMES[kind]}"
                raise MeshError(places.path, f"stage {stage}", problem, hint)
    return count


def _check_runs(places: _Places, ranks: list[list[Action]], num_stages: int) -> None:
    """Simulate the order; MeshError if a rank waits forever or the last stage takes micro-batches out of order."""
    try:
        simulate(ranks, lambda action: 1.0)
    except Stuck as stuck:
        rank = _blamed(stuck.positions, ranks, num_stages)
        others = ", ".join(f"rank {r} at {ranks[r][i]}" for r, i in stuck.positions.items())
        problem = f"what it needs has not run by then, and no rank can go on ({others})"
        hint = "move it behind what it needs: F of the stage before, B or I of the one after"
        raise places.at(ranks[rank][stuck.positions[rank]], problem, hint) from None
    last = [a for actions in ranks for a in actions if a[:2] == (num_stages - 1, FORWARD)]
    for place, action in enumerate(last):
        if action.micro_batch != place:
            problem = f"the last stage needs micro-batch {place} here"
            raise places.at(action, problem, "let it take the micro-batches in order")


def _blamed(positions: dict[int, int], ranks: list[list[Action]], num_stages: int) -> int:
    """Return the rank to name in a deadlock: the first that waits for its own later action; if
    there is none, the first that waits. `positions` maps each waiting rank to the index of its next action.
    """
    for rank, at in positions.items():
        later = set(ranks[rank][at:])
        if any(set(either) & later for either in needs(ranks[rank][at], num_stages)):
            return rank
    return min(positions)
