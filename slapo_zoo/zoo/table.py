"""Zoo tables: rows of (pattern, rule), looked up by the `model_type` of a config.

A rule is a tuple of directives, in which `Dim("head_dim")` stands for a number of the config.
"""

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any

from slapo_zoo.errors import ArchitectureError
from slapo_zoo.language.directive import Directive
from slapo_zoo.parallel.paths import nearest
from slapo_zoo.weights.keys import Pieces
from slapo_zoo.zoo.expressions import Named, evaluate
from slapo_zoo.zoo.options import tunable
from slapo_zoo.zoo.rules import Dim, Row


@dataclass(frozen=True)
class Table:
    """One family: a row per module that the schedule names.

    Args:
        model_type: as in the config of `transformers`.
        source: what the table was written from.
        dims: name -> config attribute, arithmetic of some and of dims before it, or a function of the config.
        body: rows below the base model (`transformer.`, `bert.`), for all head classes.
        heads: rows for modules outside the base model.
        blocks: patterns of the repeated blocks, below the base model; cuts fall between them.
        after_blocks: modules below the base model that run after the blocks, though defined before.
        order: children beside and above the blocks in the order in which they run, by full pattern,
            where the model defines them in another one.
        everywhere: modules below the base model that every stage holds: others read their weights, or call a part.
        calls: config attribute: how often a shared block runs (ALBERT).
        seam: whether the attention of the family goes through the AttentionInterface.
        all_tokens: modules within blocks, below the base model, that always see all tokens.
        num_tokens: number of tokens of an input that is not text (image patches), from the config.
        renames: (in files, in the model): parts of names that the family's files spell otherwise.
        pieces: tensors that the family's files hold in pieces (experts).
        whole_batch: options (of the config or a forward) whose loss is no mean over rows: refused
            where a batch is sharded.
        tunable: knob --> values that a tuner may try; `attention` names all that the family has.
        shifts_labels: whether the head compares each token with the label of the next; None tells it
            by the name of the class.
        undivided: its loss is no mean that parts of a batch add up to: refused where one is sharded;
            or the classes of which that is so.
        batch_statistics: micro-batches change the result (BatchNorm), so their number must be given.
        defaults: what a config of the bare family has, where that of `transformers` makes no model.
        needs: (config attribute, value): another value is refused over tp; (attribute, value, "sp"):
            only where sequence parallelism divides the tokens; (attribute, value, "pp"): over pp, not tp;
            (attribute, value, name): only where that attribute of the config is set.
    """

    model_type: str
    source: str
    dims: Mapping[str, str | Callable[[Any], int]]
    body: tuple[Row, ...]
    heads: tuple[Row, ...]
    blocks: tuple[str, ...]
    after_blocks: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    everywhere: tuple[str, ...] = ()
    calls: str = ""
    seam: bool = True
    all_tokens: tuple[str, ...] = ()
    num_tokens: Callable[[Any], int] | None = None
    renames: tuple[tuple[str, str], ...] = ()
    pieces: tuple[Pieces, ...] = ()
    whole_batch: tuple[str, ...] = ()
    tunable: Mapping[str, tuple[Any, ...]] = field(default_factory=tunable)
    shifts_labels: bool | None = None
    undivided: bool | tuple[str, ...] = False
    batch_statistics: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[tuple[Any, ...], ...] = ()

    def rows(self, model: Any) -> list[Row]:
        """All rows with full patterns and resolved numbers, for one model."""
        prefix = base_prefix(model)
        body = [(prefix + pattern, rule) for pattern, rule in self.body]
        dims: dict[str, int] = {}
        for name, of in self.dims.items():
            dims[name] = _number(of, model.config, dims)
        rows = [*body, *self.heads]
        return [(p, tuple(_resolve(d, dims) for d in rule)) for p, rule in rows]

    def is_undivided(self, cls: type) -> bool:
        """Return whether the loss of a class is no mean that parts of a batch add up to."""
        return self.undivided is True or cls.__name__ in (self.undivided or ())

    def tp_plan(self, model: Any) -> dict[str, str]:
        """Return the table as a `tp_plan` of transformers, where such a plan can say it."""
        from slapo_zoo.zoo.tp_plan import tp_plan

        return tp_plan(self, model)


def base_prefix(model: Any) -> str:
    """`"transformer."` for a model with a head, `""` for the base model itself."""
    name = model.base_model_prefix
    return f"{name}." if name and hasattr(model, name) else ""


def _number(of: str | Callable[[Any], int], config: Any, before: Mapping[str, int]) -> int:
    if callable(of):
        return of(config)
    found = getattr(config, of, None)
    return evaluate(of, ConfigNumbers(config, before)) if found is None else found


class ConfigNumbers(Mapping[str, int]):
    """The integers of a config, by name, and those made of them; names of the family's own or the usual ones."""

    def __init__(self, config: Any, made: Mapping[str, int] = MappingProxyType({})):
        self.config, self.made = config, made

    def __getitem__(self, name: str) -> int:
        found = self.made.get(name, getattr(self.config, name, None))
        if type(found) is not int:
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return (name for name, value in vars(self.config).items() if type(value) is int)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _resolve(directive: Directive, dims: Mapping[str, int]) -> Directive:
    """Put the numbers of a config where a directive of a table names them."""

    def value(v: Any) -> Any:
        if isinstance(v, tuple):
            return tuple(value(x) for x in v)
        return Named.of(dims[v.name], v.name) if isinstance(v, Dim) else v

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


def extend(
    base: str,
    model_type: str,
    source: str,
    without: tuple[str, ...] = (),
    body: tuple[Row, ...] = (),
    heads: tuple[Row, ...] | None = None,
    **changes: Any,
) -> Table:
    """A table that is another family's, but for some rows.

    rewrite:  table of `base`  -->  its body without the rows of some modules, then `body`

    Args:
        base: model_type of the family that it follows.
        model_type: of the new one.
        source: what the new one was written from.
        without: patterns of the base whose rows are left out.
        body: rows that are added.
        heads: rows of the heads; None takes the base's.
        changes: any other field of `Table`.

    Raises:
        ArchitectureError: the base has no row of a pattern in `without`.
    """
    importlib.import_module(f"slapo_zoo.schedules.{base}")
    table = ZOO[base]
    patterns = {pattern for pattern, _ in table.body}
    if missing := [pattern for pattern in without if pattern not in patterns]:
        near = nearest(missing[0], patterns)
        problem = f"the table of {base} has no row {missing[0]!r}"
        raise ArchitectureError(
            f"schedules/{model_type}.py", "without", problem, f"nearest: {near}"
        )
    kept = tuple(row for row in table.body if row[0] not in without)
    return dataclasses.replace(
        table, model_type=model_type, source=source, body=kept + body,
        heads=table.heads if heads is None else heads, **changes,
    )  # fmt: skip


@cache
def load_tables() -> None:
    """Import every file of `schedules/`; each registers its table."""
    package = importlib.import_module("slapo_zoo.schedules")
    for found in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"slapo_zoo.schedules.{found.name}")


def families() -> list[str]:
    """Return the `model_type`s that have a table."""
    load_tables()
    return sorted(ZOO)


def table_for(model_type: str, more: str = "") -> Table:
    """The table of a family; ArchitectureError names the ones there are, and `more`."""
    names = families()
    if model_type not in ZOO:
        near = nearest(model_type, names)
        hint = (
            f"nearest: {near}; to add one, write schedules/{model_type}.py (CONTRIBUTING.md){more}"
        )
        problem = f"the zoo has no table for it; it has {', '.join(names)}"
        raise ArchitectureError("zoo", f"model_type={model_type!r}", problem, hint)
    return ZOO[model_type]
