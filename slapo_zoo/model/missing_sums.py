"""Search for sharded modules whose outputs or gradients are partial sums that a schedule does not all-reduce over tp."""

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn

from slapo_zoo.errors import ScheduleError
from slapo_zoo.language.directive import Site
from slapo_zoo.language.primitives import Replace, Sync, SyncRMSNorm
from slapo_zoo.language.primitives.bias_after_sum import output_of
from slapo_zoo.language.schedule import Schedule

FORWARD = 'the output is a partial sum on each tp rank, and nothing sums it: add sync("fwd_post", "all_reduce") there, or around it'
BACKWARD = 'the gradient of the input is a partial sum on each tp rank, and nothing sums it: add sync("bwd_post", "all_reduce") there, or around it'
BIAS = 'the bias is added on each tp rank, and the all-reduce around it sums it tp times: put sync("fwd_post", "all_reduce") there'
STATISTICS = "the mean and variance are of this tp rank's columns only: gather the columns before"
INPUTS = {"Linear": 1, "Conv1D": 0}  # class --> axis of the weight with the input features


class ScheduleWarning(UserWarning):
    """Warning that a schedule most likely computes wrong results, e.g. for a missing all-reduce."""


def missing_sums(sch: Schedule) -> list[str]:
    """Return texts that name modules with wrong sums over tp; [] if none is found. Such a module gives partial sums
    without an all-reduce (the directive `sync`, at it or at a module around it), has a bias that an all-reduce sums tp
    times, or is a norm of sharded features. Replaced modules are not searched.
    """
    return [_line(bad, problem) for bad, problem in _unsummed(sch)]


def _line(bad: list[str], problem: str) -> str:
    more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
    return f"{bad[0]}{more}: {problem}"


def _unsummed(sch: Schedule) -> Iterator[tuple[list[str], str]]:
    """Yield (paths of modules, text of the problem) for each of four problems that some module has: no all-reduce of a
    row-parallel output; none of the input gradient of a column-parallel module; a bias added before the all-reduce; a
    norm whose statistics are of a shard.
    """
    if sch.mesh.tp == 1:
        return
    synced: dict[str, set[str]] = {"fwd_post": set(), "bwd_post": set()}
    replaced: set[str] = set()
    for paths, (_, directive) in zip(sch.landed, sch.history, strict=True):
        if isinstance(directive, Sync):
            for mode in [half.mode for half in directive._halves()] or [directive.mode]:
                synced.get(mode, replaced).update(paths if mode in synced else _parents(paths))
        elif isinstance(directive, Replace | SyncRMSNorm):
            replaced.update(paths)
    found: dict[str, list[str]] = {FORWARD: [], BACKWARD: [], BIAS: [], STATISTICS: []}
    after, before, placed = synced["fwd_post"], synced["bwd_post"], sch.state.placed
    for path, m in sch.state.modules.items():
        kind, around = output_of(Site(path, m, sch.state)), {*_around(path)}
        is_row, is_column = kind == "partial", kind == "divided"
        if is_column:  # ids have no gradient, and ranks read different channels of groups
            is_column = not (hasattr(m, "num_embeddings") or getattr(m, "groups", 1) > 1)
        has_bias = m._parameters.get("bias") is not None and path not in after
        is_norm = isinstance(m, nn.LayerNorm | nn.RMSNorm) and path not in replaced
        found[FORWARD] += [path] * (is_row and not around & (after | replaced))
        found[BACKWARD] += [path] * (is_column and not around & (before | replaced))
        found[BIAS] += [path] * bool(is_row and has_bias and around & after - replaced)
        found[STATISTICS] += [path] * (is_norm and f"{path}.weight" in placed)
    yield from ((bad, problem) for problem, bad in found.items() if bad)


def warn_of_missing_sums(sch: Schedule) -> None:
    """Warn (ScheduleWarning) of modules whose output, input gradient or bias lacks a sum over tp or is summed wrongly.
    Hook these modules: their forward raises ScheduleError if the width of its input does not fit the weight's shard.
    """
    for bad, problem in _unsummed(sch):
        warnings.warn(_line(bad, problem), ScheduleWarning, stacklevel=3)
        for path in bad:
            sch.state.modules[path].register_forward_pre_hook(partial(_require_width, path))


def _require_width(path: str, module: Any, args: Any) -> None:
    """Raise ScheduleError if an input [..., features] of the module at `path` has another width than the module's shard
    of the weight takes; a forward pre-hook.
    """
    name, weight = type(module).__name__, module.weight
    if name not in INPUTS or not args or args[0].shape[-1] == weight.shape[INPUTS[name]]:
        return
    found, taken = args[0].shape[-1], weight.shape[INPUTS[name]]
    problem = f"the input has {found} features, but this rank's shard of the weight takes {taken}"
    order = "[inputs, outputs]" if INPUTS[name] == 0 else "[outputs, inputs]"
    hint = (
        f"the weight of a {name} is {order}. Either shard its other axis, or shard the input to match, "
        f'e.g. by sch["{path}"].sync("fwd_pre", ...)'
    )
    raise ScheduleError(path, 'shard("weight")', problem, hint)


def _around(path: str) -> Iterator[str]:
    """Yield the path of a module and the paths of all modules that contain the module, the root '' last."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _parents(paths: tuple[str, ...]) -> set[str]:
    """Return the paths of the parents of modules at `paths`: a collective on a child's input may serve its siblings."""
    return {path.rpartition(".")[0] for path in paths}
