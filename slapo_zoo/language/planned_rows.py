"""The rows of a rank's plan, read off what the directives of a schedule did."""

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
    """Return the plan of a schedule: that of the zoo's model, or one for a model that is all here.

    Args:
        state: of the schedule.
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
    """Every tensor of a model as a row of the plan, in the order of the state dict.

    Args:
        state: of the schedule, whose directives have run.
        whole: every tensor before the schedule: name, shape, dtype.
        parameters: the names among them that may take a gradient.
        tied: name --> the name under which that tensor is saved.
        stages: name --> pipeline coordinates that hold what goes by this name.
        row_shards: dp ranks among which rows are sharded (ZeRO).
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
    """Return over which ranks the gradient of one parameter is summed, in order."""
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
    """The tp coordinates that hold the same units (KV heads), or () where no two do."""
    placement, size = placed.placement, placed.shape[placed.placement.axis]
    if not placement.replicate or mesh.tp == 1:
        return ()
    held = {r: tuple(placement.runs(size, mesh.tp, r)) for r in range(mesh.tp)}
    parts = partition(range(mesh.tp), held)
    return parts if len(parts) < mesh.tp else ()
