"""A derived table against the plain model: a tiny one, every rank a thread of this process."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from slapo_zoo.errors import SlapoError
from slapo_zoo.model.loader import Source, load_checkpoint
from slapo_zoo.model.step.runtime import tokens_divide
from slapo_zoo.parallel.ranks.emulation import emulate
from slapo_zoo.verify.runs import digests
from slapo_zoo.verify.specimen import Specimen, experts, silence, tensors
from slapo_zoo.zoo.options import LoaderOptions
from slapo_zoo.zoo.table import Table

TIMEOUT_S, RATE = 60.0, 0.3
# Norms and rotary tables are float32 in any model; a wrong division is off by 1e-1.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3}


def probe(subject: Specimen, table: Table | None, sizes: tuple[int, int, int], **knobs: Any) -> str:
    """Describe what differs between the scheduled and the plain model, or return "".

    Args:
        subject: the plain one.
        table: under test; None takes the zoo's.
        sizes: of tp, pp and dp.
        knobs: of `from_pretrained`.
    """
    rates = dict.fromkeys(subject.dropouts, RATE)
    knobs = {"schedule": "zoo" if table is None else table, **knobs}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ranks = emulate(_rank, subject, sizes, knobs, mesh=sizes, timeout_s=TIMEOUT_S)
            wanted = subject.outputs if sizes[1] == 1 else subject.uncached
            problem = _compare(subject, ranks, wanted)
            return problem or (_dropped(subject, sizes, knobs, rates) if subject.grads else "")
    except Exception as error:
        text = str(error).strip().partition("\n")[0]
        return text if isinstance(error, SlapoError) else f"{type(error).__name__}: {text}"


def _rank(subject: Specimen, sizes: tuple[int, int, int], knobs: Any, rates: Any = None) -> Any:
    """Return outputs, loss and gradients of this rank, and its shards; no outputs where dropout is on."""
    (tp, pp, dp), outputs = sizes, {}
    options = LoaderOptions(
        tp=tp, pp=pp, dp=dp, seed=0, auto_class=subject.cls, dtype=subject.dtype,
        **{"kernels": "reference", **knobs},
    )  # fmt: skip
    changes = {**experts(subject.config), **(rates or {})}
    model = load_checkpoint("verify", options, Source(str(subject.folder), changes=changes))
    if rates is None:
        silence(model)
        with torch.no_grad():
            outputs = tensors(model.eval()(**subject.batch))
    if not subject.grads:
        return outputs, 0.0, {}, {}
    for module in model.modules() if rates is not None and not subject.seen.draws else ():
        if isinstance(module, nn.Dropout):
            module.p = RATE  # what the config leaves out must not part replicas either
    rows = len(next(iter(subject.batch.values()))) // dp
    start = model.mesh.coord("dp") * rows
    part = {k: v[start : start + rows] for k, v in subject.batch.items()}
    table = model._slapo.table
    whole = table.batch_statistics or table.is_undivided(model.unscheduled_class)
    loss = float(model.train().train_step(part, micro_batches=1 if whole else 2))
    if knobs.get("sequence_parallel") and not tokens_divide(model, part):
        problem = "its batch has no tokens that tp ranks could divide: it was not seen to be right"
        raise SlapoError("verify", "sequence_parallel", problem, "leave sequence_parallel out")
    return outputs, loss, model.consolidated_state_dict(grads=True), digests(model, grads=True)


def _compare(subject: Specimen, ranks: list[Any], wanted: dict[str, Tensor]) -> str:
    """Outputs and loss on every rank, all gradients, and that replicas are alike bit for bit."""
    tolerance = TOLERANCE[subject.dtype]
    for rank, (outputs, loss, *_) in enumerate(ranks):
        for name, want in wanted.items():
            if name not in outputs:
                return f"rank {rank} returns no {name}"
            if _off(outputs[name], want, tolerance):
                return f"the output {name} differs by {_error(outputs[name], want)} on rank {rank}"
        if not abs(loss - subject.loss) <= tolerance * max(1.0, abs(subject.loss)):
            return f"the loss is {loss:.6f} on rank {rank}, expected {subject.loss:.6f}"
    return _gradients(subject, ranks[0][2], subject.grads) or _replicas([rank[3] for rank in ranks])


def _dropped(subject: Specimen, sizes: tuple[int, int, int], knobs: Any, rates: Any) -> str:
    """Check that with the dropouts of the config gradients are those of the same table on one rank."""
    ranks = emulate(_rank, subject, sizes, knobs, rates, mesh=sizes, timeout_s=TIMEOUT_S)
    problem = _replicas([rank[3] for rank in ranks])
    if not problem and subject.seen.draws:
        problem = _gradients(
            subject,
            ranks[0][2],
            _rank(subject, (1, 1, 1), {"schedule": knobs["schedule"]}, rates)[2],
        )
    return problem and f"with dropout, {problem}"


def _gradients(subject: Specimen, found: dict[str, Tensor], wanted: dict[str, Tensor]) -> str:
    largest = max((float(g.abs().max()) for g in wanted.values() if g.numel()), default=0.0)
    if missing := sorted(wanted.keys() - found.keys()):
        return f"{len(missing)} parameters have no gradient, first {missing[0]}"
    tolerance = TOLERANCE[subject.dtype]
    wrong = [n for n, g in wanted.items() if _off(found[n], g, tolerance, largest)]
    return f"the gradients of {len(wrong)} parameters differ, first {wrong[0]}" if wrong else ""


def _replicas(ranks: list[dict[str, tuple[str, str]]]) -> str:
    seen: dict[tuple[str, str], str] = {}
    for rank, held in enumerate(ranks):
        for name, (hashed, part) in held.items():
            if seen.setdefault((name, part), hashed) != hashed:
                return f"the gradient of {name} on rank {rank} differs from that of its replica"
    return ""


def _error(found: Tensor, want: Tensor) -> str:
    if found.shape != want.shape:
        return f"its shape {list(found.shape)}, expected {list(want.shape)},"
    return f"{float((found.double() - want.double()).abs().max()):.1e}"


def _off(found: Tensor, want: Tensor, tolerance: float, scale: float = 1.0) -> bool:
    """Return whether a tensor is further off than its own size, and that of all, allows."""
    if found.shape != want.shape:
        return True
    if not want.numel():
        return False
    found, want = found.detach().double(), want.detach().double()
    same = torch.equal(found.isfinite(), want.isfinite())
    error = float((found - want).nan_to_num(0.0, 0.0, 0.0).abs().max())
    allowed = tolerance * (float(want.nan_to_num(0.0, 0.0, 0.0).abs().max()) + 0.01 * scale)
    return not same or not error <= allowed
