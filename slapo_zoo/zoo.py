"""Zoo tables: rows of (pattern, rule), looked up by the `model_type` of a config.

A rule is a tuple of directives, in which `Dim("head_dim")` stands for a number of the config.
"""

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn

from slapo_zoo.directive import Directive
from slapo_zoo.errors import ArchitectureError, MeshError
from slapo_zoo.orders import balanced_cuts
from slapo_zoo.paths import nearest
from slapo_zoo.primitives import (
    Checkpoint,
    CutPipelineStage,
    Shard,
    SumGradient,
    Sync,
)
from slapo_zoo.rules import (
    Dim,
    Row,
    all_tokens,
    dropout,
    dropout_tokens,
)
from slapo_zoo.schedule import Schedule
from slapo_zoo.stages import leaf_units
from slapo_zoo.weights.keys import Pieces


@dataclass(frozen=True)
class Table:
    """One family: a row per module that the schedule names.

    Args:
        model_type: as in the config of `transformers`.
        source: what the table was written from.
        dims: name -> config attribute, or a function of the config.
        body: rows below the base model (`transformer.`, `bert.`), for all head classes.
        heads: rows for modules outside the base model.
        blocks: patterns of the repeated blocks, below the base model; cuts fall between them.
        after_blocks: modules below the base model that run after the blocks, though defined before.
        calls: config attribute: how often a shared block runs (ALBERT).
        seam: whether the attention of the family goes through the AttentionInterface.
        all_tokens: modules within blocks, below the base model, that always see all tokens.
        num_tokens: number of tokens of an input that is not text (image patches), from the config.
        renames: (in files, in the model): parts of names that the family's files spell otherwise.
        pieces: tensors that the family's files hold in pieces (experts).
        whole_batch: options (of the config or a forward) whose loss is no mean over rows: refused
            where a batch is divided.
        batch_statistics: micro-batches change the result (BatchNorm), so their number must be given.
    """

    model_type: str
    source: str
    dims: Mapping[str, str | Callable[[Any], int]]
    body: tuple[Row, ...]
    heads: tuple[Row, ...]
    blocks: tuple[str, ...]
    after_blocks: tuple[str, ...] = ()
    calls: str = ""
    seam: bool = True
    all_tokens: tuple[str, ...] = ()
    num_tokens: Callable[[Any], int] | None = None
    renames: tuple[tuple[str, str], ...] = ()
    pieces: tuple[Pieces, ...] = ()
    whole_batch: tuple[str, ...] = ()
    batch_statistics: bool = False

    def rows(self, model: Any) -> list[Row]:
        """All rows with full patterns and resolved numbers, for one model."""
        prefix = base_prefix(model)
        body = [(prefix + pattern, rule) for pattern, rule in self.body]
        dims = {name: _number(of, model.config) for name, of in self.dims.items()}
        rows = [*body, *self.heads]
        return [(p, tuple(_resolve(d, dims) for d in rule)) for p, rule in rows]


def base_prefix(model: Any) -> str:
    """`"transformer."` for a model with a head, `""` for the base model itself."""
    name = model.base_model_prefix
    return f"{name}." if name and hasattr(model, name) else ""


def _number(of: str | Callable[[Any], int], config: Any) -> int:
    return of(config) if callable(of) else getattr(config, of)


def _resolve(directive: Directive, dims: Mapping[str, int]) -> Directive:
    """Put the numbers of a config where a directive of a table names them."""

    def value(v: Any) -> Any:
        if isinstance(v, tuple):
            return tuple(value(x) for x in v)
        return dims[v.name] if isinstance(v, Dim) else v

    fields = dataclasses.fields(directive)  # pyright: ignore[reportArgumentType]
    new = {f.name: value(getattr(directive, f.name)) for f in fields}
    return type(directive)(**new)


ZOO: dict[str, Table] = {}


def register(table: Table) -> Table:
    """Add a table to the zoo."""
    if table.model_type in ZOO:
        raise ArchitectureError("zoo", table.model_type, "is registered already")
    ZOO[table.model_type] = table
    return table


@cache
def load_tables() -> None:
    """Import every file of `schedules/`; each registers its table."""
    package = importlib.import_module("slapo_zoo.schedules")
    for found in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"slapo_zoo.schedules.{found.name}")


def families() -> list[str]:
    """The `model_type`s that have a table."""
    load_tables()
    return sorted(ZOO)


def table_for(model_type: str) -> Table:
    """The table of a family; ArchitectureError names the ones there are."""
    names = families()
    if model_type not in ZOO:
        near = nearest(model_type, names)
        hint = f"nearest: {near}; to add one, write schedules/{model_type}.py (CONTRIBUTING.md)"
        problem = f"the zoo has no table for it; it has {', '.join(names)}"
        raise ArchitectureError("zoo", f"model_type={model_type!r}", problem, hint)
    return ZOO[model_type]


def block_paths(sch: Schedule, table: Table) -> list[str]:
    """Paths of the repeated blocks, in order."""
    prefix = base_prefix(sch.model)
    found = [path for pattern in table.blocks for path in sch[prefix + pattern].paths]
    return found or sch.matching(prefix + table.blocks[0], "blocks")


def apply_table(
    sch: Schedule,
    table: Table,
    checkpoint_ratio: float = 0.0,
    sequence_parallel: bool = False,
    num_stages: int | None = None,
) -> Schedule:
    """Apply a table: tensor and sequence parallelism, random streams, recomputation, pipeline cuts.

    Rows that match no module of this head class are skipped, and so is a division of a tensor
    that the module does not have (a Linear without bias).

    Args:
        sch: a schedule of an unscheduled model on meta.
        table: of its family.
        checkpoint_ratio: share of the blocks whose activations are recomputed.
        sequence_parallel: tp ranks divide the tokens too.
        num_stages: pipeline stages; None takes pp.
    """
    blocks = block_paths(sch, table)
    cuts = place_cuts(sch, table, num_stages or sch.mesh.pp)
    rows = table.rows(sch.model)
    _apply_rows(sch, rows)
    if sequence_parallel and sch.mesh.tp > 1:
        _apply_rows(sch, _sequence_rows(sch, table, rows))
    _apply_rows(sch, [("**:Dropout", dropout)])
    for i in spread(len(blocks), checkpoint_ratio):
        sch.do(blocks[i], Checkpoint())
    for block, call in cuts:
        sch.do(block, CutPipelineStage(call))
    return sch


def _apply_rows(sch: Schedule, rows: list[Row]) -> None:
    for pattern, rule in rows:
        for directive in rule if sch[pattern].paths else ():
            if _applies(sch, pattern, directive):
                sch.do(pattern, directive)


def _sequence_rows(sch: Schedule, table: Table, rows: list[Row]) -> list[Row]:
    """Sequence parallelism (arXiv:2205.05198): between `row` and `enter`, ranks hold some tokens.

    Each stack of blocks divides its tokens at its first block and joins them after its last. What
    every rank holds whole inside gets a part of its gradient from each rank.
    """
    if not any(isinstance(d, Sync) and d.sequence_axis is not None for _, r in rows for d in r):
        problem = "its table has no row that divides tokens"
        hint = "leave sequence_parallel out: the model has no axis of tokens"
        raise ArchitectureError("zoo", f"sequence_parallel of {table.model_type}", problem, hint)
    prefix, found = base_prefix(sch.model), []
    patterns = [prefix + pattern for pattern in table.blocks]
    keep = [prefix + pattern for pattern in table.all_tokens]
    found += [(pattern, all_tokens) for pattern in keep]
    whole_paths = {path for pattern in keep for path in sch[f"{pattern}.**"].paths}
    for pattern in patterns:
        if stack := sch[pattern].paths:
            found.append((stack[0], (Sync("fwd_pre", "divide_tokens"),)))
            found.append((stack[-1], (Sync("fwd_post", "join_tokens"),)))
    blocks = tuple(f"{path}." for path in block_paths(sch, table))
    for pattern, rule in rows:
        inside = [p for p in sch[pattern].paths if p.startswith(blocks) and p not in whole_paths]
        if inside and not rule:
            found.append(
                (pattern, tuple(SumGradient(n, sequence=True) for n in ("weight", "bias")))
            )
        elif inside and any(isinstance(d, Sync) and d.sequence_axis is not None
                            and d.mode == "fwd_post" for d in rule):  # fmt: skip
            found.append((pattern, (SumGradient("bias", sequence=True),)))
    found += [(f"{pattern}.**:Dropout", dropout) for pattern in keep]
    found += [(f"{pattern}.**:Dropout", dropout_tokens) for pattern in patterns]
    return found


def _applies(sch: Schedule, pattern: str, directive: Directive) -> bool:
    if not isinstance(directive, Shard | SumGradient):
        return True
    modules = [sch.state.modules[path] for path in sch[pattern].paths]
    name = directive.param_name
    return all(m._parameters.get(name, m._buffers.get(name)) is not None for m in modules)


def place_cuts(sch: Schedule, table: Table, num_stages: int) -> list[tuple[str, int]]:
    """The blocks (and which of their calls) that end a stage, balanced by cost.

    The cost of a unit is the number of its weights that are multiplied with: an embedding is a
    look-up and costs nothing, a head costs vocabulary times width.
    """
    blocks = block_paths(sch, table)
    calls = getattr(sch.model.config, table.calls) if table.calls else 1
    if num_stages > len(blocks) * calls:
        problem = f"{num_stages} stages, but the model has {len(blocks) * calls} blocks"
        hint = f"choose pp between 1 and {len(blocks) * calls}"
        raise MeshError("mesh", f"pp={num_stages}", problem, hint)
    late = [base_prefix(sch.model) + path for path in table.after_blocks]
    units = leaf_units(sch.model, blocks, late)
    first = units.index(blocks[0])
    shared = [(block, call) for call in range(calls) for block in blocks]
    runs = [(unit, 0) for unit in units]
    if calls > 1:
        rest = [run for run in runs[first:] if run[0] not in blocks]
        runs = [*runs[:first], *shared, *rest]
    costs = [_cost(sch.state.modules[unit]) for unit, _ in runs]
    may_cut = [i for i, (unit, _) in enumerate(runs) if unit in blocks]
    return [runs[i] for i in balanced_cuts(costs, may_cut, num_stages)]


def _cost(unit: nn.Module) -> float:
    return float(
        sum(
            p.numel()
            for module in unit.modules()
            if not isinstance(module, nn.Embedding)
            for p in module.parameters(recurse=False)
        )
    )


def spread(num_blocks: int, ratio: float) -> list[int]:
    """Indices of round(ratio * num_blocks) blocks, spread evenly."""
    if not 0.0 <= ratio <= 1.0:
        what, hint = f"checkpoint_ratio={ratio}", "0.0 keeps all activations, 1.0 recomputes all"
        raise MeshError("zoo", what, "expected a number from 0 to 1", hint)
    count = round(ratio * num_blocks)
    return [num_blocks * i // count for i in range(count)]
