"""Creation of a card: the changes (directives) that scheduled a model, as data to publish and apply to other models."""

import copy
from collections.abc import Mapping
from typing import Any

import torch

from slapo_zoo.errors import CardError
from slapo_zoo.hf import models as hf
from slapo_zoo.language.directive import Directive
from slapo_zoo.language.schedule import Schedule
from slapo_zoo.parallel.compat import software
from slapo_zoo.parallel.digests import structure_hash
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.zoo.cards.card import Card
from slapo_zoo.zoo.cards.program import MODULE, Program
from slapo_zoo.zoo.cards.schema import PUBLISHABLE
from slapo_zoo.zoo.expressions import Named, names_in, parse
from slapo_zoo.zoo.outline import Outline
from slapo_zoo.zoo.table import Table, table_for


def zoo_card(
    config: Any, auto_class: Any, mesh: Mesh, base_model: str, any_size: bool = False, **knobs: Any
) -> Card:
    """Return a card (schedule to publish) with the changes of modules by which slapo_zoo's rules shard a model.

    Args:
        config: `transformers` config of the model.
        auto_class: auto class that selects the model's head, e.g. "AutoModelForCausalLM".
        mesh: mesh that the schedule is for.
        base_model: Hub id "owner/name" that the card names; for any other text it names the model family instead.
        any_size: True for a card that fits every size of the class with the same number of blocks; False: this size.
        knobs: further arguments of `from_pretrained`, e.g. sequence_parallel, checkpoint_ratio.
    """
    outline = Outline(config, auto_class, mesh, torch.float32, **knobs)
    program = make_program(outline.schedule, outline.model.config, outline.cls, any_size)
    base = base_model if base_model.count("/") == 1 else config.model_type
    return Card(program, mesh.sizes, base, software=software())


def structure_of(config: Any, cls: type) -> str:
    """Return a hash of module tree and tensor shapes of the model that `cls` makes of `config`, before any change."""
    seam = table_for(config.model_type).seam
    return structure_hash(hf.build_on_meta(cls, copy.deepcopy(config), torch.float32, seam))


def make_program(schedule: Schedule, config: Any, cls: type, any_size: bool = False) -> Program:
    """Return the directives (transformations of modules) of a schedule as data for a card, to apply to other models.

    A size that the family's rules name, such as the number of heads, is stored as a formula over config fields.
    Kernels chosen by kernels="auto" are left out, because another device would choose others.

    Args:
        schedule: schedule of a model for whose family slapo_zoo has sharding rules.
        config: `transformers` config of the model.
        cls: class of the model, with its head.
        any_size: True fits every model of the class with the same number of blocks; False fits only models with
            the same module tree and tensor shapes.

    Raises:
        CardError: an argument of a directive is a function or module, or cards may not use its kind (primitive).
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
    return Program.parse(program.to_bytes())  # checks what is published as a reader would


def module_program(schedule: Schedule) -> Program:
    """Return the schedule of any nn.Module, also of one that is not from `transformers`, as data to publish in a card.

    The card fits modules with the same submodule paths and tensor shapes as `schedule.model`.

    Raises:
        CardError: an argument of a change (directive) is a function or module, or cards may not use its kind.
    """
    cls, steps = type(schedule.model).__name__, _steps(schedule, set())
    program = Program(MODULE, cls, schedule.structure, {}, (_stages(schedule),), steps)
    return Program.parse(program.to_bytes())


def _stages(schedule: Schedule) -> str:
    return f"stages == {len(schedule.state.cuts) + 1}"


def _steps(schedule: Schedule, used: set[str]) -> tuple[tuple[str, str, Mapping[str, Any]], ...]:
    """Return (pattern of module paths, primitive such as "shard", arguments) of each directive of a schedule, without
    kernels that kernels="auto" chose. In arguments, model sizes are written as {"=": name}; `used` gets these names.
    """
    chosen = {(c.pattern, c.kernel) for c in schedule.kernels if c.accepted and c.by_device}
    return tuple(
        (pattern, type(directive).name, _written(pattern, directive, used))
        for pattern, directive in schedule.history
        if (pattern, directive.arguments().get("new")) not in chosen
    )


def _written(pattern: str, directive: Directive, used: set[str]) -> Mapping[str, Any]:
    reason, primitive = directive.local(), type(directive).name  # `name` may be an argument of it
    left_out = PUBLISHABLE.get(primitive)
    if left_out is None:
        reason = reason or f"a card may not contain the primitive {primitive}"
    elif found := [name for name in directive.arguments() if name in left_out]:
        reason = reason or f"a card may not set the argument {', '.join(found)}"
    if reason:
        hint = "leave the directive out, or pass the schedule as a Python function, not as a card"
        raise CardError("card", f"sch[{pattern!r}].{directive}", reason, hint)
    return {name: _value(value, used) for name, value in directive.arguments().items()}


def _value(value: Any, used: set[str]) -> Any:
    if isinstance(value, Named):
        used.add(value.name)
        return {"=": value.name}
    return [_value(v, used) for v in value] if isinstance(value, tuple) else value


def _numbers(table: Table, config: Any, used: set[str]) -> dict[str, str]:
    """Return {model size: its formula over config fields} for the names in `used` and all that these formulas name."""
    texts = {n: str(of(config)) if callable(of) else of for n, of in table.dims.items()}
    wanted = set(used)
    for name in reversed(texts):  # a formula may use earlier names
        wanted |= names_in(parse(texts[name])) if name in wanted else set()
    return {n: text for n, text in texts.items() if n in wanted and text != n}
