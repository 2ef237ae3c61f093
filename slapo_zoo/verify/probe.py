"""A derived table against the plain model: a tiny one, every rank a thread of this process."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from slapo_zoo.errors import SlapoError
from slapo_zoo.model.auto import AutoScheduledModel
from slapo_zoo.model.numerics import digest, part_of
from slapo_zoo.parallel.emulation import emulate
from slapo_zoo.verify.specimen import Specimen, experts, silence, tensors
from slapo_zoo.zoo.derive import DERIVED, TRIALS, structure
from slapo_zoo.zoo.table import Table

TIMEOUT_S = 60.0
# Norms and rotary tables are float32 in any model; a wrong division is off by 1e-1.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3}


def probe(subject: Specimen, table: Table | None, sizes: tuple[int, int, int], **knobs: Any) -> str:
    """What differs between the scheduled and the plain model, or "".

    Args:
        subject: the plain one.
        table: under test; None takes the zoo's.
        sizes: of tp, pp and dp.
        knobs: of `from_pretrained`.
    """
    from transformers import AutoConfig

    if table is not None:
        loaded = AutoConfig.from_pretrained(subject.folder, **experts(subject.config))
        name = structure(loaded, subject.cls)
        TRIALS.add(name)
        DERIVED[name, *sizes[:2]] = table
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ranks = emulate(_rank, subject, sizes, knobs, mesh=sizes, timeout_s=TIMEOUT_S)
    except Exception as error:
        return _named(error)
    return _compare(subject, ranks, subject.outputs if sizes[1] == 1 else subject.uncached)


def _named(error: Exception) -> str:
    text = str(error).strip().splitlines() or [""]
    if isinstance(error, SlapoError):
        return text[0]
    return f"{type(error).__name__}: {text[0]}"


def _rank(subject: Specimen, sizes: tuple[int, int, int], knobs: dict[str, Any]) -> Any:
    tp, pp, dp = sizes
    model = AutoScheduledModel.from_pretrained(
        subject.folder, tp=tp, pp=pp, dp=dp, seed=0, auto_class=subject.cls, schedule="auto",
        dtype=subject.dtype, **{"kernels": "reference", **experts(subject.config), **knobs},
    )  # fmt: skip
    silence(model)
    with torch.no_grad():
        outputs = tensors(model.eval()(**subject.batch))
    if not subject.grads:
        return outputs, 0.0, {}, {}, {}
    rows = len(next(iter(subject.batch.values()))) // dp
    start = model.mesh.coord("dp") * rows
    part = {k: v[start : start + rows] for k, v in subject.batch.items()}
    whole = model._slapo.batch_statistics or model._slapo.undivided
    micro_batches = 1 if whole else 2
    loss = float(model.train().train_step(part, micro_batches=micro_batches))
    if knobs.get("sequence_parallel") and not model._slapo.schedule.state.forward.tokens_divided:
        problem = "its batch has no tokens that tp ranks could divide: it was not seen to be right"
        raise SlapoError("verify", "sequence_parallel", problem, "leave sequence_parallel out")
    grads, held = model.consolidated_state_dict(grads=True), _held(model)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3  # a mask for another part of the columns has no place, or parts replicas
    model.train_step(part, micro_batches=micro_batches)
    return outputs, loss, grads, held, _held(model)


def _held(model: Any) -> dict[str, tuple[str, str]]:
    """Name --> the hash of this rank's gradient, and which part of the tensor it is."""
    own = model.named_parameters()
    return {n: (digest(p.grad), part_of(model, n)) for n, p in own if p.grad is not None}


def _compare(subject: Specimen, ranks: list[Any], wanted: dict[str, Tensor]) -> str:
    """Outputs and loss on every rank, all gradients, and that replicas are alike bit for bit, with dropout too."""
    tolerance = TOLERANCE[subject.dtype]
    for rank, (outputs, loss, *_) in enumerate(ranks):
        for name, want in wanted.items():
            if name not in outputs:
                return f"rank {rank} returns no {name}"
            if _off(outputs[name], want, tolerance):
                return f"the output {name} differs by {_error(outputs[name], want)} on rank {rank}"
        if not abs(loss - subject.loss) <= tolerance * max(1.0, abs(subject.loss)):
            return f"the loss is {loss:.6f} on rank {rank}, expected {subject.loss:.6f}"
    problem = _gradients(subject, ranks[0][2], tolerance) or _replicas([rank[3] for rank in ranks])
    return problem or _replicas([rank[4] for rank in ranks])


def _gradients(subject: Specimen, found: dict[str, Tensor], tolerance: float) -> str:
    largest = max((float(g.abs().max()) for g in subject.grads.values() if g.numel()), default=0.0)
    if missing := sorted(subject.grads.keys() - found.keys()):
        return f"{len(missing)} parameters have no gradient, first {missing[0]}"
    wrong = [n for n, g in subject.grads.items() if _off(found[n], g, tolerance, largest)]
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
    """Whether a tensor is further off than its own size, and that of all, allows."""
    if found.shape != want.shape:
        return True
    if not want.numel():
        return False
    found, want = found.detach().double(), want.detach().double()
    same = torch.equal(found.isfinite(), want.isfinite())
    error = float((found - want).nan_to_num(0.0, 0.0, 0.0).abs().max())
    allowed = tolerance * (float(want.nan_to_num(0.0, 0.0, 0.0).abs().max()) + 0.01 * scale)
    return not same or not error <= allowed
