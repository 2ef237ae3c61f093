"""Command `slapo-zoo verify`: checks that a model, sharded and changed by a schedule, computes what the plain one does."""

from pathlib import Path
from typing import Annotated, Any

import typer

from slapo_zoo.cli.arguments import (
    LAYOUT,
    Head,
    Model,
    command,
    sizes_text,
    table_of_cut,
    take_mesh,
)
from slapo_zoo.cli.waiting import waiting
from slapo_zoo.errors import MeshError

WithCard = Annotated[str | None, typer.Option("--schedule", help="A card; none, zoo or auto: the zoo's own schedule.")]  # fmt: skip
ORDER = ("pipeline_order", "stages_per_rank", "cp_attention")  # knobs that a card does not set


@command
def verify(
    model: Model,
    layout: Any,
    schedule: WithCard = None,
    auto_class: Head = None,
    full: Annotated[bool, typer.Option(help="Verify the full model, not a small one.")] = False,
    layers: Annotated[
        bool, typer.Option(help="Verify the full widths, a few layers at a time.")
    ] = False,
    exact: Annotated[
        bool, typer.Option(help="Compare training bit by bit with one process instead.")
    ] = False,
) -> Any:
    """Compare a sharded model with the plain one: outputs, gradients, a training step, dropout, saved files.

    The layout (--tp, --pp, --dp, --cp, ...) says how the model is sharded; ranks are threads of one process on the CPU.
    --schedule names a card (a published schedule: a folder or org/name@revision) to use in place of the built-in one,
    --auto-class the class of the model's head (default: the config's). By default a small model of the same family is
    compared, which takes seconds. Exit code 1 says that something differs by more than rounding errors.
    """
    if full and layers:
        raise typer.BadParameter("found --full too, which runs all layers at once; leave one of them out", param_hint="--layers")  # fmt: skip
    from slapo_zoo.hf import models as hf
    from slapo_zoo.verify.apart import verify_apart
    from slapo_zoo.verify.core import known_schedule
    from slapo_zoo.zoo.argument_values import config_of, usual_head
    from slapo_zoo.zoo.cards.resolve_card import load_card

    config, head = config_of(model)
    own = schedule in (None, "zoo", "auto") and known_schedule(config, schedule or "zoo")
    program = None if own else load_card(str(schedule)).program
    named = hf.resolve_class(config, auto_class or usual_head(config, head)).__name__
    cls = program.model_class if program else named
    mesh = take_mesh(layout)
    if mesh.cp > 1 and (exact or layers):
        flag = "--exact" if exact else "--layers"
        why = ": one process has no ranks that share a row" if exact else ""
        problem = f"not supported together with cp={mesh.cp}{why}"
        raise MeshError("verify", flag, problem, f"leave {flag} out, or use cp=1")
    sizes = mesh.tp, mesh.pp, mesh.dp
    if program:
        _refuse_beside_card(layout)
        layout = {name: layout[name] for name in ORDER}
        table_of_cut("verify", mesh, config, cls, layout)
    else:
        _require_mesh(config, cls, mesh, layout)
    layout |= {"cp": mesh.cp} if mesh.cp > 1 else {}
    if exact:
        return _same_bits(config, cls, sizes, layout, program)
    request = {
        "config": config.to_dict(), "cls": cls, "mesh": sizes, "quick": not full, "layers": layers,
        "program": program.to_bytes().decode() if program else None, "knobs": layout,
        "folder": str(Path(model).absolute()) if full and Path(model).is_dir() else None,  # a family has none
    }  # fmt: skip
    with waiting(f"verify {model} {sizes_text(mesh)}"):
        found = verify_apart(request)
    text = found.pop("text")
    return found, text, int(found["verdict"] != "verified")


def _same_bits(
    config: Any, cls: str, mesh: tuple[int, int, int], knobs: dict[str, Any], program: Any
) -> Any:
    """Train a small model on the mesh (tp, pp, dp) and in one process, for `--exact`. Return (data for --json, text,
    exit code: 1 if the loss, the gradient norm or a weight differs in any bit after a step, else 0). `knobs` are loader
    arguments; a `program`, the schedule of a card, is refused.
    """
    if program:
        raise typer.BadParameter("--exact runs the built-in schedule, not a card; leave one of them out", param_hint="--schedule")  # fmt: skip
    import transformers

    from slapo_zoo.hf import models as hf
    from slapo_zoo.model.load.exact_check import compare_meshes

    transformers.logging.disable_progress_bar()
    with waiting("train on the mesh and in one process"):
        found = compare_meshes(config, hf.resolve_class(config, cls), mesh, knobs)
    return found.document(), str(found), int(found.digests != found.of_one)


def _refuse_beside_card(given: dict[str, Any]) -> None:
    """Raise SlapoError if `given` (name of a flag --> value) sets an option that the card named by --schedule sets already."""
    from slapo_zoo.errors import SlapoError

    for name, value in given.items():
        if name not in ORDER and value != LAYOUT[name][1]:
            flag = f"--{name.replace('_', '-')} {value}"
            hint = "leave it out, or leave out --schedule"
            raise SlapoError("verify", flag, "the card given by --schedule sets this option", hint)


def _require_mesh(config: Any, cls: str, mesh: Any, knobs: dict[str, Any]) -> None:
    """Raise a SlapoError if the mesh and the other loader arguments `knobs` cannot shard the model with config `config`
    and class name `cls`; this is found out on the meta device, before a comparison is started that would fail.
    """
    import torch

    from slapo_zoo.zoo.outline import Outline

    table = table_of_cut("verify", mesh, config, cls, knobs)
    Outline(config, cls, mesh, torch.float32, schedule=table, **knobs)
