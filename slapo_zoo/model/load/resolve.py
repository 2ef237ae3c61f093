"""Turn a loader's `schedule=`, e.g. a published one (card), into sharding rules, changes to modules or a function."""

from collections.abc import Callable
from typing import Any, NamedTuple

from slapo_zoo.hf import models as hf
from slapo_zoo.language.schedule import Schedule, Step
from slapo_zoo.model.context_parallel import check_steps, refusal
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
from slapo_zoo.zoo.options import BuildOptions, LoaderOptions
from slapo_zoo.zoo.schedule_source import CardProgram, find_table, kind_of
from slapo_zoo.zoo.table import Table, families

AFTER_KERNELS = ("checkpoint", "cut_pipeline_stage")


class Trust(NamedTuple):
    """Trust in a schedule card: `remote_code` lets its `schedule.py` run; `verify` is "quick" (test it) or "off"."""

    remote_code: bool = False
    verify: str = "quick"


def resolve_schedule(
    options: LoaderOptions, config: Any, auto_class: Any, mesh: Mesh, trust: Trust
) -> LoaderOptions:
    """Return the loader's options with a `schedule` that can be applied: a card becomes changes to modules or a
    function. For a family without sharding rules (a table) "auto" becomes a table derived and tested on a small model;
    with cp > 1 "zoo" or "auto" may become a table with rules for cp; a schedule of another kind stays. `auto_class` is
    the model class (None: the checkpoint's); `trust` says if a card's code may run, and if the card is tested.

    Raises:
        SlapoError: the family has no table and none can be derived; or the card does not fit the model or the mesh.
    """
    kind = kind_of(options.schedule)
    if kind == "auto" and config.model_type not in families():
        table = proven_table(config, hf.resolve_class(config, auto_class), mesh, options)
        return options.but(schedule=table)
    if kind in ("zoo", "auto"):
        table = _zoo_table(options, config, auto_class, mesh)
        return options if table is find_table(config) else options.but(schedule=table)
    if kind != "card":
        return options
    return options.but(schedule=_of_file(options, config, auto_class, mesh, trust))


def _of_file(
    options: BuildOptions, config: Any, auto_class: Any, mesh: Mesh, trust: Trust
) -> CardProgram | list[Step] | Callable[[Any], Any]:
    """Return what `options.schedule` names, read from files. For a .json file written by `Schedule.to_json`: its steps,
    pairs (module path, change). If `trust` lets a card's (published schedule's) Python code run: the function in its
    `schedule.py`. Else a CardProgram, a function that applies the card to a model.

    Raises:
        SlapoError: the card does not fit model or mesh, or a test on a small model (`trust.verify`) found wrong
            results; or cp > 1, and the result would be steps or a Python function, which nothing tests.
    """
    name = str(options.schedule)
    own = plain_steps(name, mesh)
    if mesh.cp > 1 and (own is not None or trust.remote_code):  # nothing verifies these
        raise refusal("from_pretrained", f"schedule={name!r:.60}", mesh)
    if own is not None:
        return own
    if trust.remote_code:
        return python_schedule(name, trust.remote_code)
    steps, table = _of_card(options, config, auto_class, mesh, trust)
    late = next((i for i, (_, d) in enumerate(steps) if d.name in AFTER_KERNELS), len(steps))

    def program(sch: Schedule) -> None:
        # a card lists no kernels that "auto" chose on its author's device: "auto" chooses on this one
        sch.replay(steps[:late])
        if options.kernels == "auto":
            apply_kernels(sch, "auto", device_name(options.place))
        sch.replay(steps[late:])

    return CardProgram(program, table)


def _zoo_table(options: BuildOptions, config: Any, auto_class: Any, mesh: Mesh) -> Table:
    """Return the sharding rules (a `Table`) of the family of `config`; ArchitectureError if the family has none.
    With cp > 1 the rules also say how cp ranks shard the tokens, which depends on the model class.
    """
    if mesh.size("cp") == 1:
        return find_table(config)
    return zoo_table_for_cp(config, hf.resolve_class(config, auto_class), mesh, options)


def _of_card(
    options: BuildOptions, config: Any, auto_class: Any, mesh: Mesh, trust: Trust
) -> tuple[list[Step], Table]:
    """Return the changes that the schedule card (published schedule) in `options` makes, as pairs (module path,
    change), and the sharding rules of the model's family. `trust.verify` "off" skips the test.

    Raises:
        CardError: the card does not fit model or mesh; or a test model changed by it computes other results.
    """
    name = str(options.schedule)
    order = {"pipeline_order": options.pipeline_order, "stages_per_rank": options.stages_per_rank}
    stages = StageMap.make(options.pipeline_order, mesh.pp, options.stages_per_rank).num_stages
    program = program_for_all(name, mesh)
    steps = program.resolve(config, mesh.sizes | {"stages": stages})
    check_structure(program, config, hf.resolve_class(config, auto_class))
    check_steps(steps, mesh.cp, options.cp_attention)
    table = _zoo_table(options, config, auto_class, mesh)
    require_correct(program, config, mesh, trust.verify, order)
    return steps, table
