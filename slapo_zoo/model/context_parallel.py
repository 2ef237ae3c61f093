"""Checks at the load of a model with cp > 1 (tokens sharded over ranks): what does not run with cp raises an error."""

from collections.abc import Iterable
from typing import Any

from slapo_zoo.errors import ArchitectureError, CardError, MeshError
from slapo_zoo.hf.attention import ATTRIBUTE
from slapo_zoo.language.schedule import Schedule, Step
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.zoo.options import LoaderOptions
from slapo_zoo.zoo.schedule_source import kind_of
from slapo_zoo.zoo.table import ZOO, Table, load_tables

# argument --> (values that run with cp > 1, what to do with another)
BESIDE: dict[str, tuple[tuple[Any, ...], str]] = {
    "attention": ((None, "sdpa", "eager"), "use sdpa or eager"),
    "kernels": (("auto", "reference"), 'leave kernels= out: cp runs with "reference"'),
    "checkpoint_policy": (("",), "leave checkpoint_policy= out: a recomputed block keeps nothing"),
    "activation_memory": ((None,), "use checkpoint_ratio="),
    "schedule": (("zoo", "auto", "table", "card"), 'use schedule="zoo", "auto" or a card'),
    "target": (("torch", None), 'use target="torch"'),
}
# (primitive, argument) of a directive --> the argument of the loader that has the same effect
SAME_AS = {
    ("core_attention", "backend"): "attention", ("replace", "new"): "kernels",
    ("checkpoint", "policy"): "checkpoint_policy", ("checkpoint", "offload"): "checkpoint_policy",
}  # fmt: skip


def check_cp(where: str, mesh: Mesh, options: LoaderOptions) -> LoaderOptions:
    """Check the user's options if cp > 1; return a copy that takes no Triton kernels (`kernels="reference"`).

    Args:
        where: name of the running call ("from_pretrained"), for errors.
        mesh: mesh of the model.
        options: the user's options; with cp=1 they are returned as they are.

    Raises:
        MeshError: an option is not supported with cp > 1.
    """
    if mesh.size("cp") == 1:
        return options
    for name, (runs, hint) in BESIDE.items():
        value = getattr(options, name)
        kind = kind_of(value) if name == "schedule" else value
        if not any(kind == each for each in runs):
            raise refusal(where, f"{name}={value!r:.60}", mesh, hint)
    if options.cp_attention == "ring" and options.attention == "eager":
        problem = 'not supported with cp_attention="ring", which computes the scores itself'
        hint = 'leave attention= out, or use cp_attention="gather"'
        raise MeshError(where, 'attention="eager"', problem, hint)
    return options.but(kernels="reference")


def refusal(where: str, what: str, mesh: Mesh, hint: str = BESIDE["schedule"][1]) -> MeshError:
    """Return a MeshError which says that in the call `where` (its name) the option `what`, as text, does not run with
    cp > 1. `hint` says what to do instead.
    """
    problem = f"not supported together with cp={mesh.cp}"
    return MeshError(where, what, problem, f"{hint}; or use cp=1")


def check_steps(steps: Iterable[Step], cp: int, cp_attention: str) -> None:
    """Raise CardError if a published schedule (card) has a directive that cannot run with cp > 1, e.g. a Triton kernel.

    Args:
        steps: (path pattern, directive) pairs of the card; a directive is a change that the schedule makes to modules.
        cp: number of cp ranks; with 1 nothing is checked.
        cp_attention: how attention sees the tokens of all cp ranks: "gather", "ring" or "ulysses".
    """
    for pattern, directive in steps if cp > 1 else ():
        for name, value in directive.arguments().items():
            option = SAME_AS.get((type(directive).name, name))
            ring = (cp_attention, value) == ("ring", "eager")
            if option and (value not in BESIDE[option][0] or ring):
                problem = f"not supported together with cp={cp}" + ring * ' and cp_attention="ring"'
                hint = f"load the card with cp=1{' or another cp_attention' * ring}, or choose a card without it"
                raise CardError("card", f"sch[{pattern!r}].{directive}", problem, hint)


def require_core_attention(sch: Schedule, table: Table) -> None:
    """Raise CardError if a schedule for cp > 1 lacks the directive `core_attention` at an attention of the model.

    Without this directive, which lets attention see the tokens of all cp ranks, attention sees one rank's tokens.
    `table` has the sharding rules of the model family, which list the attention modules.
    """
    seams = [
        p for p, rule in table.rows(sch.model) if any(d.name == "core_attention" for d in rule)
    ]
    for path in (path for pattern in seams for path in sch[pattern].paths):
        if f"{path}.{ATTRIBUTE}" not in sch.state.modules:
            problem = f"the card has no core_attention for this module: with cp={sch.mesh.cp} attention would see one rank's tokens only"
            hint = "use cp=1 or another card; whoever writes the card adds sch[...].core_attention(num_heads=...)"
            raise CardError("card", path, problem, hint)


def require_cp_support(table: Table, cls: Any, config: Any) -> None:
    """Raise ArchitectureError if the model class `cls` or its `config` does not support cp > 1. `table`, the sharding
    rules of the model family, lists the classes that do. A config with `token_dropout` does not.
    """
    name, what = cls.__name__, "cp > 1"
    if table.positions_of(cls) is None:
        load_tables()
        known = sorted(each for other in ZOO.values() for each in other.cut_tokens)
        problem = "the class is not known to train right with tokens sharded over cp"
        raise ArchitectureError(name, what, problem, f"use cp=1; cp runs for {', '.join(known)}")
    if getattr(config, "token_dropout", False):
        problem = "the config's token_dropout=True needs all tokens of a row on one rank"
        raise ArchitectureError(name, what, problem, "pass token_dropout=False, or use cp=1")
