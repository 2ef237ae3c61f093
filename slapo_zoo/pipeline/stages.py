"""Assign the modules of a model to pipeline stages, and run one stage alone.

A stage runs the model's own forward. Units (block, embedding, head) of other stages are replaced: those of earlier
stages return the received values, and the forward ends after this stage's last unit. Masks, positions and sizes are
thus computed by the unmodified code on every stage, and only values that a dry run found to be used later are sent
(docs/decisions/0004-stages-run-the-own-forward.md).
"""

import re
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from slapo_zoo.errors import ScheduleError
from slapo_zoo.language.directive import join
from slapo_zoo.parallel.paths import compile_pattern
from slapo_zoo.pipeline.dataflow import Call, Shape, Value

Cut = tuple[str, int]  # (unit, call after which a stage ends: 0 unless shared)


class StageDone(Exception):  # noqa: N818 - not an error: it ends the forward of a stage
    """Exception raised after the last unit (block, embedding, head) of a stage has run, to end the model's forward."""


def leaf_units(
    model: nn.Module, blocks: Sequence[str], late: Sequence[str] = (), order: Sequence[str] = ()
) -> list[str]:
    """Return the paths of the units (modules with parameters that stages never split) in the order in which they run.

    These are the blocks, and the siblings of blocks and of modules that contain blocks. Modules without
    parameters (dropouts, rotary tables) run on every stage.

    Args:
        model: the unsharded model, may be on meta.
        blocks: paths of the repeated blocks.
        late: paths of units that run after the blocks but are defined before them.
        order: path patterns, e.g. ("encoder", "head.*"); siblings run in the order of the patterns that they match.
    """
    patterns = [compile_pattern(pattern) for pattern in order]
    containers = {""}
    for block in blocks:
        parts = block.split(".")
        containers |= {".".join(parts[:i]) for i in range(1, len(parts))}

    def below(path: str, module: nn.Module) -> list[str]:
        found = []
        for name, child in sorted(
            module.named_children(), key=lambda c: _first_match(join(path, c[0]), patterns)
        ):
            at = join(path, name)
            if at in containers or type(child).forward is nn.Module.forward:  # ModuleList
                found += below(at, child)
            elif next(child.parameters(), None) is not None:
                found.append(at)
        return found

    units = below("", model)
    moved = [unit for unit in units if unit in late]
    rest = [unit for unit in units if unit not in late]
    end = max((i for i, unit in enumerate(rest) if unit in blocks), default=-1) + 1
    return [*rest[:end], *moved, *rest[end:]]


def _first_match(path: str, patterns: Sequence[re.Pattern[str]]) -> int:
    """Return the index of the first pattern that matches the whole path; len(patterns) if none matches."""
    return next((i for i, p in enumerate(patterns) if p.fullmatch(path)), len(patterns))


def assign_stages(
    units: Sequence[str], cuts: Sequence[Cut], repeated: Sequence[str] = (), everywhere: Sequence[str] = ()
) -> dict[str, tuple[int, ...]]:  # fmt: skip
    """Return {unit (block, embedding, head): stages that hold it}; several stages if a stage ends between its calls.

    Args:
        units: paths of the units, in the order they run.
        cuts: (path of a unit, index of its call: 0 unless it runs several times) after which a stage ends.
        repeated: units that run more than once in a forward.
        everywhere: units that every stage holds.
    """
    for unit, _ in cuts:
        if unit not in units:
            problem = "no stage can end here: the module lies inside a block, or contains blocks"
            raise ScheduleError(unit, "cut_pipeline_stage()", problem, "cut after a block")
    stages, stage = {}, 0
    for unit in units:
        ends = [call for name, call in cuts if name == unit]
        shared = unit in repeated or len(ends) > 1 or any(ends)
        stages[unit] = tuple(range(stage, stage + len(ends) + 1)) if shared else (stage,)
        if unit in everywhere:
            stages[unit] = tuple(range(len(cuts) + 1))
        stage += len(ends)
    return stages


def stages_of(name: str, stages: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the stages that hold the parameter `name`; all stages hold a parameter that belongs to no unit.

    `stages` maps the path of each unit (block, embedding, head) to the stages that hold the unit. Any stage may
    read a parameter that belongs to no unit (CLIP's `logit_scale`): its gradient is summed over stages.
    """
    path = name
    while path:
        if path in stages:
            return stages[path]
        path = path.rpartition(".")[0]
    return tuple(sorted({stage for held in stages.values() for stage in held})) or (0,)


@dataclass(frozen=True)
class StagePlan:
    """Plan of one stage for forwards of one batch shape: which calls of units (block, embedding, head) the stage runs.

    Args:
        calls: every call of a block, embedding or head of the whole model, in order.
        stage_of_call: stage that runs each call.
        stage: index of this stage.
    """

    calls: tuple[Call, ...]
    stage_of_call: tuple[int, ...]
    stage: int

    @staticmethod
    def make(calls: Sequence[Call], cuts: Sequence[Cut], stage: int) -> "StagePlan":
        """Return the plan of `stage` for all unit `calls`; each (unit, index of its call) in `cuts` ends a stage."""
        ends, seen, at, of_call = set(cuts), {}, 0, []
        for call in calls:
            of_call.append(at)
            nth = seen.get(call.unit, 0)
            seen[call.unit] = nth + 1
            at += (call.unit, nth) in ends
        for unit, nth in cuts:
            if nth >= seen.get(unit, nth + 1):
                problem = f"a forward calls this block {seen[unit]} times"
                hint = f"choose call from 0 to {seen[unit] - 1}"
                raise ScheduleError(unit, f"cut_pipeline_stage(call={nth})", problem, hint)
        return StagePlan(tuple(calls), tuple(of_call), stage)

    def crossing(self, stage: int) -> list[Value]:
        """Return a Value (call, index in its output) per tensor that `stage` receives, for itself or later stages."""
        used = {v for call, at in zip(self.calls, self.stage_of_call, strict=True) if at >= stage
                for v in call.needs}  # fmt: skip
        return sorted(v for v in used if self.stage_of_call[v.call] < stage)

    def shape(self, value: Value) -> Shape:
        """Return the shape and dtype of an output tensor, which `value` names by the call and its index in the output."""
        return self.calls[value.call].leaves[value.leaf]

    @property
    def units(self) -> list[str]:
        """Return the paths of the blocks, embeddings and heads that this stage calls, in order."""
        both = zip(self.calls, self.stage_of_call, strict=True)
        return list(dict.fromkeys(call.unit for call, at in both if at == self.stage))

    @property
    def extent(self) -> str:
        """Return the first and last module (block, embedding, head) of the stage as text, e.g. "h.0 .. h.5"."""
        first, last = self.units[0], self.units[-1]
        return first if first == last else f"{first} .. {last}"

    @property
    def last_call(self) -> int:
        """Return the index, in `calls`, of the last call that this stage runs."""
        return max(i for i, at in enumerate(self.stage_of_call) if at == self.stage)


class Cursor:
    """State of the forward that a rank runs, from `begin` to `end`: plan of the stage, tensors received and to be sent,
    index of the latest call of a unit (block, embedding, head). A rank has one, for one micro-batch after the other.
    """

    def __init__(self) -> None:
        self.plan: StagePlan | None = None

    def begin(self, plan: StagePlan, received: Sequence[Tensor], device: torch.device) -> None:
        """Start the forward of stage `plan.stage` with `received`, the tensors of the stage before, on `device`."""
        self.plan, self.index, self.device = plan, -1, device
        incoming = plan.crossing(plan.stage)
        # A view: a value that is only passed on must not be the received leaf itself.
        self.values = {v: x.view_as(x) for v, x in zip(incoming, received, strict=True)}
        self.wanted = set(plan.crossing(plan.stage + 1))

    def end(self) -> None:
        """End the forward and drop its tensors."""
        self.plan, self.values = None, {}

    def outgoing(self) -> tuple[Tensor, ...]:
        """Return clones of the tensors that the next stage needs; clones, because torch detaches the returned tensors
        in place, which fails for a view of another tensor.
        """
        assert self.plan is not None  # noqa: S101 - called within begin and end
        crossing = (self.values[v] for v in self.plan.crossing(self.plan.stage + 1))
        return tuple(x.clone(memory_format=torch.contiguous_format) for x in crossing)

    def stand_in(self, unit: str, held: bool) -> Any:
        """Go on to the next call, which must be of `unit`. Return its output if an earlier stage runs it (zeros for
        tensors not sent); None if this stage does. Raise ScheduleError for another call than in the dry run, or if
        weights are missing (not `held`).
        """
        if self.plan is None:
            problem = "the module is called outside the model's forward, and this rank has only some of the layers"
            hint = "call the model as a whole (for inputs_embeds use an embedding of your own), or use pp=1"
            raise ScheduleError(unit, "pipeline", problem, hint)
        self.index += 1
        call = self.plan.calls[self.index] if self.index < len(self.plan.calls) else None
        if call is None or call.unit != unit:
            problem = f"this call, number {self.index} of the forward, did not occur in its dry run on fake tensors"
            hint = "if you moved blocks since the load: change the plain model, save it, and load that; "
            hint += "if the forward branches on data: end the stage at another block, or use pp=1"
            raise ScheduleError(unit, "pipeline", problem, hint)
        if self.plan.stage_of_call[self.index] == self.plan.stage:
            if not held:
                problem = "this stage runs the module, but another stage holds its weights"
                hint = "add the module's path to after_blocks= in schedules/<model_type>.py, or use pp=1"
                raise ScheduleError(unit, "pipeline", problem, hint)
            return None
        tensors = {v.leaf: x for v, x in self.values.items() if v.call == self.index}
        return call.output(tensors, self.device)

    def made(self, output: Any) -> None:
        """Store, of a module's `output`, the tensors that later stages need; raise StageDone after the last call."""
        assert self.plan is not None  # noqa: S101 - called within begin and end
        self.plan.calls[self.index].check(output)
        for leaf, tensor in enumerate(tree_leaves(output)):
            if (value := Value(self.index, leaf)) in self.wanted:
                self.values[value] = self.plan.calls[self.index].keep(leaf, tensor)
        if self.index == self.plan.last_call and self.plan.stage < max(self.plan.stage_of_call):
            raise StageDone


class Foreign(nn.Module):
    """Placeholder of another stage's block, embedding or head; its only parameters are those tied to this stage's.

    rewrite:  h.3(x, ...)  -->  the received output, or zeros that nothing on this stage uses
    """

    def __init__(
        self, unit: str, original: nn.Module, cursor: Cursor, held: Collection[int] = ()
    ):  # fmt: skip
        super().__init__()
        self.unit, self.original_name, self.cursor = unit, type(original).__name__, cursor
        self.__dict__["_original"] = original  # not registered as a child; on meta
        self._parameters.update({n: p for n, p in original._parameters.items() if id(p) in held})
        for name, child in original.named_children():
            if any(id(p) in held for p in child.parameters()):
                self._modules[name] = ForeignPart(f"{unit}.{name}", child, cursor, held)

    def __getattr__(self, name: str) -> Any:
        """Return the attribute `name` of the replaced module; a parameter has shape and dtype but no data."""
        for own in (self.__dict__.get("_parameters", {}), self.__dict__.get("_modules", {})):
            if name in own:
                return own[name]
        original = self.__dict__.get("_original")
        if original is None:
            problem = f"the module is on another pipeline stage, and its placeholder here has no {name!r} while the model is loaded or copied: read it afterwards"
            raise AttributeError(problem)
        return _readable(self.unit, name, getattr(original, name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return `forward`'s result, without the module's hooks: these run only on the stage that holds the module."""
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output that an earlier stage has sent for this call, with zeros for tensors that are not used."""
        return self.cursor.stand_in(self.unit, held=False)

    def extra_repr(self) -> str:
        """Return the class name of the replaced module, for `print(model)`."""
        return self.original_name


class ForeignPart(Foreign):
    """Placeholder of a module inside a unit (e.g. a block) of another stage: its attributes can be read, a call raises."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise ScheduleError: another stage runs the block, embedding or head that contains this module."""
        raise _used_elsewhere(self.unit, "a call of this module")


class ForeignParameter(Tensor):
    """A parameter that another stage holds: shape, dtype and device without data; computing with it raises."""

    unit: str  # path of the other stage's module, and the parameter's name

    def register_hook(self, hook: Any) -> RemovableHandle:
        """Return a handle and drop the user's gradient hook: only the stage that holds the parameter runs the hook."""
        return RemovableHandle(OrderedDict())

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return `func`'s result as meta tensors, without data; a `copy_` into this parameter does nothing. Raise
        ScheduleError if `func` also gets a tensor with data, other than a scalar.
        """
        if func is Tensor.copy_ and isinstance(args[0], ForeignParameter):
            return args[0]
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        unit = next(x.unit for x in given if isinstance(x, ForeignParameter))
        if any(not isinstance(x, ForeignParameter) and not x.is_meta and x.ndim for x in given):
            raise _used_elsewhere(unit, "a computation with this parameter")
        found = super().__torch_function__(func, types, args, kwargs)
        for x in tree_leaves(found):
            if isinstance(x, ForeignParameter):
                x.unit = unit
        return found


def _readable(unit: str, name: str, found: Any) -> Any:
    """Return `found`, attribute `name` of another stage's module `unit`, for reading: a module becomes a placeholder
    that raises when called, a meta tensor a parameter that raises in computations; other values are returned unchanged.
    """
    if isinstance(found, nn.Module):
        return ForeignPart(f"{unit}.{name}", found, Cursor())
    if isinstance(found, Tensor) and found.is_meta:
        found = found.detach().as_subclass(ForeignParameter)
        found.unit = f"{unit}.{name}"
    return found


def _used_elsewhere(path: str, use: str) -> ScheduleError:
    problem = f"found {use}, which another pipeline stage holds"
    hint = "use pp=1: with pp > 1 a forward may use weights of its own stage only"
    return ScheduleError(path, "pipeline", problem, hint)


def keep_stages(
    model: nn.Module, stages: Mapping[str, tuple[int, ...]], mine: Sequence[int]
) -> Cursor:
    """Replace the modules of other ranks' stages by placeholders at the same paths.

    Return the Cursor, which follows the calls of the units (block, embedding, head) of this rank's stages.

    Args:
        model: the model; modules of other ranks' stages are on the meta device.
        stages: path of a module --> stages that hold it.
        mine: stages of this rank.
    """
    cursor = Cursor()
    here = {unit for unit, held_by in stages.items() if set(mine) & set(held_by)}
    held = {id(p) for unit in here for p in model.get_submodule(unit).parameters()}
    for unit in stages:
        module = model.get_submodule(unit)
        if unit in here:
            _track_calls(unit, module, cursor)
            continue
        parent, _, name = unit.rpartition(".")
        model.get_submodule(parent)._modules[name] = found = Foreign(unit, module, cursor, held)
        computed = module._non_persistent_buffers_set  # computed on each stage (LayoutLMv3)
        found._buffers.update({name: module._buffers[name] for name in computed})
        found._non_persistent_buffers_set.update(computed)
    return cursor


def _track_calls(unit: str, module: nn.Module, cursor: Cursor) -> None:
    """Wrap the calls of `module`, the block, embedding or head at the path `unit`: `cursor` keeps what later stages
    need of the output, or returns the output that an earlier stage has sent if that runs the call (shared blocks).

    The call is wrapped, not the forward, as hooks of tensor parallelism run before (they all-reduce an embedding).
    """
    cls: Any = type(module)
    module.__dict__["_cursor"] = cursor  # replaced in a deep copy of the model

    def followed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        cursor: Cursor = self.__dict__["_cursor"]
        if cursor.plan is None:
            return cls.__call__(self, *args, **kwargs)
        output = cursor.stand_in(unit, held=True)
        if output is None:
            output = cls.__call__(self, *args, **kwargs)
            cursor.made(output)
        return output

    module.__class__ = type(
        cls.__name__, (cls,), {"__call__": followed, "__module__": cls.__module__}
    )


@contextmanager
def held_here(model: Any) -> Iterator[None]:
    """Context in which `model.modules()` lists no placeholders of other stages, so that peft gives them no adapters."""
    found = [(parent, leaf, child) for parent in model.modules()
             for leaf, child in parent._modules.items() if isinstance(child, Foreign)]  # fmt: skip
    for parent, leaf, child in found:
        parent._modules[leaf], parent.__dict__[leaf] = None, child
    if isinstance(model.get_output_embeddings(), Foreign):
        model.__dict__["get_output_embeddings"] = lambda: None
    try:
        yield
    finally:
        for parent, leaf, child in found:
            parent._modules[leaf] = child
            del parent.__dict__[leaf]
        model.__dict__.pop("get_output_embeddings", None)
