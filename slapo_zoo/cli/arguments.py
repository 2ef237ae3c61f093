"""Flags that several commands share (model, layout, device, `--json`), and start of local ranks."""

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from slapo_zoo.cli.readable_errors import stdout_for_json
from slapo_zoo.errors import MeshError

Model = Annotated[str, typer.Argument(help="A family (its default config), a folder, or a Hub id.")]
Head = Annotated[str | None, typer.Option("--auto-class", help="Head class, e.g. AutoModelForCausalLM.")]  # fmt: skip
Tp = Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel ranks.")]
Pp = Annotated[int, typer.Option("--pp", min=1, help="Pipeline-parallel ranks.")]
Dp = Annotated[int, typer.Option("--dp", min=1, help="Data-parallel replicas.")]
Cp = Annotated[int, typer.Option("--cp", min=1, help="Ranks that shard the tokens of each row.")]
SequenceParallel = Annotated[bool, typer.Option(help="Shard the tokens over tp too.")]
CheckpointRatio = Annotated[float, typer.Option(help="Share of the blocks that are recomputed, 0 to 1.")]  # fmt: skip
Order = Annotated[str, typer.Option(help="Pipeline order, by name.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.", metavar="NAME")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
MESH = ("tp", "pp", "dp", "cp")
POLICY = "What a recomputed block keeps: nothing, or save_matmuls, offload, sharded."
# flag of a layout --> its type and default, both those of the loader's option
LAYOUT: dict[str, tuple[Any, Any]] = {
    "tp": (Tp, 1), "pp": (Pp, 1), "dp": (Dp, 1), "cp": (Cp, 1),
    "sequence_parallel": (SequenceParallel, False), "checkpoint_ratio": (CheckpointRatio, 0.0),
    "dp_shard": (Annotated[int, typer.Option(min=1, help="Ranks of dp and cp that shard weights and states (ZeRO).")], 1),
    "zero_stage": (Annotated[int, typer.Option(min=1, max=3, help="ZeRO stage: 1, 2 or 3.")], 3),
    "pipeline_order": (Order, "1f1b"),
    "stages_per_rank": (Annotated[int | None, typer.Option(min=1, help="Stages per rank of an interleaved order.")], None),
    "checkpoint_policy": (Annotated[str, typer.Option(help=POLICY)], ""),
    "cp_attention": (Annotated[str, typer.Option(help="How attention sees the tokens of all cp ranks: gather, ulysses or ring.")], "gather"),
}  # fmt: skip


def command(
    work: Callable[..., Any], more: Mapping[str, tuple[Any, Any]] | None = None
) -> Callable[..., None]:
    """Wrap a function as a typer command, which prints what the function returns.

    `work` returns None, (data, text) or (data, text, status). The command prints the text, or with `--json` data as
    JSON; all other output then goes to stderr. The status is an exit code, or an error that is raised after printing. A
    parameter `layout` of `work` stands for the flags in LAYOUT (--tp, --pp, ...), whose values `work` gets as a dict.

    Args:
        work: the function; its docstring is the command's help.
        more: name --> (type, default) of further flags, which `work` takes as keywords.
    """
    own = inspect.signature(work).parameters
    flags: dict[str, tuple[Any, Any]] = {}
    for name, parameter in own.items():
        if parameter.kind is not parameter.VAR_KEYWORD:
            flags |= LAYOUT if name == "layout" else {name: (parameter.annotation, parameter.default)}  # fmt: skip
    flags |= {**(more or {}), "as_json": (AsJson, False)}

    @functools.wraps(work)
    def run(as_json: bool = False, **given: Any) -> None:
        if "layout" in own:
            given["layout"] = {name: given.pop(name) for name in LAYOUT}
        with stdout_for_json(as_json):
            outcome = work(**given)
        if outcome is None:
            return
        data, text, *status = outcome
        if as_json or text:
            text = json.dumps(data, indent=1, default=str) if as_json else text
            typer.echo(text)  # flushed here, where a closed pipe ends the command quietly
        if status:
            raise status[0] if isinstance(status[0], Exception) else typer.Exit(status[0])

    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(n, kind, default=d, annotation=a) for n, (a, d) in flags.items()]  # fmt: skip
    run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    run.__annotations__ = {name: kind for name, (kind, _) in flags.items()}
    return run


def take_mesh(layout: dict[str, Any], rank: int = 0) -> Any:
    """Remove tp, pp, dp and cp from `layout` (flag --> value); return a Mesh of these sizes with the coordinates of `rank`."""
    from slapo_zoo.parallel.mesh import Mesh

    return Mesh(**{name: layout.pop(name) for name in MESH}, rank=rank)


def sizes_text(mesh: Any) -> str:
    """Return the sizes of a mesh as text: "tp=2 pp=1 dp=1", followed by cp if it is used."""
    return " ".join(f"{name}={size}" for name, size in mesh.sizes.items())


def table_of_cut(where: str, mesh: Any, config: Any, cls: Any, layout: Mapping[str, Any]) -> Any:
    """Return the value of `from_pretrained(schedule=...)` for a model on `mesh`: "zoo", the family's built-in rules, if
    cp is 1; else a Table of these rules which also says how cp ranks get the positions of their tokens.

    If the built-in rules do not say this, a tiny model is run in a separate process to find out. `where` names the
    command for errors, `cls` names the model's class, `layout` has the flags (name --> value) except mesh sizes.

    Raises:
        SlapoError: the flags contradict each other or the mesh, or cp cannot shard the tokens of the model.
    """
    from slapo_zoo.hf import models as hf
    from slapo_zoo.model.context_parallel import check_cp, require_cp_support
    from slapo_zoo.model.dp.dp_shard import check_dp_shard
    from slapo_zoo.model.load.auto_schedule import zoo_table_for_cp
    from slapo_zoo.parallel.mesh import Mesh
    from slapo_zoo.zoo.options import LoaderOptions, check_knobs

    options = LoaderOptions(**layout)
    check_knobs(where, options)
    check_dp_shard(mesh, options.dp_shard, options.zero_stage)
    if mesh.size("cp") == 1:
        return "zoo"
    hf.register_models()
    cls = hf.resolve_class(config, cls)
    table = zoo_table_for_cp(config, cls, Mesh(), check_cp(where, mesh, options))
    require_cp_support(table, cls, config)
    return table


def data_parallel_size(tp: int, pp: int, dp: int | None, cp: int = 1) -> int:
    """Return the number of data-parallel replicas: `dp`, or for None the number of processes that a launcher has
    started divided by tp * pp * cp (1 without a launcher). MeshError is raised if tp * pp * dp * cp differs from the
    number of started processes.
    """
    from slapo_zoo.parallel.ranks.process_group import is_distributed_launch, world_size_of_launch
    from slapo_zoo.zoo.argument_values import mesh_sizes

    if not is_distributed_launch():
        return dp or 1
    return mesh_sizes(world_size_of_launch(), {"tp": tp, "pp": pp, "dp": dp, "cp": cp})["dp"]


def on_ranks(
    work: Callable[..., Any], world: int, given: tuple[Any, ...], device: str | None, what: str
) -> Any:
    """Run a function on all ranks, and return its result on this rank.

    Without a launcher such as torchrun, local ranks are started here, and rank 0's result is returned.

    Args:
        work: function that every rank calls.
        world: number of ranks.
        given: positional arguments of `work`.
        device: "cpu", "cuda", or None to choose.
        what: name of the command, for errors.
    """
    from slapo_zoo.parallel.ranks import killed_rank, launch, process_group

    if not process_group.is_distributed_launch():
        return work(*given) if world == 1 else launch.run_local(work, world, given, device=device)[0]  # fmt: skip
    process_group.init_distributed(device=device)
    with killed_rank.rank_guard(what):
        found = work(*given)
    process_group.shutdown_distributed()
    return found


def device_named(name: str) -> str | None:
    """Return the device for "cpu" or "cuda", a value of `--device`, or None for "auto"; MeshError for other names."""
    from slapo_zoo.zoo.argument_values import pick_device

    if name not in ("auto", "cpu", "cuda"):
        problem = "found no such device, expected auto, cpu or cuda"
        raise MeshError("--device", name, problem, "choose auto, cpu or cuda")
    return None if name == "auto" else str(pick_device(name))
