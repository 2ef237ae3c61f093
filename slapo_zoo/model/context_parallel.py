"""Checks when a model is loaded with cp > 1: errors for unsupported models and options, which say what to use."""

from typing import Any

from slapo_zoo.errors import ArchitectureError, MeshError
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.zoo.options import LoaderOptions
from slapo_zoo.zoo.schedule_source import kind_of
from slapo_zoo.zoo.table import ZOO, Table, load_tables

# argument --> (values that run with cp > 1, what to do with another)
BESIDE: dict[str, tuple[tuple[Any, ...], str]] = {
    "attention": ((None, "sdpa", "eager"), "use sdpa or eager"),
    "kernels": (("auto", "reference"), 'leave it out: cp runs with "reference"'),
    "checkpoint_policy": (("",), "leave it out: a recomputed block keeps nothing"),
    "activation_memory": ((None,), "use checkpoint_ratio="),
    "schedule": (("zoo", "auto", "table"), 'use schedule="zoo" or "auto"'),
    "target": (("torch", None), 'use target="torch"'),
}


def check_cp(where: str, mesh: Mesh, options: LoaderOptions) -> LoaderOptions:
    """Return the user's options; with cp > 1 a copy that takes no Triton kernels (`kernels="reference"`).

    Args:
        where: name of the load, for errors.
        mesh: mesh of the model.
        options: the user's options.

    Raises:
        MeshError: an option is not supported with cp > 1.
    """
    if mesh.size("cp") == 1:
        return options
    for name, (runs, hint) in BESIDE.items():
        value = getattr(options, name)
        kind = kind_of(value) if name == "schedule" else value
        if not any(kind == each for each in runs):
            what, problem = (
                f"{name}={value!r:.60}",
                f"not supported together with cp={mesh.cp}",
            )
            raise MeshError(where, what, problem, f"{hint}, or cp=1")
    if options.cp_attention == "ring" and options.attention == "eager":
        problem = (
            'not supported together with cp_attention="ring", which computes the scores itself'
        )
        hint = 'leave it out, or use cp_attention="gather"'
        raise MeshError(where, 'attention="eager"', problem, hint)
    return options.but(kernels="reference")


def require_cp_support(table: Table, cls: Any, config: Any) -> None:
    """Raise ArchitectureError unless the model class `cls` with this config is known to train right with cp > 1.

    `table` has the sharding rules of the family, and lists the classes whose tokens may be sharded over cp.
    """
    name, what = cls.__name__, "cp > 1"
    if table.positions_of(cls) is None:
        load_tables()
        known = sorted(each for other in ZOO.values() for each in other.cut_tokens)
        problem = f"{name} is not known to train right with tokens sharded over cp"
        raise ArchitectureError("zoo", what, problem, f"use cp=1; cp runs for {', '.join(known)}")
    if getattr(config, "token_dropout", False):
        problem = "found token_dropout=True, which needs all tokens of a row; a cp rank has some"
        raise ArchitectureError("zoo", what, problem, "pass token_dropout=False, or use cp=1")
