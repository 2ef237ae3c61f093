"""Resolve `schedule=` of a loader: a family's sharding rules (zoo or derived), a card, directives, or a function."""

from typing import Any, NamedTuple

from slapo_zoo.hf import models as hf
from slapo_zoo.language.schedule import Schedule
from slapo_zoo.model.load.auto_schedule import proven_table, zoo_table_for_cp
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.pipeline.orders import StageMap
from slapo_zoo.verify.card_check import require_correct
from slapo_zoo.zoo.cards.resolve_card import (
    check_structure,
    plain_steps,
    program_for_all,
    python_schedule,
)
from slapo_zoo.zoo.kernels_for_modules import apply_kernels, device_name
from slapo_zoo.zoo.options import BuildOptions
from slapo_zoo.zoo.schedule_source import find_table, kind_of
from slapo_zoo.zoo.table import families

AFTER_KERNELS = ("checkpoint", "cut_pipeline_stage")


class Trust(NamedTuple):
    """Trust in a schedule card: whether its `schedule.py` may run, and whether it is verified ("quick" or "off")."""

    remote_code: bool = False
    verify: str = "quick"


def resolve_schedule(
    options: BuildOptions, config: Any, auto_class: Any, mesh: Mesh, trust: Trust
) -> BuildOptions:
    """Return the options with a `schedule` that can be applied: a card becomes its directives or its function.

    "auto" becomes a table of sharding rules that was proven on a tiny model. Other kinds of schedules stay unchanged.
    `auto_class` is the head class (None: the one in the checkpoint), `trust` says how far a card is trusted.

    Raises:
        SlapoError: the family has no table and none can be derived; or the card does not fit.
    """
    kind = kind_of(options.schedule)
    if kind == "auto" and config.model_type not in families():
        table = proven_table(config, hf.resolve_class(config, auto_class), mesh, options)
        return options.but(schedule=table)
    if kind in ("zoo", "auto"):
        return _of_zoo(options, config, auto_class, mesh)
    if kind != "card":
        return options
    if (steps := plain_steps(str(options.schedule), mesh)) is not None:
        return options.but(schedule=steps)
    steps = _card_steps(options, config, auto_class, mesh, trust)
    if callable(steps):  # from the `schedule.py` of a trusted card
        return options.but(schedule=steps)
    late = next((i for i, (_, d) in enumerate(steps) if d.name in AFTER_KERNELS), len(steps))

    def program(sch: Schedule) -> None:
        # a card lists no kernels that "auto" chose on its author's device: "auto" chooses on this one
        sch.replay(steps[:late])
        if options.kernels == "auto":
            apply_kernels(sch, "auto", device_name(options.device))
        sch.replay(steps[late:])

    return options.but(schedule=program)


def _of_zoo(options: BuildOptions, config: Any, auto_class: Any, mesh: Mesh) -> BuildOptions:
    """Return `options` for a family that has sharding rules (a `Table`); ArchitectureError if it has none.

    If cp > 1 and the rules of the family do not say how cp ranks shard the tokens, `schedule` becomes rules that do.
    """
    table = find_table(config)
    if mesh.size("cp") == 1:
        return options
    cls = hf.resolve_class(config, auto_class)
    cut = zoo_table_for_cp(config, cls, mesh, options)
    return options if cut is table else options.but(schedule=cut)


def _card_steps(
    options: BuildOptions, config: Any, auto_class: Any, mesh: Mesh, trust: Trust
) -> Any:
    """Return the directives of a schedule card, or the function of its `schedule.py` if `trust` allows that.

    Raises:
        CardError: the card does not fit, or the model that it schedules differs from the plain one.
    """
    name = str(options.schedule)
    if trust.remote_code:
        return python_schedule(name, trust.remote_code)
    order = {"pipeline_order": options.pipeline_order, "stages_per_rank": options.stages_per_rank}
    stages = StageMap.make(options.pipeline_order, mesh.pp, options.stages_per_rank).num_stages
    program = program_for_all(name, mesh)
    steps = program.resolve(config, mesh.sizes | {"stages": stages})
    check_structure(program, config, hf.resolve_class(config, auto_class))
    require_correct(program, config, mesh, trust.verify, order)
    return steps
