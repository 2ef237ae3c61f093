"""Explain a schedule: the changes (directives) to each module, and the collectives that they add to a training step."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from slapo_zoo.errors import ScheduleError
from slapo_zoo.hf.models import empty_like, to_fakes
from slapo_zoo.language.directive import Directive, ForwardContext, State
from slapo_zoo.language.planned_rows import plan_of
from slapo_zoo.language.tape import Tape, Transfer
from slapo_zoo.parallel.gradient_buckets import buckets
from slapo_zoo.parallel.rank_plan import DATA, PARTIAL, REPLICAS, RankPlan
from slapo_zoo.parallel.replaced import replaced


class TrafficRow(NamedTuple):
    """Number and total bytes of a step's collectives of one kind (e.g. all_reduce), mesh dim and phase (e.g. backward)."""

    kind: str
    mesh_dim: str
    phase: str
    count: int
    bytes: int


@dataclass(frozen=True)
class Explanation:
    """Result of `explain`: the changes (directives) to each module and the collectives of one training step.

    Args:
        done: path of a module --> its directives as text, in order.
        transfers: collectives of one training step on this rank, in order.
    """

    done: Mapping[str, Sequence[str]]
    transfers: Sequence[Transfer]

    def totals(self) -> list[TrafficRow]:
        """Return a TrafficRow (number and total bytes) for each kind, mesh dim and phase of the step's collectives."""
        counts: Counter[tuple[str, str, str]] = Counter(t[:3] for t in self.transfers)
        sizes: Counter[tuple[str, str, str]] = Counter()
        for t in self.transfers:
            sizes[t[:3]] += t.bytes
        return [TrafficRow(*key, counts[key], sizes[key]) for key in sorted(counts)]

    def at(self, path: str) -> list[Transfer]:
        """Return the collectives that the module at `path` causes in the step."""
        return [t for t in self.transfers if t.path == path]

    def __str__(self) -> str:
        lines: list[str] = []
        for paths, text in _alike({path: self._about(path) for path in self._paths()}):
            times = f"  (each of {len(paths)})" if len(paths) > 1 else ""
            lines += [f"{_common(paths) or '(the model)'}{times}", *text]
        lines.append("in one training step, on this rank:")
        for kind, mesh_dim, phase, count, nbytes in self.totals():
            lines.append(f"    {phase}: {count} {kind} over {mesh_dim}, {nbytes:,} bytes")
        if not self.transfers:
            lines.append("    no collectives")
        return "\n".join(lines)

    def _paths(self) -> list[str]:
        after = (t.path for t in self.transfers if t.path not in self.done)
        return list(dict.fromkeys([*self.done, *after]))

    def _about(self, path: str) -> tuple[str, ...]:
        """Return a line per directive (change) at the module `path`, each followed by lines on its collectives."""
        own = Counter((t.directive, t.phase, t.kind, t.mesh_dim, t.bytes) for t in self.at(path))
        lines = []
        for directive in dict.fromkeys([*self.done.get(path, ()), *(key[0] for key in own)]):
            lines.append(f"    {directive}")
            for (by, phase, kind, mesh_dim, nbytes), count in own.items():
                if by == directive:
                    many = f"{count} x " if count > 1 else ""
                    lines.append(f"        {phase}: {many}{kind} over {mesh_dim}, {nbytes:,} bytes")
        return tuple(lines)


def _alike(texts: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[list[str], tuple[str, ...]]]:
    """Group modules whose paths differ only in numbers and whose text is the same; yield (paths, text) per group.
    `texts` maps the path of a module to the lines to print for that module.
    """
    groups: dict[Any, list[str]] = {}
    for path, text in texts.items():
        groups.setdefault((re.sub(r"\b\d+\b", "*", path), text), []).append(path)
    for (_, text), paths in groups.items():
        yield paths, text


def _common(paths: list[str]) -> str:
    """Return one pattern that matches all paths, e.g. `h.*.mlp` for `h.0.mlp` and `h.1.mlp`."""
    columns = zip(*(path.split(".") for path in paths), strict=True)
    return ".".join(c[0] if len(set(c)) == 1 else "*" for c in columns)


def explain(
    state: State, landed: Iterable[tuple[Sequence[str], Directive]], batch: Mapping[str, Any]
) -> Explanation:
    """Run one training step of a scheduled model on fake tensors; return the model's directives and step's collectives.

    Args:
        state: state of the schedule; nothing in it is changed.
        landed: (paths of the modules that a directive was applied to, the directive) for each directive, in order.
        batch: keyword arguments of the model's forward; only shapes and dtypes matter.
    """
    done: dict[str, list[str]] = {}
    for paths, directive in landed:
        for path in paths:
            done.setdefault(path, []).append(str(directive))
    order = {path: i for i, path in enumerate(state.modules)}
    done = dict(sorted(done.items(), key=lambda item: order.get(item[0], len(order))))
    if state.mesh.world_size == 1:
        return Explanation(done, [])
    named = list(state.model.named_parameters())
    after = after_backward(plan_of(state), named, state.sequence_parallel)
    return Explanation(done, [*_dry_run(state, batch), *after])


def _dry_run(state: State, batch: Mapping[str, Any]) -> list[Transfer]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    model: Any = state.model
    runtime = getattr(model, "_slapo", None)  # of an AutoScheduledModel
    if runtime is not None and runtime.pipeline is not None:
        if any(call for _, call in state.cuts):
            hint = "explain the model with pp=1, or see `slapo-zoo show NAME --pp ...`"
            problem = "explain() does not support a block that runs on several stages (ALBERT)"
            raise ScheduleError("(the model)", "explain", problem, hint)
        whole, mine = runtime.pipeline.whole().state, runtime.pipeline.holds
        whole.sequence_parallel = state.sequence_parallel
        return [found for found in _dry_run(whole, batch) if mine(found.path)]
    forward = partial(runtime.own_forward, model) if runtime else model
    parameters = signature(runtime.own_forward if runtime else model.forward).parameters
    if "use_cache" in parameters:  # as in a training step
        batch = {**batch, "use_cache": False}
    mode, tape = FakeTensorMode(allow_non_fake_inputs=True), Tape()
    with in_dry_run(state, tape), mode, torch.enable_grad():
        undo = to_fakes(model)
        try:
            inputs = {
                k: empty_like(v).requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v
                for k, v in batch.items()
            }
            if (total := tape.sum_of(forward(**inputs))) is not None:
                total.backward()
        finally:
            undo()
    return tape.transfers


@contextmanager
def in_dry_run(state: State, tape: Tape) -> Iterator[None]:
    """Context for a dry run of a schedule's model in training mode: collectives are recorded on `tape` and not sent.

    `state.mesh` needs no process group inside. On exit the mesh, modes of modules and random states are restored.
    """
    modes, position = {m: m.training for m in state.model.modules()}, state.random.position()
    forward = ForwardContext(state.sequence_parallel, tape=tape, is_call=True)
    state.model.train()
    try:
        dry = replaced(state, "mesh", replace(state.mesh, dry_run=True))
        drawing = torch.random.fork_rng(devices=[]), state.random.at(*position)
        with dry, drawing[0], drawing[1], state.within(forward):
            yield
    finally:
        for module, training in modes.items():
            module.training = training


def after_backward(
    plan: RankPlan, named: Sequence[tuple[str, nn.Parameter]], tokens_sharded: bool
) -> list[Transfer]:
    """Return the all-reduces of gradients after a training step's backward: a Transfer (mesh dim, bytes) per bucket.

    Args:
        plan: plan of this rank, which says over which mesh dims each gradient is summed.
        named: names and parameters of this rank.
        tokens_sharded: True when hidden states are sharded over tp along the tokens (sequence parallelism).
    """
    parameters = dict(named)
    sums = plan.sums_of(parameters, REPLICAS, PARTIAL, DATA, tokens_sharded=tokens_sharded)
    return [
        Transfer("all_reduce", one.mesh_dim, "after backward",
                 sum(p.nbytes + p.itemsize for p in run),  # each bucket also sends a flag per gradient: present or not
                 directive="sums of gradients")
        for one, names in sums.items()
        for run in buckets([parameters[name] for name in names])
    ]  # fmt: skip
