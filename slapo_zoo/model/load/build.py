"""Schedules (changes that shard any module): create_schedule, build; published ones: publish_card, apply_card."""

import copy
import functools
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn
from torch.fx import GraphModule

from slapo_zoo.errors import ScheduleError
from slapo_zoo.language.copying import independent_copy
from slapo_zoo.language.directive import State
from slapo_zoo.language.gradients import sum_over_tp
from slapo_zoo.language.planned_rows import plan_of
from slapo_zoo.language.schedule import Schedule
from slapo_zoo.model.integrations.dialects import init_target_engine
from slapo_zoo.model.missing_sums import warn_of_missing_sums
from slapo_zoo.parallel.local_tensors import part_of
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.rank_plan import RankPlan
from slapo_zoo.parallel.rng.device_seeds import mix
from slapo_zoo.parallel.rng.layout_independent_random import drawn_from
from slapo_zoo.zoo.cards.publish import card_of_module, publish
from slapo_zoo.zoo.cards.resolve_card import module_steps


def create_schedule(
    root: nn.Module,
    name: str = "",
    path: str = "",
    parent: Schedule | None = None,
    group: dist.ProcessGroup | None = None,
    **kwargs: Any,
) -> Schedule:
    """Return a Schedule of `root`, whose methods (shard, replace, ...) change its submodules; none is changed yet.

    Args:
        root: the model.
        name: must be empty; argument of the original Slapo.
        path: must be empty; argument of the original Slapo.
        parent: must be None; argument of the original Slapo. Use `sch["path"]` to schedule a submodule.
        group: process group of the tp ranks; None takes all processes, or this one if no process group exists.
        **kwargs: `mesh=` for sizes of tp, pp and dp, `seed=` of dropout.

    Raises:
        ScheduleError: name, path or parent was given: a schedule starts at the root of a model.
    """
    if name or path or parent is not None:
        what = f"path={path!r}" if path else f"name={name!r}" if name else "parent"
        problem = "this argument of the original Slapo is not supported: a schedule starts at the root of a model"
        hint = 'select below the root: sch["path"].shard(...)'
        raise ScheduleError("create_schedule", what, problem, hint)
    mesh = kwargs.pop("mesh", None)
    if mesh is None and dist.is_initialized():
        mesh = Mesh(tp=dist.get_world_size(group), rank=dist.get_rank(group))
    return Schedule(root, mesh, **kwargs)


def build(
    sch: Schedule, target: str | None = None, init_weights: bool | Callable = True, **kwargs: Any
) -> Any:
    """Return the runnable model of a schedule; if `target` names another engine than torch, (engine, optimizer).

    A backward of the returned model sums over tp the gradients for which the schedule's `sum_gradient` or
    `shard(replicate=True)` was called; a backward of `sch.model` before `build` does not. Over dp nothing is averaged.

    Args:
        sch: a schedule that has made its changes (shard, replace, ...) to the model.
        target: None or "torch" for the model itself; "deepspeed" or "megatron" for (that engine around it, optimizer).
        init_weights: how parameters on meta are filled. True: by the model's `_init_weights`; a function called with a
            module, or with (module, path): by that function, in place; False: they stay on meta.
        **kwargs: options of the engine.
    """
    warn_of_missing_sums(sch)
    if init_weights and any(p.is_meta for p in sch.model.parameters()):
        given = init_weights if callable(init_weights) else None
        consolidate_model(sch, target or "torch", given)
    if target not in (None, "torch"):
        return init_target_engine(sch, target, **kwargs)
    if sch.state.plan is None and dist.is_initialized():
        for handle in sch.state.sums:  # of an earlier build
            handle.remove()
        sch.state.sums = sum_over_tp(sch.model.named_parameters(), plan_of(sch.state))
    is_usual = isinstance(sch.model, GraphModule) or not hasattr(type(sch.model), "__deepcopy__")
    if sch.state.plan is None and is_usual:
        _make_copies_independent(sch.model, sch.state)
    return sch.model


def _make_copies_independent(model: nn.Module, state: State) -> None:
    """Let `copy.deepcopy(model)` return a model with forwards and hooks of its own, whose gradients are summed over tp
    as `state`, that of the model's schedule, says.
    """
    changed = ("forward" in vars(m) or m._forward_hooks or m._forward_pre_hooks for m in model.modules())  # fmt: skip

    def copied(memo: dict[int, Any]) -> nn.Module:
        memo[id(state.sums)] = []  # handles lead to process groups
        new = independent_copy(model, memo)
        _ = state.sums and sum_over_tp(new.named_parameters(), plan_of(state))
        _make_copies_independent(new, state)
        return new

    if any(changed) or state.sums:
        model.__dict__["__deepcopy__"] = copied


def consolidate_model(
    sch: Schedule, target: str, param_init_fn: Callable | None = None, **kwargs: Any
) -> None:
    """Replace parameters on meta by drawn ones: all ranks draw the same full tensor, and each rank keeps its shard.

    Args:
        sch: a schedule of a model built under `init_empty_weights`.
        target: ignored; argument of the original Slapo.
        param_init_fn: initialises a module in place; called with a module, or with (module, path). None
            takes the model's own `_init_weights`, or the module's `reset_parameters`.
        **kwargs: ignored; arguments of the original Slapo.
    """
    state, plan = sch.state, plan_of(sch.state)
    tied: dict[int, nn.Parameter] = {}
    for path, module in state.modules.items():
        names = [n for n, p in module._parameters.items() if p is not None and p.is_meta]
        fresh = [n for n in names if id(module._parameters[n]) not in tied]
        before = {name: module._parameters[name] for name in names}
        _materialize(sch, plan, path, module, fresh, param_init_fn)
        for name in names:
            old: Any = before[name]
            if name in fresh:
                tied[id(old)] = _cut(plan, f"{path}.{name}" if path else name, module, name)
            module._parameters[name] = tied[id(old)]
    state.index()


def _materialize(
    sch: Schedule, plan: RankPlan, path: str, module: Any, names: list[str], init: Callable | None
) -> None:
    """Replace the parameters `names` (on meta) of `module` by CPU ones with the unsharded shapes that `plan` lists,
    filled by `init(module)` or `init(module, path)`, or for None by the model's `_init_weights` or the module's
    `reset_parameters`. The module's `path` seeds the random numbers. ScheduleError if a parameter stays unfilled.
    """
    before = {name: module._parameters[name] for name in names}
    for name in names:
        row, meta = plan.of(f"{path}.{name}" if path else name), module._parameters[name]
        shape = row.shape if row else meta.shape
        full = torch.full(shape, torch.nan, dtype=meta.dtype)
        module._parameters[name] = nn.Parameter(full, meta.requires_grad)
    if not names:
        return
    with drawn_from(mix(sch.state.random.seed, crc32(path.encode()))), torch.no_grad():
        _call_init(sch, path, module, init)
    for name in names:
        if module._parameters[name].isnan().any():
            module._parameters.update(before)
            problem = f"nothing initialises {name!r}, expected a function that does"
            hint = "give the module reset_parameters(), or pass a function that does: build(sch, init_weights=...)"
            raise ScheduleError(path or "(the model)", "build", problem, hint)


def _call_init(sch: Schedule, path: str, module: Any, init: Any) -> None:
    if init is not None:
        takes_path = len(signature(init).parameters) > 1
        init(module, path) if takes_path else init(module)
    elif hasattr(sch.model, "_init_weights"):
        sch.model._init_weights(module)  # pyright: ignore[reportCallIssue]
    elif hasattr(module, "reset_parameters"):
        module.reset_parameters()


def _cut(plan: RankPlan, full_name: str, module: Any, name: str) -> nn.Parameter:
    """Return this rank's shard of the parameter `name`, of which `module` has the full tensor so far. `full_name` is
    the name of the parameter in the model, by which `plan` knows how it is sharded.
    """
    full = module._parameters[name]
    part = part_of(full.detach(), plan.of(full_name), plan.mesh)
    return full if part.shape == full.shape else nn.Parameter(part, full.requires_grad)


def publish_card(sch: Schedule, place: str | Path, **options: Any) -> str:
    """Publish the schedule of your own module as a schedule card, which others apply; a collective call of all ranks.

    The card contains the directives (changes such as `shard`) and a digest of the module's tree and shapes, and no
    weights. For a model of the loader there is `model.push_schedule_to_hub`.

    Args:
        sch: schedule of `create_schedule`, with its directives applied.
        place: a folder (a `Path`, a text that begins with `.`, `/` or `~`, or an existing one), or
            org/name on the Hub, created if it does not exist.
        **options: of a repository: token, private, tag, message, parent (expected newest sha); of a folder: none.

    Returns:
        the argument for `apply_card`: the folder, or `org/name@sha`.

    Raises:
        CardError: a directive holds a Python object (e.g. a module), or is of a kind that cards do not allow.
    """
    return publish(sch.mesh, functools.partial(card_of_module, sch), place, **options)


def apply_card(
    module: nn.Module, card: str | Path, mesh: Mesh | None = None, seed: int = 0
) -> Schedule:
    """Apply the directives (changes) of a schedule card (see `publish_card`) to a module; a collective call.

    No code of the card is executed. The card's class and digest are compared with the module, and its
    directives are tried on a copy on meta, before the module is changed.

    Args:
        module: an instance of the class that the card was made for, of the same shapes.
        card: a folder, or `org/name@sha`.
        mesh: sizes of tp, pp and dp; None shards over all processes (tp).
        seed: seed of dropout.

    Returns:
        the schedule; `slapo_zoo.build(sch)` returns the runnable model.

    Raises:
        CardError: the card is malformed, or for another class, other shapes or another mesh.
        ScheduleError: a directive does not fit this mesh, such as 3 ranks for an axis of 8.
    """
    sch = create_schedule(module, mesh=mesh, seed=seed)
    steps = module_steps(str(card), module, sch.mesh)
    Schedule(_without_memory(module), sch.mesh, seed).replay(steps)
    return sch.replay(steps)


def _without_memory(module: nn.Module) -> nn.Module:
    """Return a copy of a module with its parameters and buffers on meta."""
    tensors = [*module.parameters(), *module.buffers()]
    empty = {
        id(t): nn.Parameter(torch.empty_like(t, device="meta"), t.requires_grad)
        if isinstance(t, nn.Parameter)
        else torch.empty_like(t, device="meta")
        for t in tensors
    }
    return copy.deepcopy(module, empty)
