"""`slapo-zoo verify`: does a schedule compute what the plain model computes?"""

from typing import Annotated, Any

import typer

from slapo_zoo.cli import arguments
from slapo_zoo.cli.arguments import Dp, Head, Model, Pp, SequenceParallel, Tp
from slapo_zoo.cli.readable_errors import say, stdout_for_json
from slapo_zoo.cli.waiting import waiting

AsJson = Annotated[bool, typer.Option("--json", help="verify.json, for programs.")]
WithCard = Annotated[str | None, typer.Option("--schedule", help="A card; none, zoo or auto: the zoo's own.")]  # fmt: skip


def verify(
    model: Model,
    tp: Tp = 1,
    pp: Pp = 1,
    dp: Dp = 1,
    sequence_parallel: SequenceParallel = False,
    dp_shard: arguments.DpShard = 1,
    zero_stage: arguments.ZeroStage = 3,
    pipeline_order: arguments.Order = "1f1b",
    stages_per_rank: arguments.StagesPerRank = None,
    checkpoint_ratio: arguments.CheckpointRatio = 0.0,
    checkpoint_policy: arguments.CheckpointPolicy = "",
    schedule: WithCard = None,
    auto_class: Head = None,
    full: Annotated[bool, typer.Option(help="The model as it is, not a small one.")] = False,
    layers: Annotated[bool, typer.Option(help="The true widths, a few layers at a time.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare the scheduled model with the plain one: outputs, every gradient, a step, dropout, files.

    All ranks are threads of one process on the CPU. By default a small model of the same family
    stands in, which takes seconds; exit status 1 says that something is wrong.
    """
    if full and layers:
        raise typer.BadParameter("--full holds all layers at once; choose one", param_hint="--layers")  # fmt: skip
    with stdout_for_json(as_json):
        from slapo_zoo.cards.resolve_card import load_card
        from slapo_zoo.hf import models as hf
        from slapo_zoo.verify.apart import verify_apart
        from slapo_zoo.verify.core import known_schedule
        from slapo_zoo.zoo.argument_values import config_of, usual_head

        config, head = config_of(model)
        own = schedule in (None, "zoo", "auto") and known_schedule(config, schedule or "zoo")
        program = None if own else load_card(str(schedule)).program
        named = hf.resolve_class(config, auto_class or usual_head(config, head)).__name__
        cls = program.model_class if program else named
        order = {"pipeline_order": pipeline_order, "stages_per_rank": stages_per_rank}
        shaped = {"sequence_parallel": sequence_parallel, "dp_shard": dp_shard, "zero_stage": zero_stage,
                  "checkpoint_ratio": checkpoint_ratio, "checkpoint_policy": checkpoint_policy}  # fmt: skip
        knobs = order if program else order | shaped
        if program:
            _refuse_beside_card(shaped)
        else:
            _require_mesh(config, cls, (tp, pp, dp), knobs)
        request = {
            "config": config.to_dict(), "cls": cls, "mesh": (tp, pp, dp), "quick": not full, "layers": layers,
            "program": program.to_bytes().decode() if program else None, "knobs": knobs,
            "folder": _folder(model) if full else None,
        }  # fmt: skip
        with waiting(f"verify {model} tp={tp} pp={pp} dp={dp}"):
            found = verify_apart(request)
    text = found.pop("text")
    say(as_json, found, text)
    raise typer.Exit(0 if found["verdict"] == "verified" else 1)


def _refuse_beside_card(given: dict[str, Any]) -> None:
    """The program of a card says these itself."""
    from slapo_zoo.errors import SlapoError
    from slapo_zoo.zoo.options import LoaderOptions

    usual = vars(LoaderOptions())
    for name, value in given.items():
        if value != usual[name]:
            flag = f"--{name.replace('_', '-')} {value}"
            hint = "leave it out, or leave out --schedule"
            raise SlapoError("verify", flag, "the card of --schedule says it", hint)


def _require_mesh(config: Any, cls: str, mesh: tuple[int, int, int], knobs: dict[str, Any]) -> None:
    """Raise for a mesh that the model cannot have: that is a mistake in the arguments, not a verdict."""
    import torch

    from slapo_zoo.model.dp.dp_shard import check_dp_shard
    from slapo_zoo.parallel.mesh import Mesh
    from slapo_zoo.zoo.outline import Outline

    check_dp_shard(Mesh(*mesh), knobs["dp_shard"], None, None)
    Outline(config, cls, Mesh(*mesh), torch.float32, **knobs)


def _folder(model: str) -> str | None:
    """The checkpoint whose weights are taken; a family has none."""
    from pathlib import Path

    return str(Path(model).absolute()) if Path(model).is_dir() else None
