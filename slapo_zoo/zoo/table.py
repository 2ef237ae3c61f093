"""Tables of sharding rules: rows of (pattern of module paths, rule), looked up by the `model_type` of a config.

A rule is a tuple of directives (changes of a module), in which `Dim("head_dim")` stands for a number of the config.
"""

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any

from slapo_zoo.errors import ArchitectureError
from slapo_zoo.hf.models import calls_interface
from slapo_zoo.language.directive import Directive
from slapo_zoo.parallel.losses.heads import head_of
from slapo_zoo.parallel.paths import nearest
from slapo_zoo.weights.keys import Pieces
from slapo_zoo.zoo.expressions import Named, evaluate
from slapo_zoo.zoo.options import tunable
from slapo_zoo.zoo.rules import Dim, Row


@dataclass(frozen=True)
class Table:
    """Sharding rules of one model family: rows (pattern of module paths, tuple of directives such as `Shard`).

    Args:
        model_type: `model_type` of the family's config in `transformers`.
        source: code or paper that the table was written from.
        dims: name of a size -> config attribute, arithmetic of attributes and earlier dims, or function of the config.
        body: rows of modules in the base model (`transformer.`, `bert.`), the same for all head classes.
        heads: rows for modules outside the base model, such as the language-model head.
        blocks: patterns of the repeated blocks, below the base model; pipeline cuts fall between blocks.
        after_blocks: modules below the base model that run after the blocks, though defined before.
        order: full patterns of the lists of blocks and of other modules in the order in which they run; empty where the
            model defines them in that order.
        everywhere: modules below the base model that all stages hold: others read their weights, or call a child.
        calls: name of the config attribute that says how often one block with shared weights runs (ALBERT); "": once.
        seam: True if attention calls transformers' AttentionInterface, so that a child `core_attn` can take its place;
            None: in some releases of transformers; in the others `tries` has attention "eager" alone.
        all_tokens: modules within blocks, below the base model, that get all tokens under sequence parallelism.
        num_tokens: function that gets the config, and for images their (height, width), and returns the number of
            tokens that the model makes of an input other than text; None for text.
        renames: (part of a key in files, part of a name in the model) where the two differ.
        pieces: rules for model tensors that the family's files store as several tensors, e.g. one per expert.
        whole_batch: options (of config or forward) that, if set, make the loss no mean over rows: no batch is split.
        tunable: option of the loader --> values that a tuner may try; `attention` lists all back ends of the family.
        shifts_labels: True if the loss compares each token with the next label; None: the class name says it.
        undivided: model classes whose loss is no mean over rows with any options; True: all classes.
        batch_statistics: True if micro-batches change the result (BatchNorm), so that their number must be given.
        defaults: fields of a config made from the family's name alone, where transformers' defaults are not valid.
        cut_tokens: class that trains with cp > 1 --> how the positions of its tokens are found before cp shards them, a
            name in `model/step/cut_batch.py`; any other class is refused.
        needs: (config attribute, value): any other value is refused with tp > 1. A third entry changes when: "sp": tp >
            1 and sequence parallelism; "pp" or "cp": that size > 1; a config attribute: tp > 1 and it is set.
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
    seam: bool | None = True
    all_tokens: tuple[str, ...] = ()
    num_tokens: Callable[..., int] | None = None
    renames: tuple[tuple[str, str], ...] = ()
    pieces: tuple[Pieces, ...] = ()
    whole_batch: tuple[str, ...] = ()
    tunable: Mapping[str, tuple[Any, ...]] = field(default_factory=tunable)
    shifts_labels: bool | None = None
    undivided: bool | tuple[str, ...] = False
    batch_statistics: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    cut_tokens: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[tuple[Any, ...], ...] = ()

    def rows(self, model: Any) -> list[Row]:
        """Return (pattern of paths from the root, rule) pairs; Dim("head_dim") in a rule becomes the config's number."""
        prefix = base_prefix(model)
        body = [(prefix + pattern, rule) for pattern, rule in self.body]
        dims: dict[str, int] = {}
        for name, of in self.dims.items():
            dims[name] = _number(of, model.config, dims)
        lacks = "" if self.seam is not None or calls_interface(type(model)) else "core_attention"
        rows = [(p, [d for d in rule if d.name != lacks]) for p, rule in (*body, *self.heads)]
        return [(p, tuple(_resolve(d, dims) for d in rule)) for p, rule in rows]

    def tries(self, cls: type) -> Mapping[str, tuple[Any, ...]]:
        """Return `tunable` for a model class in the installed release of transformers."""
        own = self.seam is None and not calls_interface(cls)
        return {**self.tunable, "attention": ("eager",)} if own else self.tunable

    def positions_of(self, cls: type) -> str | None:
        """Return how a cp rank gets the positions of a class's tokens, e.g. "counted" (0, 1, 2, ...) or "relative"
        (T5): the class's value in `cut_tokens`. A class without one gets that of the first class there if it is a
        classifier of whole rows, since it has the same blocks; else None: it cannot train with cp > 1.
        """
        head, told = head_of(cls.__name__), self.cut_tokens
        of_blocks = None if head.by_token or not head.labels else next(iter(told.values()), None)
        return told.get(cls.__name__, of_blocks)

    def is_undivided(self, cls: type) -> bool:
        """Return whether the loss of a model class is other than a mean over rows, so that a batch cannot be split."""
        return self.undivided is True or cls.__name__ in (self.undivided or ())

    def tp_plan(self, model: Any) -> dict[str, str]:
        """Return the rules as transformers' tp plan, {pattern: style}; ArchitectureError if no style fits a rule."""
        from slapo_zoo.zoo.tp_plan import tp_plan

        return tp_plan(self, model)


def base_prefix(model: Any) -> str:
    """Return the path prefix of the base model, such as `"transformer."`; `""` if the model has no head."""
    name = model.base_model_prefix
    return f"{name}." if name and hasattr(model, name) else ""


def _number(of: str | Callable[[Any], int], config: Any, before: Mapping[str, int]) -> int:
    if callable(of):
        return of(config)
    found = getattr(config, of, None)
    return evaluate(of, ConfigNumbers(config, before)) if found is None else found


class ConfigNumbers(Mapping[str, int]):
    """Mapping from names to integers: attributes of a config, and the numbers that a table has computed from them."""

    def __init__(self, config: Any, made: Mapping[str, int] = MappingProxyType({})):
        self.config, self.made = config, made

    def __getitem__(self, name: str) -> int:
        found = self.made.get(name, getattr(self.config, name, None))
        if type(found) is not int:
            need = f"sharding rules need an integer {name} in {type(self.config).__name__}"
            raise KeyError(f"{need}, found {found!r}: set this field of the config")
        return found

    def __iter__(self) -> Iterator[str]:
        return (name for name, value in vars(self.config).items() if type(value) is int)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _resolve(directive: Directive, dims: Mapping[str, int]) -> Directive:
    """Return a copy of a directive (change of a module) with each placeholder `Dim` replaced by its value in `dims`."""

    def value(v: Any) -> Any:
        if isinstance(v, tuple):
            return tuple(value(x) for x in v)
        return Named.of(dims[v.name], v.name) if isinstance(v, Dim) else v

    fields = dataclasses.fields(directive)  # pyright: ignore[reportArgumentType]
    new = {f.name: value(getattr(directive, f.name)) for f in fields}
    return type(directive)(**new)


ZOO: dict[str, Table] = {}


def register(table: Table) -> Table:
    """Add a family's table of sharding rules to the zoo and return it; ArchitectureError if the family has one already."""
    if table.model_type in ZOO:
        problem, hint = "this family has a table already", "give the new table another model_type"
        raise ArchitectureError("register", f"model_type={table.model_type!r}", problem, hint)
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
    """Return a table of sharding rules made of another family's table, with some rows replaced.

    rewrite:  table of `base`  -->  its body without the rows of some modules, then `body`

    Args:
        base: model_type of the other family.
        model_type: model_type of the new table.
        source: code or paper that the new table was written from.
        without: patterns of the body rows of `base` to leave out, written as in these rows.
        body: rows to add for modules in the base model; to replace a row, its pattern must be in `without` too.
        heads: rows for modules outside the base model; None takes those of `base`.
        changes: any other field of `Table`; `cut_tokens` (classes that train with cp > 1) is empty unless it is passed.

    Raises:
        ArchitectureError: the base has no row of a pattern in `without`.
    """
    importlib.import_module(f"slapo_zoo.zoo.schedules.{base}")
    table = ZOO[base]
    patterns = {pattern for pattern, _ in table.body}
    if missing := [pattern for pattern in without if pattern not in patterns]:
        near = nearest(missing[0], patterns)
        problem = f"the table of {base} has no row {missing[0]!r}"
        hint = f"name a row of that table in without=; nearest: {', '.join(near) or 'none'}"
        raise ArchitectureError(f"schedules/{model_type}.py", "without", problem, hint)
    changes = {"cut_tokens": {}} | changes  # that a relative's tokens can be sharded proves nothing
    kept = tuple(row for row in table.body if row[0] not in without)
    return dataclasses.replace(
        table, model_type=model_type, source=source, body=kept + body,
        heads=table.heads if heads is None else heads, **changes,
    )  # fmt: skip


@cache
def load_tables() -> None:
    """Import every file of `schedules/`; each file registers the sharding rules of one model family."""
    package = importlib.import_module("slapo_zoo.zoo.schedules")
    for found in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"slapo_zoo.zoo.schedules.{found.name}")


def image_tokens(config: Any, sides: Sequence[int] = ()) -> int:
    """Return the number of tokens of an image in a vision transformer: its patches and one class token. `sides` are the
    image's height and width, by default those of the config.
    """
    both = config.image_size, config.patch_size
    size, patch = ((n, n) if isinstance(n, int) else n for n in both)
    height, width = sides or size
    return (height // patch[0]) * (width // patch[1]) + 1


def families() -> list[str]:
    """Return the `model_type`s for which the zoo has a table of sharding rules."""
    load_tables()
    return sorted(ZOO)


def table_for(model_type: str, more: str = "") -> Table:
    """Return a family's table of sharding rules; else ArchitectureError lists all families, `more` ends its hint."""
    names = families()
    if model_type not in ZOO:
        near = nearest(model_type, names)
        file = f"schedules/{model_type}.py"
        hint = f"nearest: {near or 'none'}; to add this one, write {file} (CONTRIBUTING.md){more}"
        problem = f"slapo_zoo has no sharding rules for this model family; it has rules for {', '.join(names)}"
        raise ArchitectureError("zoo", f"model_type={model_type!r}", problem, hint)
    return ZOO[model_type]
