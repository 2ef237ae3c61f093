"""Schedule: a model, a mesh, and the list of the changes (directives) that were made to the model."""

import dataclasses
import difflib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.nn.parameter import is_lazy

import slapo_zoo.language.primitives as ps  # registers every primitive
from slapo_zoo.errors import ScheduleError
from slapo_zoo.language.directive import PRIMITIVES, Directive, Site, State, join, subtree
from slapo_zoo.language.explain import Explanation, explain
from slapo_zoo.language.graph.examples import tiny_batch
from slapo_zoo.language.graph.find import find
from slapo_zoo.language.graph.pattern import name_matches
from slapo_zoo.language.graph.traced import check_reachable
from slapo_zoo.parallel.digests import structure_hash
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.paths import nearest, select_paths
from slapo_zoo.parallel.rng.layout_independent_random import RandomStream

FORMAT = "slapo-zoo-schedule/1"
UNCHANGED = "pass the unchanged text of Schedule.to_json()"
Step = tuple[str, Directive]


if TYPE_CHECKING:
    from typing import Generic, ParamSpec

    P = ParamSpec("P")

    class _Method(Generic[P]):
        """Type of methods such as `sch[path].shard(...)`; it exists only for editors and type checkers."""

        def __init__(self, directive: Callable[P, Directive]): ...

        def __get__(self, at: Any, owner: Any = None) -> Callable[P, "Selection"]: ...

    class _Methods:  # primitives of third parties work too, untyped
        annotate = _Method(ps.Annotate)
        checkpoint = _Method(ps.Checkpoint)
        cut_pipeline_stage = _Method(ps.CutPipelineStage)
        decompose = _Method(ps.Decompose)
        fork_rng = _Method(ps.ForkRng)
        fuse = _Method(ps.Fuse)
        hook = _Method(ps.Hook)
        pipeline_split = _Method(ps.PipelineSplit)
        replace = _Method(ps.Replace)
        replace_all: Callable[..., "Selection"]  # takes options of the factory
        shard = _Method(ps.Shard)
        shard_attribute = _Method(ps.ShardAttribute)
        sum_gradient = _Method(ps.SumGradient)
        sync = _Method(ps.Sync)
        trace = _Method(ps.Trace)
        trace_until = _Method(ps.TraceUntil)
else:
    _Methods = object


class Selection(_Methods):
    """Modules that `pattern` matches; `shard()` and other primitives change each of them; `[name]` selects children."""

    def __init__(self, schedule: "Schedule", pattern: str):
        self.schedule, self.path = schedule, pattern

    @property
    def paths(self) -> list[str]:
        """Return the paths of the modules that the pattern matches, in model order."""
        return self.schedule.state.select(self.path)

    @property
    def mod(self) -> nn.Module:
        """Return the one module that the pattern matches; a pattern of several modules raises ScheduleError."""
        path, *others = self.schedule.matching(self.path, "mod")
        if others:
            hint = "write the whole path of one of them, or loop over .paths"
            raise ScheduleError(self.path, "mod", f"matches {1 + len(others)} modules, not 1", hint)
        return self.schedule.state.modules[path]

    @property
    def child(self) -> dict[str, "Selection"]:
        """Return {name: selection} of the direct children of the one module that the pattern matches."""
        names = [name for name, _ in self.mod.named_children()]
        return {name: Selection(self.schedule, join(self.path, name)) for name in names}

    def __getitem__(self, path: str) -> "Selection":
        return self.schedule[join(self.path, path)]

    def __contains__(self, path: str) -> bool:
        return join(self.path, path) in self.schedule

    def named_schedules(self, prefix: str = "") -> Iterator[tuple[str, "Selection"]]:
        """Yield ("prefix.path", its Selection) for each module that the pattern matches and each module below it."""
        every = [*self.schedule.state.modules]
        tops = self.schedule.matching(self.path, "named_schedules")
        for path in dict.fromkeys(below for top in tops for below in subtree(top, every)):
            yield join(prefix, path) if prefix else path, Selection(self.schedule, path)

    def __getattr__(self, name: str) -> Callable[..., "Selection"]:
        if name not in PRIMITIVES:
            known = f"choose one of the registered: {sorted(PRIMITIVES)}"
            path = vars(self).get("path", "")  # a copy asks before it has one
            raise AttributeError(f"sch[{path!r}] has no primitive {name!r}: {known}")

        def use(*args: Any, **kwargs: Any) -> "Selection":
            self.schedule.do(self.path, PRIMITIVES[name].called(self.path, args, kwargs))
            return self

        use.__name__, use.__doc__ = name, PRIMITIVES[name].__doc__
        use.__signature__ = inspect.signature(PRIMITIVES[name])
        return use

    def find(self, what: Any, func_pattern: Any = None) -> Any:
        """Find nodes or subgraphs in the traced graphs of the selected modules: see `slapo_zoo.language.graph.find.find`.

        A module without a graph is traced first, and that `trace()` is recorded in the history.

        Args:
            what: a regex for module names, a predicate of a node, or a pattern (function or Pattern to search for).
            func_pattern: pattern to search for; `what` is then a regex for the modules, below the selected
                ones, whose graphs are searched.

        Returns:
            A list of (path of the traced module, node); for patterns a list of subgraphs.
        """
        paths = self.paths or [self.path]
        if func_pattern is not None:
            paths = [p for p in self._below(paths) if name_matches(what, p)] or [str(what)]
            what = func_pattern
        found = [self.schedule._find(path, what) for path in paths]
        first, *rest = found
        for more in rest:
            first.extend(more)
        return first

    def _below(self, paths: list[str]) -> list[str]:
        everything = list(self.schedule.state.modules)
        return [p for path in paths for p in subtree(path, everything) if p != path]

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *PRIMITIVES]


class Schedule(Selection):
    """A model that is being transformed, and the list of directives (changes to modules) applied to it so far.

    Args:
        model: any module; directives change it in place.
        mesh: sizes of tp, pp, dp and cp and the coordinates of this rank; no process group is needed yet.
        seed: seed of the model's random streams (dropout).
    """

    def __init__(self, model: nn.Module, mesh: Mesh | None = None, seed: int = 0):
        super().__init__(self, "")
        if not isinstance(model, nn.Module) or not isinstance(mesh, Mesh | None):
            found = f"found a {type(model).__name__} and a {type(mesh).__name__}"
            hint = "pass an nn.Module, and slapo_zoo.Mesh(tp=..., rank=...) or no mesh"
            raise ScheduleError("create_schedule", "model, mesh", found, hint)
        if any(is_lazy(x) for x in (*model.parameters(), *model.buffers())):
            problem = "a lazy module (nn.LazyLinear, ...) has no shape yet"
            raise ScheduleError("create_schedule", "model", problem, "call the model once before")
        self.structure = structure_hash(model)  # before any directive
        self.state = State(model, mesh or Mesh(), RandomStream(seed))
        self.history: list[Step] = []
        self.landed: list[tuple[str, ...]] = []  # the modules that each step was applied to
        self.kernels: list[Any] = []  # Choice: kernels considered, and why (not) used

    @property
    def model(self) -> nn.Module:
        """Return the scheduled model: the object passed to Schedule, or a new one after `sch[""].trace()`."""
        return self.state.model

    @property
    def mesh(self) -> Mesh:
        """Return the Mesh of the model: sizes of tp, pp, dp and cp, and the coordinates of this rank."""
        return self.state.mesh

    def class_names(self) -> dict[str, str]:
        """Return the class name of every module, by path."""
        return {path: type(module).__name__ for path, module in self.state.modules.items()}

    def __getitem__(self, pattern: str | int) -> Selection:
        return Selection(self, str(pattern))

    def __contains__(self, path: str) -> bool:
        return path in self.state.modules

    def matching(self, pattern: str, what: object) -> list[str]:
        """Return the paths of the modules that `pattern` matches; when none does, ScheduleError names the nearest paths.

        Args:
            pattern: a path in which `*` stands for one segment and `**` for any number (also none); `:Class` may follow.
            what: the directive or method that is being applied, for the error message.
        """
        found = self.state.select(pattern)
        if not found:
            every = dict(self.model.named_modules(remove_duplicate=False))
            for name in select_paths(pattern, every):
                first = next(p for p, module in self.state.modules.items() if module is every[name])
                problem = f"{name!r} is a second name of the module {first!r}"
                raise ScheduleError(pattern, what, problem, f"select it by its first: {first!r}")
            near = nearest(pattern, self.state.modules) or [*filter(None, self.state.modules)][:5]
            raise ScheduleError(pattern, what, "matches no module", f"nearest paths: {near}")
        return found

    def do(self, pattern: str, directive: Directive) -> "Schedule":
        """Check `directive` at every module that `pattern` matches, then make and record the change; return self."""
        modules, state = self.state.modules, self.state
        sites = [Site(path, modules[path], state) for path in self.matching(pattern, directive)]
        for site in sites:
            check_reachable(modules, site.path, directive)
            if isinstance(site.module, torch.jit.ScriptModule):
                hint = "schedule the original Python module, and script only modules without directives"
                raise directive.fail(site, "a module of torch.jit.script cannot be changed", hint)
        directive.check_all(sites)
        for site in sites:
            directive.apply(site)
        self.history.append((pattern, directive))
        self.landed.append(tuple(site.path for site in sites))
        return self

    def _find(self, path: str, what: Any) -> Any:
        (path,) = self.matching(path, "find")
        if not isinstance(self.state.modules[path], GraphModule):
            self.do(path, PRIMITIVES["trace"]())
        return find(self.state.modules[path], path, what)

    def replay(self, history: "list[Step] | Schedule") -> "Schedule":
        """Apply to this model the changes in `history`, a list of (pattern, directive) or a Schedule; return self."""
        steps = history.history if isinstance(history, Schedule) else history
        for step in steps:
            is_pair = isinstance(step, list | tuple) and len(step) == 2
            if not (is_pair and isinstance(step[0], str) and isinstance(step[1], Directive)):
                problem = f"found {step!r:.80}, expected a pair (pattern, directive)"
                hint = "pass a Schedule, its history, or from_json(text)"
                raise ScheduleError("schedule", "replay", problem, hint)
        for pattern, directive in steps:
            self.do(pattern, directive)
        return self

    def to_json(self) -> str:
        """Return the list of changes as JSON; a change that holds a callable or module raises ScheduleError."""
        for pattern, directive in self.history:
            if reason := directive.local():
                hint = "use a registered name instead of an object, or do not save this schedule"
                raise ScheduleError(pattern, directive, f"cannot be written: {reason}", hint)
        steps = [[pattern, type(d).name, d.arguments()] for pattern, d in self.history]
        return json.dumps({"format": FORMAT, "steps": steps}, indent=1)

    def explain(self, batch: Mapping[str, Any] | None = None) -> Explanation:
        """Return, per module, the changes (directives) to it and the collectives that they cause in one training step.

        The step is a dry run on fake tensors: nothing is computed, sent or changed, and no process group is
        needed. Print the result, or read `.transfers` and `.totals()`. With pp > 1 the result covers the stages of this
        rank, without the sends between stages.

        Args:
            batch: keyword arguments of the model's forward, of which only shapes and dtypes matter; None makes
                a tiny batch for a model of `transformers`.

        Raises:
            ScheduleError: several stages of a pipeline share a block (ALBERT), or `batch` is None for a model
                that is not of `transformers`.
        """
        example: Any = {} if batch is None else batch
        if batch is None and self.mesh.world_size > 1:
            example = tiny_batch(self.model, "", "pass batch=, a dict of the forward's arguments")
        if not isinstance(example, Mapping):
            problem = f"found a {type(batch).__name__}, expected a dict of the forward's arguments"
            raise ScheduleError("explain", "batch", problem, "pass {name: tensor}")
        landed = [(paths, d) for paths, (_, d) in zip(self.landed, self.history, strict=True)]
        return explain(self.state, landed, example)

    def undo(self) -> "Schedule":
        """Undo the last change if it is of a kind that can be undone (a pipeline cut), and drop it from the history.

        Most kinds change the model in place, e.g. keep only a shard of a weight, and cannot be undone.

        Raises:
            ScheduleError: the history is empty, or the directive cannot be undone; the hint gives a way around.
        """
        if not self.history:
            hint = "apply a directive before undo()"
            raise ScheduleError("schedule", "undo", "no directive was applied yet", hint)
        pattern, directive = self.history[-1]
        if type(directive).undo is Directive.undo:
            hint = "start from a fresh model: Schedule(model, mesh).replay(sch.history[:-1])"
            problem = "the directive changed the model in place and cannot be undone"
            raise ScheduleError(pattern, directive, problem, hint)
        for path in self.landed[-1]:
            directive.undo(Site(path, self.state.modules[path], self.state))
        self.history.pop()
        self.landed.pop()
        return self

    def diff(self, other: "Schedule") -> str:
        """Return a unified diff of the changes made by this schedule and by `other`, one per line; '' if equal."""
        mine, theirs = (str(s).splitlines() for s in (self, other))
        return "\n".join(difflib.unified_diff(mine, theirs, "this", "other", lineterm="", n=1))

    def __str__(self) -> str:
        return "\n".join(f"sch[{pattern!r}].{directive}" for pattern, directive in self.history)


def from_json(text: str) -> list[Step]:
    """Return the list of (module pattern, directive) in `text`, JSON of `to_json`; ScheduleError if it is malformed."""
    try:
        document = json.loads(text)
    except (ValueError, TypeError) as error:
        raise ScheduleError("schedule", "JSON", str(error), UNCHANGED) from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        found = document.get("format") if isinstance(document, dict) else type(document).__name__
        problem = f"found format {found!r}, expected {FORMAT!r}"
        raise ScheduleError("schedule", "format", problem, UNCHANGED)
    steps = document.get("steps")
    if not isinstance(steps, list):
        problem = f"found {steps!r:.60}, expected a list of [pattern, primitive, arguments]"
        raise ScheduleError("schedule", "steps", problem, UNCHANGED)
    return [_step(i, step) for i, step in enumerate(steps)]


def _step(index: int, step: Any) -> Step:
    where = f"schedule: step {index}"
    kinds = [type(part) for part in step] if isinstance(step, list) else []
    if kinds != [str, str, dict]:
        problem = f"found {step!r:.80}, expected [pattern, primitive, arguments]"
        raise ScheduleError(where, "step", problem, UNCHANGED)
    pattern, name, arguments = step
    if name not in PRIMITIVES:
        hint = f"choose one of the registered: {sorted(PRIMITIVES)}"
        raise ScheduleError(where, name, "no such primitive", hint)
    cls: Any = PRIMITIVES[name]
    fields = {f.name: f.default is dataclasses.MISSING for f in dataclasses.fields(cls)}
    known = f"known: {sorted(fields)}"
    if unknown := sorted(set(arguments) - set(fields)):
        raise ScheduleError(where, name, f"unknown arguments {unknown}", f"remove them; {known}")
    if missing := [f for f, needed in fields.items() if needed and f not in arguments]:
        raise ScheduleError(where, name, f"missing arguments {missing}", f"add them; {known}")
    try:
        return pattern, cls(**{key: _tuples(value) for key, value in arguments.items()})
    except TypeError as error:
        raise ScheduleError(where, name, str(error), UNCHANGED) from None


def _tuples(value: Any) -> Any:
    """Return `value` from JSON with lists, also nested ones, turned into tuples, which the fields of directives are."""
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value
