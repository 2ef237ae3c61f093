"""Conversion of a derived table of sharding rules to JSON data and back, for the cache and between processes."""

import dataclasses
import json
from typing import Any

from slapo_zoo.language.schedule import FORMAT, from_json
from slapo_zoo.weights.keys import Pieces
from slapo_zoo.zoo.rules import Row
from slapo_zoo.zoo.table import Table

# fields of a table that its document has as they are; rows and pieces are written by `to_document`
KEPT = ("model_type", "source", "blocks", "after_blocks", "order", "everywhere", "seam", "all_tokens", "renames",
        "whole_batch", "shifts_labels", "undivided", "batch_statistics", "cut_tokens")  # fmt: skip


def freeze(table: Table, model: Any) -> Table:
    """Return a copy of a table of sharding rules that fits one model only and holds no function: path patterns below the
    base model get its prefix (e.g. "transformer."), and names of config sizes (`Dim`) become numbers.
    """
    return dataclasses.replace(table, dims={}, body=(), heads=tuple(_numbers(table.rows(model))))


def _numbers(rows: list[Row]) -> list[Row]:
    return [(pattern, tuple(_plain(d) for d in rule)) for pattern, rule in rows]


def _plain(directive: Any) -> Any:
    fields = {f.name: getattr(directive, f.name) for f in dataclasses.fields(directive)}
    return type(directive)(**{k: int(v) if type(v) is not bool and isinstance(v, int) else v
                              for k, v in fields.items()})  # fmt: skip


def to_document(table: Table) -> dict[str, Any]:
    """Return a table made by `freeze`, whose rules hold numbers, not names of sizes like "head_dim", as JSON data."""
    rows = [[path, [[type(d).name, d.arguments()] for d in rule]] for path, rule in table.heads]
    fields = {name: getattr(table, name) for name in KEPT}
    pieces = [[piece.tensor, list(piece.names)] for piece in table.pieces]
    return {**fields, "rows": rows, "pieces": pieces, "format": FORMAT}


def from_document(document: dict[str, Any]) -> Table:
    """Rebuild the table that `to_document` wrote as JSON data; ScheduleError for an unknown directive."""
    rows = []
    for pattern, rule in document["rows"]:
        steps = [[pattern, name, arguments] for name, arguments in rule]
        found = from_json(json.dumps({"format": document["format"], "steps": steps}))
        rows.append((pattern, tuple(directive for _, directive in found)))
    kept = {name: _tuples(document[name]) for name in KEPT}
    pieces = tuple(Pieces(tensor, tuple(names)) for tensor, names in document["pieces"])
    return Table(dims={}, body=(), heads=tuple(rows), pieces=pieces, **kept)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
