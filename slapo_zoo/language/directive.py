"""Base classes of the schedule language: `Directive` (one change of a module, as data), `Site` (the changed module) and
`State` (model, mesh and record of all changes).
"""

import dataclasses
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from slapo_zoo.errors import ScheduleError
from slapo_zoo.language.offload import Offloads, Pack
from slapo_zoo.language.tape import Tape
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.paths import select_paths
from slapo_zoo.parallel.placement import Placement
from slapo_zoo.parallel.rank_plan import RankPlan
from slapo_zoo.parallel.replaced import replaced
from slapo_zoo.parallel.rng.layout_independent_random import RandomStream
from slapo_zoo.parallel.token_cut import WAYS


@dataclass
class Placed:
    """Record of how a tensor is sharded: `placement` (axis, and which indices each rank holds), `directive` (the
    `shard` that did it) and `shape` (of the unsharded tensor).
    """

    placement: Placement
    directive: "Directive"
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ForwardContext:
    """Settings of one forward call of the model, read by the hooks and forwards that the schedule installed in modules.

    Args:
        tokens_divided: hidden states [B, S, D] are sharded over tp along the tokens S (sequence parallelism).
        real_tokens: bool [B, S], True at tokens that are no padding; None where padding is computed too.
        tape: records the collectives during a dry run on fake tensors; None in a real forward.
        is_call: True while a call of the model or a submodule runs: it has gathered the weights and chosen the dropout
            masks, so that calls of submodules within it do not do so again.
        cut: how the tokens are sharded over cp (a `TokenCut`); None where the rank holds all tokens.
    """

    tokens_divided: bool = False
    real_tokens: Tensor | None = None
    tape: Tape | None = None
    is_call: bool = False
    cut: Any = None


@dataclass
class State:
    """State that the directives (changes to modules) of one schedule share: `model`, `mesh`, `random` (source of
    dropout masks), and records of changes, e.g. `placed` (name of a tensor --> how it is sharded).
    """

    model: nn.Module
    mesh: Mesh
    random: RandomStream = field(default_factory=RandomStream)
    placed: dict[str, Placed] = field(default_factory=dict)
    cuts: list[tuple[str, int]] = field(default_factory=list)
    partial_gradients: set[str] = field(default_factory=set)
    checkpointed: list[str] = field(default_factory=list)
    recomputes_in_eval: bool = False  # so that `Verify` sees recomputations
    applied: dict[str, set[str]] = field(default_factory=dict)
    shared: dict[Any, Any] = field(default_factory=dict)
    sequence_gradients: set[str] = field(default_factory=set)
    sequence_parallel: bool = False  # some directive shards tokens
    unpads: bool = False  # some kernel skips padding
    compute_dtype: torch.dtype | None = None  # None: that of the parameters
    forward: ForwardContext = ForwardContext()  # of the running forward
    offloads: Offloads = field(default_factory=Offloads)
    keeps: list[Pack] = field(default_factory=list)  # pack functions of the running contexts
    plan: RankPlan | None = None  # set by the zoo's loader: see `plan_of`
    sums: list[Any] = field(default_factory=list)  # handles of the hooks of `sum_over_tp`
    positions: str = ""  # with cp > 1: value in `Table.cut_tokens`
    body: Any = None  # `cut_body.Body`, with cp > 1 and a head that reads whole rows
    cp_attention: str = WAYS[0]  # with cp > 1: how attention sees all tokens
    # called in a forward; returns a function that makes the contexts of its recomputation
    recomputing: Callable[[], Callable[[], AbstractContextManager]] = lambda: nullcontext

    def __post_init__(self):
        self.random.copy = self.mesh.coord("batch")
        self.index()

    def within(self, forward: ForwardContext) -> AbstractContextManager[None]:
        """Context of one forward of the model, or its recomputation, in which the schedule's hooks read `forward`."""
        return replaced(self, "forward", forward)

    def index(self) -> None:
        """Fill `modules` (path --> module) and `owners` (id of a parameter --> its names, several when tied) anew."""
        self.modules = dict(self.model.named_modules())
        self._selected: dict[str, tuple[int, list[str]]] = {}
        self._held: dict[int, list[tuple[dict, str]]] = {}  # id of a module --> where it is held
        self.owners: dict[int, list[str]] = {}
        for path, module in self.modules.items():
            for name, child in module._modules.items():
                self._held.setdefault(id(child), []).append((module._modules, name))
            for name, tensor in module._parameters.items():
                if tensor is not None:
                    self.owners.setdefault(id(tensor), []).append(join(path, name))

    def put(self, path: str, new: nn.Module) -> None:
        """Replace the module at `path`, "" for the model, by `new` in every parent that holds it. After one or several
        calls, the caller must call `self.index()`, which lists modules anew. KeyError if there is no module at `path`.
        """
        self.model = self.model if path else new
        for children, name in self._held.get(id(self.modules[path]), ()):
            children[name] = new

    def forget(self, path: str, new: nn.Module) -> None:
        """Remove all records (shards, recomputation, ...) of the module at `path` and below, before `new` replaces it.

        Records of submodules and tensors that `new` also contains are kept, under their names in `new`.
        """
        parts = (*new.named_modules(), *new.named_parameters(), *new.named_buffers())
        held = {id(part): join(path, name) for name, part in parts}
        record: dict[str, Any]
        for record in (self.placed, self.applied):
            for name in subtree(path, list(record)):
                value, here = record.pop(name), held.get(id(self._at(name)))
                record.update({} if here is None else {here: value})
        for names in (self.partial_gradients, self.sequence_gradients):
            for name in subtree(path, list(names)):
                names.remove(name)
                names.update(filter(None, [held.get(id(self._at(name)))]))
        lost = [p for p in subtree(path, self.checkpointed) if id(self._at(p)) not in held]
        self.checkpointed[:] = [p for p in self.checkpointed if p not in lost]

    def _at(self, name: str) -> Any:
        """Return the module, parameter or buffer of the model at the path `name`; None if there is none."""
        path, _, leaf = name.rpartition(".")
        holder: Any = self.modules.get(path)
        return self.modules[name] if name in self.modules else getattr(holder, leaf, None)

    def select(self, pattern: str) -> list[str]:
        """Return the paths of the modules that match a pattern, e.g. `h.*.mlp`, or `**:Linear` (by class), in model order."""
        if pattern in self.modules:  # names in an nn.ModuleDict may have `:` and `*`
            return [pattern]
        glob, _, class_name = pattern.partition(":")
        size, found = self._selected.get(glob, (-1, []))
        if size != len(self.modules):  # not cached, or a directive has added modules
            found = select_paths(glob, self.modules)
            self._selected[glob] = len(self.modules), found
        if not class_name:
            return list(found)
        return [path for path in found if type(self.modules[path]).__name__ == class_name]

    def set_parameter(self, old: Tensor, new: nn.Parameter) -> list[str]:
        """Replace the parameter `old` by `new` in all modules, tied ones too; return all full names of `new`."""
        names = self.owners.pop(id(old))
        notes = {key: value for key, value in old.__dict__.items() if key[0] != "_"}  # annotate()
        for key in notes.keys() - new.__dict__.keys():
            setattr(new, key, notes[key])
        for name in names:
            path, _, leaf = name.rpartition(".")
            self.modules[path]._parameters[leaf] = new
        self.owners[id(new)] = names
        return names


def join(path: str, name: str) -> str:
    """Return `path` and `name` joined by a dot, or `name` alone if `path` is the root ``''``."""
    return f"{path}.{name}" if path else name


@dataclass(frozen=True)
class Site:
    """One module to which a change (a directive) is applied: path, the module itself, and the state of the schedule."""

    path: str
    module: nn.Module
    state: State

    @property
    def mesh(self) -> Mesh:
        """Return the mesh of the schedule, i.e. the sizes of tp, pp, dp and cp with this rank's coordinates."""
        return self.state.mesh

    def group(self, directive: Any) -> Any:
        """Return this rank's process group along `directive.mesh_dim`, a mesh dim; None when that dim has size 1.

        In a dry run (a step on fake tensors) the group sends nothing: its collectives are recorded on the run's Tape.
        """
        group, tape = self.mesh.group(directive.mesh_dim), self.state.forward.tape
        if tape is None:
            return group
        return tape.listen(group, directive.mesh_dim, self.path, directive)

    def name(self, tensor_name: str) -> str:
        """Return the full name of a parameter or buffer of this module, e.g. `h.0.mlp.weight` for `weight`."""
        return join(self.path, tensor_name)

    def tensor(self, tensor_name: str) -> Tensor | None:
        """Return this module's own parameter or buffer `tensor_name`, e.g. "weight"; None if the module has none."""
        found = self.module._parameters.get(tensor_name)
        return found if found is not None else self.module._buffers.get(tensor_name)

    def tensor_names(self) -> list[str]:
        """Return the names of the parameters and buffers that this module itself holds, without its children's."""
        return [*self.module._parameters, *self.module._buffers]

    def placed(self, tensor_name: str) -> Placed | None:
        """Return a record (placement, `shard` directive, unsharded shape) of how this module's parameter or buffer
        `tensor_name` is sharded; None if it is not sharded, or does not exist.
        """
        return self.state.placed.get(self.name(tensor_name))


# Declared type of a field --> (types that its value must not have, what is expected); bool passes as int.
UNLIKE: dict[Any, tuple[tuple[type, ...], str]] = {
    int: ((str, float, list, tuple, dict, type(None)), "an integer"),
    str: ((int, float, list, tuple, dict, type(None)), "a string"),
    bool: ((str, float, list, tuple, dict, type(None)), "True or False"),
    tuple[int, ...]: ((str, int, float, dict, type(None)), "a list of integers"),
}


class Directive:
    """Base class of all primitives, i.e. kinds of change to one module (`shard`, `sync`, `checkpoint`, ...).

    `check` only reads the model; `apply` runs afterwards and changes the module."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        """Raise TypeError when a field declared as int, str, bool or list has a value of another type, e.g. `axis="0"`."""
        for f in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]
            value, (unlike, want) = getattr(self, f.name), UNLIKE.get(f.type, ((), ""))
            if isinstance(value, unlike):
                raise TypeError(f"{type(self).name}(): {f.name}: found {value!r}, expected {want}")

    @classmethod
    def of(cls, *args: Any, **kwargs: Any) -> "Directive":
        """Construct the directive from the arguments of `sch[path].<name>(...)`; a subclass may override this."""
        return cls(*args, **kwargs)

    @classmethod
    def called(cls, path: str, args: tuple, kwargs: dict[str, Any]) -> "Directive":
        """Construct the directive that `sch[path].<name>(*args, **kwargs)` asks for, <name> being that of this class,
        by the method `of`. Raise ScheduleError, which names `path`, if the arguments do not fit.
        """
        try:
            return cls.of(*args, **kwargs)
        except TypeError as error:
            problem = str(error).replace(f"{cls.__name__}.__init__()", f"{cls.name}()")
            hint = f"call {cls.name}{signature(cls)}".removesuffix(" -> None")
            raise ScheduleError(path or "(the model)", cls.name, problem, hint) from None

    def check(self, site: Site) -> None:
        """Raise ScheduleError if the directive cannot be applied to the module of `site`; change nothing."""

    def check_all(self, sites: list[Site]) -> None:
        """Raise ScheduleError if `check` fails at one of the modules `sites`; a subclass may also compare these modules."""
        for site in sites:
            self.check(site)

    def apply(self, site: Site) -> None:
        """Change the module of `site`; this is called only after `check` has passed."""
        raise NotImplementedError(f"{type(self).__name__} must define apply(site)")

    def undo(self, site: Site) -> None:
        """Undo `apply` at the module of `site`; raise NotImplementedError unless a subclass (a pipeline cut) overrides this."""
        raise NotImplementedError(f"{self} cannot be undone: begin again with a new model")

    def local(self) -> str:
        """Return why JSON cannot hold this directive (e.g. an argument is a local function); '' if it can."""
        for name, value in self.arguments().items():
            if name == "subgraph" and not isinstance(value, str):
                live = "holds nodes of a graph in memory, but JSON only a regex over module names"
                return f"{name} {live}"
            if callable(value) or isinstance(value, nn.Module):
                return f"{name}={value!r} is a Python object, which JSON cannot hold"
        return ""

    def arguments(self) -> dict[str, Any]:
        """Return {name: value} of those arguments of the directive that differ from their defaults, in order."""
        fields = dataclasses.fields(self)  # pyright: ignore[reportArgumentType]
        return {f.name: getattr(self, f.name) for f in fields if getattr(self, f.name) != f.default}

    def fail(self, site: Site, problem: str, hint: str = "") -> ScheduleError:
        """Return a ScheduleError (path of `site`, this directive, problem, hint what to do); the caller raises it."""
        return ScheduleError(site.path or "(the model)", self, problem, hint)

    def __str__(self) -> str:
        shown = {n: tree_map_only(Tensor, lambda x: x.shape, v) for n, v in self.arguments().items()}  # fmt: skip
        arguments = ", ".join(f"{name}={value!r}" for name, value in shown.items())
        return f"{type(self).name}({arguments})"  # self.name may be an argument of the primitive


PRIMITIVES: dict[str, type[Directive]] = {}
D = TypeVar("D", bound=Directive)


def primitive(name: str) -> Callable[[type[D]], type[D]]:
    """Return a decorator that registers a Directive class under `name`, so that `sch[pattern].<name>(...)` works."""

    def register(cls: type[D]) -> type[D]:
        if name in PRIMITIVES:
            taken = f"the name is already registered by {PRIMITIVES[name]!r}"
            raise ScheduleError("primitive", name, taken, "choose another name")
        cls.name = name
        cls.__repr__ = cls.__str__  # a dataclass repr hides the primitive's name
        PRIMITIVES[name] = cls
        return cls

    return register


def subtree(path: str, paths: Iterable[str]) -> list[str]:
    """Return those module paths in `paths` that equal `path` or begin with it, as `h.0.mlp` begins with `h.0`."""
    return [p for p in paths if not path or p == path or p.startswith(path + ".")]
