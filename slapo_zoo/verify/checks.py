"""The remaining checks: dropout, collectives, and the files that are saved."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from slapo_zoo.verify.compare import FLOOR, Comparison, Tolerance, largest_of, replicas
from slapo_zoo.verify.runs import RankResult, tensors_of
from slapo_zoo.verify.subject import Subject
from slapo_zoo.zoo.survey import survey

DROPOUT = 0.2


def dropout(into: Comparison, found: Sequence[RankResult], near: Tolerance) -> None:
    """Check that with dropout the mesh computes what the scheduled model computes on one rank.

    The masks are drawn by us for every layout alike, so loss and gradients are those of one rank.
    """
    truth, largest = near.truth, largest_of(near.truth.grads)
    errors = [near.own_error(lambda r, n=name: r.grads[n]) for name in truth.grads]
    # the error of one number may be small by luck: gradients tell how far rounding is amplified
    scale = abs(truth.loss) * max(errors, default=0.0) / (largest or 1.0) / FLOOR
    for rank, result in enumerate(found):
        near.check(into, "dropout", "loss", result.loss, lambda r: r.loss, scale, rank)
    for name in sorted(truth.grads.keys() & found[0].grads.keys()):
        near.check(into, "dropout", name, found[0].grads[name], lambda r, n=name: r.grads[n], largest)  # fmt: skip
    replicas(into, found, "dropout")  # those that drop differently come apart


def predicted(subject: Subject) -> dict[str, int] | None:
    """Collectives over tp in one step of one tp rank, all stages together; None where unknown."""
    outline = subject.outline()
    if outline.state.checkpointed or subject.sizes[0] == 1:
        return None
    rows = subject.rows_per_rank // subject.micro_batches
    counts: dict[str, int] = {}
    for row in survey(outline, rows, subject.tokens).traffic:
        if row.mesh_dim == "tp" and row.phase in ("forward", "backward"):
            counts[row.kind] = counts.get(row.kind, 0) + row.count * subject.micro_batches
    return counts


def collective_counts(
    into: Comparison, found: Sequence[RankResult], want: Mapping[str, int] | None
) -> None:
    """Check that the collectives that ran are those of `slapo-zoo show` and `schedule.explain`."""
    if want is None:
        return
    for tp_coord in sorted({result.coords[0] for result in found}):
        mine = [r for r in found if r.coords[0] == tp_coord and r.coords[2] == 0]
        into.did("collectives")
        total = {k: sum(r.collectives.get(k, 0) for r in mine) for k in sorted({*want, *(k for r in mine for k in r.collectives)})}  # fmt: skip
        if any(total[kind] != want.get(kind, 0) for kind in total):
            problem = f"found {total}, predicted {dict(want)}"
            into.note("collectives", "over tp in one step", problem, tp_coord)


def files(into: Comparison, folder: Path, subject: Subject, result: RankResult) -> None:
    """Plain `transformers` loads what was saved: every tensor there, bit for bit."""
    try:
        plain = subject.cls.from_pretrained(folder, dtype=torch.float32)
    except Exception as error:
        into.note("files", "from_pretrained", f"{type(error).__name__}: {error}")
        return
    saved = dict(plain.named_parameters())
    for name, want in result.weights.items():
        into.did("files")
        if name in saved and not torch.equal(saved[name], want):
            into.note("files", name, "the saved tensor is another one than was trained")
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            if not all(torch.isfinite(opened.get_tensor(key).float()).all() for key in opened.keys()):  # noqa: SIM118  # fmt: skip
                into.note("files", file.name, "it holds NaN or infinity")
    with torch.no_grad():
        tensors_of(plain.eval()(**subject.batch()))


CHECKS: dict[str, str] = {
    "outputs": "forward outputs in eval mode, on every rank",
    "loss": "loss of a training step, on every rank",
    "gradients": "every gradient, and the global norm",
    "optimizer step": "every weight after one AdamW step",
    "replicas": "what several ranks hold is the same, bit for bit",
    "ties": "tied weights are one tensor after the step",
    "dropout": "with dropout, loss and gradients are those of one rank",
    "collectives": "as many over tp as predicted",
    "files": "plain transformers loads what was saved, bit for bit",
}
