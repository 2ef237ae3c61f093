"""A program for others, from a scheduled model on meta."""

import copy
from collections.abc import Mapping
from typing import Any

import torch

from slapo_zoo.cards.card import Card
from slapo_zoo.cards.program import MODULE, Program
from slapo_zoo.cards.schema import PUBLISHABLE
from slapo_zoo.errors import CardError
from slapo_zoo.hf import models as hf
from slapo_zoo.language.directive import Directive
from slapo_zoo.language.schedule import Schedule
from slapo_zoo.language.structure_hash import structure_hash
from slapo_zoo.parallel.compat import software
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.zoo.expressions import Named, names_in, parse
from slapo_zoo.zoo.outline import Outline
from slapo_zoo.zoo.table import Table, table_for


def zoo_card(
    config: Any, auto_class: Any, mesh: Mesh, base_model: str, any_size: bool = False, **knobs: Any
) -> Card:
    """The card of the zoo's own schedule of a model; nothing was measured with it yet.

    Args:
        config: of the model.
        auto_class: which head.
        mesh: that it is made for.
        base_model: id on the Hub, or the family.
        any_size: see `make_program`.
        knobs: sequence_parallel, checkpoint_ratio.
    """
    outline = Outline(config, auto_class, mesh, torch.float32, **knobs)
    program = make_program(outline.schedule, outline.model.config, outline.cls, any_size)
    base = base_model if base_model.count("/") == 1 else config.model_type
    return Card(program, mesh.sizes, base, software=software())


def structure_of(config: Any, cls: type) -> str:
    """The structure of the unscheduled model of a config."""
    seam = table_for(config.model_type).seam
    return structure_hash(hf.build_on_meta(cls, copy.deepcopy(config), torch.float32, seam))


def make_program(schedule: Schedule, config: Any, cls: type, any_size: bool = False) -> Program:
    """The history of a schedule as a program; sizes of the model stay arithmetic where known.

    Kernels that "auto" has chosen are no part of it: on another device it would choose others.

    Args:
        schedule: of a family of the zoo.
        config: of the model.
        cls: of the model.
        any_size: for every model of the class that has as many blocks; otherwise exactly for models
            of this structure.

    Raises:
        CardError: a step holds a live object, or a primitive that no card may name.
    """
    used = set[str]()
    steps = _steps(schedule, used)
    numbers = _numbers(table_for(config.model_type), config, used)
    constraints = [_stages(schedule)]
    if any_size and type(getattr(config, "num_hidden_layers", None)) is int:
        constraints.append(f"num_hidden_layers == {config.num_hidden_layers}")
    if "num_heads" in used:
        constraints.append("tp <= num_heads")
    structure = None if any_size else structure_of(config, cls)
    program = Program(
        config.model_type, cls.__name__, structure, numbers, tuple(constraints), steps
    )  # fmt: skip
    return Program.parse(program.to_bytes())  # what we publish is what we accept


def module_program(schedule: Schedule) -> Program:
    """Return the history of a schedule of any module as a program, for modules of the same structure alone.

    Raises:
        CardError: a step holds a live object, or a primitive that no card may name.
    """
    cls, steps = type(schedule.model).__name__, _steps(schedule, set())
    program = Program(MODULE, cls, schedule.structure, {}, (_stages(schedule),), steps)
    return Program.parse(program.to_bytes())


def _stages(schedule: Schedule) -> str:
    return f"stages == {len(schedule.state.cuts) + 1}"


def _steps(schedule: Schedule, used: set[str]) -> tuple[tuple[str, str, Mapping[str, Any]], ...]:
    """Write every directive of the history, but those that this device chose; `used` gets the names of numbers in them."""
    chosen = {(c.pattern, c.kernel) for c in schedule.kernels if c.accepted and c.by_device}
    return tuple(
        (pattern, directive.name, _written(pattern, directive, used))
        for pattern, directive in schedule.history
        if (pattern, directive.arguments().get("new")) not in chosen
    )


def _written(pattern: str, directive: Directive, used: set[str]) -> Mapping[str, Any]:
    reason = directive.local()
    left_out = PUBLISHABLE.get(directive.name)
    if left_out is None:
        reason = reason or "a card may not name this primitive"
    elif found := [name for name in directive.arguments() if name in left_out]:
        reason = reason or f"a card may not hold {', '.join(found)}"
    if reason:
        hint = "leave the directive out, or keep the schedule in Python"
        raise CardError("card", f"sch[{pattern!r}].{directive}", reason, hint)
    return {name: _value(value, used) for name, value in directive.arguments().items()}


def _value(value: Any, used: set[str]) -> Any:
    if isinstance(value, Named):
        used.add(value.name)
        return {"=": value.name}
    return [_value(v, used) for v in value] if isinstance(value, tuple) else value


def _numbers(table: Table, config: Any, used: set[str]) -> dict[str, str]:
    """Return the arithmetic of the numbers that steps name, over the config; what a function computes is a constant."""
    texts = {n: str(of(config)) if callable(of) else of for n, of in table.dims.items()}
    wanted = set(used)
    for name in reversed(texts):  # a number may be made of those before it
        wanted |= names_in(parse(texts[name])) if name in wanted else set()
    return {n: text for n, text in texts.items() if n in wanted and text != n}
