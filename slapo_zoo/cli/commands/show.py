"""Command `slapo-zoo show`: prints how a model is sharded, and what each rank holds and sends."""

from typing import Annotated, Any

import typer

from slapo_zoo.cli.arguments import (
    Device,
    Head,
    Model,
    command,
    device_named,
    sizes_text,
    table_of_cut,
    take_mesh,
)

Rows = Annotated[int, typer.Option(min=1, help="Rows of a micro-batch.")]
Tokens = Annotated[int | None, typer.Option(min=1, help="Tokens per row; default: 128, or what the model takes.")]  # fmt: skip
Kernels = Annotated[list[str] | None, typer.Option(help="auto, reference, or the names of kernels.")]  # fmt: skip
OneRank = Annotated[int | None, typer.Option(min=0, help="Print only the plan of this rank: tensors, gradient all-reduces, random draws.")]  # fmt: skip


@command
def show(
    model: Model,
    layout: Any,
    auto_class: Head = None,
    batch_size: Rows = 1,
    seq_len: Tokens = None,
    kernels: Kernels = None,
    device: Device = "auto",
    rank: OneRank = None,
) -> Any:
    """Print how a layout (--tp, --pp, ...) shards a model: changes to modules, shapes per rank, bytes, collectives;
    with --rank, only tensors, gradient all-reduces and random draws of that rank. --auto-class names the head's class.
    """
    import torch

    from slapo_zoo.cli.training.checks import row_length
    from slapo_zoo.weights.ledger import filled
    from slapo_zoo.zoo.argument_values import config_of, pick_device
    from slapo_zoo.zoo.outline import Outline
    from slapo_zoo.zoo.survey import survey

    config, head = config_of(model)
    asked, dtype = kernels or ["auto"], config.dtype or torch.float32
    mesh = take_mesh(layout, rank or 0)
    table = table_of_cut("show", mesh, config, auto_class or head, layout)
    asked = asked if mesh.cp == 1 else ["reference"]
    outline = Outline(
        config, auto_class or head, mesh, dtype, **layout, schedule=table,
        kernels=asked[0] if len(asked) == 1 else asked, device=pick_device(device_named(device)),
    )  # fmt: skip
    if rank is not None:
        return {"rank": rank, "plan": str(outline.plan)}, filled(str(outline.plan))
    seq_len = seq_len or row_length(None, config)
    found = survey(outline, batch_size, seq_len)
    what = f"{outline.cls.__name__}, {dtype}, {batch_size} x {seq_len}: {sizes_text(mesh)}"
    return as_data(found), _text(found, what)


def as_data(found: Any) -> dict[str, Any]:
    """Return `found`, a `Survey` (results of a dry run), as a dict for `--json`: "program" (changes to modules),
    "tensors" (shapes), "ranks" (bytes), "total_parameters", "collectives", "kernels", "tunable" (options for a search).
    """
    steps = found.outline.schedule.history
    return {
        "program": [[pattern, str(directive)] for pattern, directive in steps],
        "tensors": {
            name: {"shape": shape, "per_rank": local, "stages": stages}
            for name, (shape, local, stages) in found.shapes.items()
        },
        "ranks": [vars(rank) for rank in found.ranks],
        "total_parameters": found.total_parameters,
        "collectives": [row._asdict() for row in found.traffic],
        "kernels": [vars(choice) for choice in found.outline.schedule.kernels],
        "tunable": found.outline.table.tries(found.outline.cls),
    }


def _text(found: Any, title: str) -> str:
    from slapo_zoo.weights.ledger import as_table, filled, human

    whole = found.total_parameters
    shapes = [(name, list(shape), " ".join(dict.fromkeys(str(list(s)) for s in local)), " ".join(map(str, stages)))
              for name, (shape, local, stages) in _without_repeats(found)]  # fmt: skip
    ranks = [(r.stage, r.tp_coord, f"{r.parameters:,}", f"{r.parameters / whole:.3f}", human(r.bytes))
             for r in found.ranks]  # fmt: skip
    traffic = [(t.kind, t.mesh_dim, t.phase, t.count, human(t.bytes)) for t in found.traffic]
    kernels = [(k.kernel, k.pattern, "yes" if k.accepted else "no", k.reason)
               for k in found.outline.schedule.kernels]  # fmt: skip
    knobs = [(name, " ".join(str(value) or "none" for value in values))
             for name, values in found.outline.table.tries(found.outline.cls).items()]  # fmt: skip
    tables = (
        (("tensor", "unsharded", "per tp rank", "stages"), shapes),
        (("stage", "tp", "parameters", "share", "bytes"), ranks),
        (("collective", "mesh dim", "in a micro-batch", "count", "bytes"), traffic),
        (("kernel", "modules", "used", "reason"), kernels), (("option", "values for tune"), knobs),
    )  # fmt: skip
    lines = [filled(f"{title}\n{found.outline.schedule}\n"), *(as_table("", *each) for each in tables)]  # fmt: skip
    return "\n".join(lines)


def _without_repeats(found: Any) -> list[tuple[str, Any]]:
    """Return (name, (unsharded shape, shape on each tp rank, pipeline stages that hold it)) of the weights in `found`.

    `found` is a dry run by `survey`. Weights of equal shape in several blocks are one entry, `*` for the block number.
    """
    rows: dict[str, list[Any]] = {}
    for name, (shape, local, stages) in found.shapes.items():
        short = ".".join("*" if part.isdigit() else part for part in name.split("."))
        row = rows.setdefault(f"{short} {shape}", [short, shape, local, []])
        row[3] = sorted({*row[3], *stages})
    return [(short, (shape, local, stages)) for short, shape, local, stages in rows.values()]
