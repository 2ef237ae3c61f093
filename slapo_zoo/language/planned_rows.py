"""Derive the plan of a rank (how each tensor is sharded, one row per tensor) from the directives of a schedule."""

from collections.abc import Callable, Collection, Mapping

from slapo_zoo.language.directive import Placed, State
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.placement import TensorSpec
from slapo_zoo.parallel.rank_plan import (
    DATA,
    PARTIAL,
    REPLICAS,
    TIED,
    RankPlan,
    Sum,
    TensorPlan,
    partition,
)


def plan_of(state: State) -> RankPlan:
    """Return this rank's plan, which has one row per tensor: shards, dtype, gradient all-reduces. It is `state.plan`
    if the loader of the weights has set that, and otherwise derived from the model.

    Args:
        state: state of the schedule; unless `state.plan` is set, its model must have all pipeline stages.
    """
    if state.plan is not None:
        return state.plan
    parameters = dict(state.model.named_parameters(remove_duplicate=False))
    whole = {}
    for name, p in parameters.items():
        placed = state.placed.get(name)
        shape = placed.shape if placed else tuple(p.shape)
        whole[name] = TensorSpec(name, shape, str(p.dtype).removeprefix("torch."))
    aliases = {name: names[0] for names in state.owners.values() for name in names[1:]}
    rows = planned_rows(state, whole, parameters, aliases, lambda _name: (0,))
    return RankPlan(state.mesh, rows)


def planned_rows(
    state: State,
    whole: Mapping[str, TensorSpec],
    parameters: Collection[str],
    tied: Mapping[str, str],
    stages: Callable[[str], tuple[int, ...]],
    row_shards: int = 1,
) -> dict[str, TensorPlan]:
    """Return {tensor name: TensorPlan (shape, sharding, all-reduces of its gradient)} in the order of `whole`.

    Args:
        state: state of a schedule whose directives have all been applied.
        whole: name of each tensor of the model --> its unsharded shape and dtype.
        parameters: names of the tensors that may have a gradient.
        tied: name of a tied tensor --> the name under which it is saved.
        stages: maps a name to the pp coordinates of the stages that hold the tensor under this name.
        row_shards: number of dp ranks over which the rows of each tensor are sharded (ZeRO).
    """
    names_of = {name: names for names in state.owners.values() for name in names}
    found = {}
    for name, spec in whole.items():
        alike = names_of.get(name, [name])
        held = tuple(sorted({stage for other in alike for stage in stages(other)}))
        placed = next((state.placed[n] for n in alike if n in state.placed), None)
        sums = _sums(state, alike, placed, held) if name in parameters else ()
        found[name] = TensorPlan(
            spec.name, spec.shape, spec.dtype, placed.placement if placed else None,
            stages(tied.get(name, name))[0], held, row_shards, sums, tied.get(name, ""),
            name in parameters,
        )  # fmt: skip
    return found


def _sums(
    state: State, names: list[str], placed: Placed | None, stages: tuple[int, ...]
) -> tuple[Sum, ...]:
    """Return the sums over ranks that complete a parameter's gradient, one Sum each: over tp, pp (if tied), then dp.

    Args:
        state: state of the schedule.
        names: all names of the parameter, several when tied.
        placed: how the parameter is sharded, or None.
        stages: pp coordinates of the stages that hold the parameter.
    """
    mesh, found = state.mesh, []
    if placed is not None and (parts := _replicas(placed, mesh)):
        found.append(Sum("tp", REPLICAS, parts))
    if not state.partial_gradients.isdisjoint(names):
        found.append(Sum("tp", PARTIAL))
    elif not state.sequence_gradients.isdisjoint(names):
        found.append(Sum("tp", PARTIAL, if_tokens_sharded=True))
    if len(stages) > 1:
        found.append(Sum("pp", TIED, (stages,) if len(stages) < mesh.pp else ()))
    if mesh.size("loss") > 1:
        found.append(Sum(mesh.named("loss"), DATA))
    return tuple(found)


def _replicas(placed: Placed, mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    """Return groups of tp coordinates; the ranks of a group hold the same shard of a tensor (KV heads). () if
    all shards differ. `placed` says how the tensor is sharded over the tp ranks of `mesh`.
    """
    placement, size = placed.placement, placed.shape[placed.placement.axis]
    if not placement.replicate or mesh.tp == 1:
        return ()
    held = {r: tuple(placement.runs(size, mesh.tp, r)) for r in range(mesh.tp)}
    parts = partition(range(mesh.tp), held)
    return parts if len(parts) < mesh.tp else ()
