"""Values against values: the tolerance is the reference's own error (docs/decisions/0003)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from slapo_zoo.verify.runs import LEARNING_RATE, RankResult, Result

ALIKE, ACCUMULATED = 1e-3, "accumulated gradients"  # relative
FLOOR = 8 * torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be.

    Args:
        check: which of CHECKS.
        what: the tensor or file.
        problem: what was found against what was expected.
        rank: where, or None for all.
    """

    check: str
    what: str
    problem: str
    rank: int | None = None


@dataclass
class Comparison:
    """All findings, and the largest error of each check in units of what is allowed.

    Args:
        findings: what is wrong.
        worst: check --> its largest error.
        counts: check --> comparisons made.
        factor: that every gradient is multiplied by, where it is one and not 1.
    """

    findings: list[Finding]
    worst: dict[str, float]
    counts: dict[str, int]
    factor: float | None = None

    @staticmethod
    def empty() -> "Comparison":
        """Make a comparison without findings."""
        return Comparison([], {}, {})

    def note(self, check: str, what: str, problem: str, rank: int | None = None) -> None:
        """Record a difference."""
        self.findings.append(Finding(check, what, problem, rank))

    def did(self, check: str, ratio: float = 0.0) -> None:
        """One comparison of a check was made; `ratio` is its error by the allowed one."""
        self.counts[check] = self.counts.get(check, 0) + 1
        self.worst[check] = max(self.worst.get(check, 0.0), ratio)


class Tolerance:
    """Allowed error: twice the distance of plain runs from the fp64 truth, plus a floor for rounding.

    Args:
        truth: the fp64 run.
        plains: runs of the same in the dtype under test.
        others: more of them, asked for where a value lies too far off: few runs can all be lucky.
    """

    def __init__(self, truth: Result, plains: Sequence[Result], others: Iterable[Result] = ()):
        self.truth, self.plains, self._others = truth, list(plains), iter(others)

    def another(self) -> bool:
        """Return whether one more plain run tells now how far rounding leads."""
        self.plains += (more := list(islice(self._others, 1)))
        return bool(more)

    def own_error(self, what: Callable[[Result], Any]) -> float:
        """Return the distance of the plain runs from the truth."""
        want = torch.as_tensor(what(self.truth)).double()
        return max(_distance(what(plain), want) for plain in self.plains)

    def check(
        self, into: Comparison, check: str, name: str, found: Any, what: Callable[[Result], Any],
        scale: float = 0.0, rank: int | None = None,
    ) -> None:  # fmt: skip
        """Compare one value of the scheduled model with the plain runs.

        Args:
            into: where the outcome goes.
            check: which of CHECKS.
            name: of the value.
            found: under test.
            what: takes the value from a run.
            scale: magnitude of the values that it was computed from, for the floor.
            rank: that found it.
        """
        want = torch.as_tensor(what(self.truth)).double()
        found = torch.as_tensor(found).double()
        if found.shape != want.shape:
            into.note(check, name, _other_shape(found, want), rank)
            return
        largest = float(want.abs().max()) if want.numel() else 0.0
        floor, error = FLOOR * max(largest, scale), _distance(found, want)
        while not error <= (allowed := 2 * self.own_error(what) + floor) and self.another():
            pass
        into.did(check, error / allowed if allowed else 0.0)
        if not error <= allowed:  # also where it is NaN
            problem = f"error {error:.2e}, allowed {allowed:.2e}, largest value {largest:.2e}"
            into.note(check, name, problem, rank)


def _other_shape(found: Tensor, want: Tensor) -> str:
    return f"found shape {list(found.shape)}, expected {list(want.shape)}"


def _distance(found: Any, want: Tensor) -> float:
    found = torch.as_tensor(found).double()
    return float((found - want).abs().max()) if want.numel() else 0.0


def compare(into: Comparison, found: Sequence[RankResult], near: Tolerance) -> None:
    """Outputs and loss on every rank; gradients, their norm and weights after one step."""
    truth = near.truth
    for rank, result in enumerate(found):
        for name in truth.outputs:
            if name not in result.outputs:
                into.note("outputs", name, "the model returned none", rank)
                continue
            near.check(into, "outputs", name, result.outputs[name], lambda r, n=name: r.outputs[n], rank=rank)  # fmt: skip
        if truth.grads:
            near.check(into, "loss", "loss", result.loss, lambda r: r.loss, rank=rank)
            near.check(into, "gradients", "norm", result.norm, lambda r: r.norm, rank=rank)
    if truth.grads:
        _gradients(into, near, found[0])
        _weights(into, near, found[0])


def _gradients(into: Comparison, near: Tolerance, result: RankResult) -> None:
    largest = largest_of(near.truth.grads)
    _same_names(into, "gradients", result.grads, near.truth.grads)
    into.factor = _common_factor(result.grads, near.truth.grads)
    for name, two in result.twice.items():
        one = result.grads.get(name)
        if one is None or one.shape != two.shape:  # told by the comparison with the plain model
            continue
        error = _distance(two, 2 * one.double())
        if not error <= ALIKE * largest and all(f.what != ACCUMULATED for f in into.findings):
            problem = f"{name} is off by {error:.2e} after a second step on the same batch"
            into.note("gradients", ACCUMULATED, problem)
    for name in sorted(near.truth.grads.keys() & result.grads.keys()):
        near.check(into, "gradients", name, result.grads[name], lambda r, n=name: r.grads[n], largest)  # fmt: skip


def _common_factor(found: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> float | None:
    """Return the one number by which every gradient is multiplied, or None."""
    pairs = [
        (found[n].double().flatten(), g.double().flatten()) for n, g in want.items() if n in found
    ]
    if any(x.shape != y.shape for x, y in pairs):
        return None
    largest = max((float(y.norm()) for _, y in pairs), default=0.0)
    big = [(x, y) for x, y in pairs if y.norm() > ALIKE * largest]
    factors = [float(x @ y / (y @ y)) for x, y in big]
    one = all(
        (x - f * y).norm() <= ALIKE * x.norm() for f, (x, y) in zip(factors, big, strict=True)
    )
    same = one and max(factors, default=1.0) - min(factors, default=1.0) <= ALIKE * max(
        factors, default=1.0
    )
    return factors[0] if same and abs(factors[0] - 1.0) > 10 * ALIKE else None


def _weights(into: Comparison, near: Tolerance, result: RankResult) -> None:
    """Compare the weights after one step; a gradient that is 0 in truth is noise that AdamW amplifies."""
    truth = near.truth
    largest = largest_of(truth.grads)
    noise = {n for n, g in truth.grads.items() if float(g.abs().max()) < 1e-12 * largest}

    def usual() -> float:
        known = (n for n in truth.weights if n not in noise)
        errors = [near.own_error(lambda r, n=n: r.weights[n]) for n in known]
        return 2 * max(errors, default=0.0) + FLOOR

    least = usual()
    for name in sorted(truth.weights.keys() & result.weights.keys()):
        allowed = 2 * LEARNING_RATE if name in noise else least
        found, want = result.weights[name], truth.weights[name].double()
        if found.shape != want.shape:  # e.g. a part that lost its tie to what is sharded
            into.note("optimizer step", name, _other_shape(found, want))
            continue
        error = _distance(found, want)
        while not error <= allowed and name not in noise and near.another():
            allowed = least = usual()
        into.did("optimizer step", error / allowed)
        if not error <= allowed:
            into.note("optimizer step", name, f"error {error:.2e}, allowed {allowed:.2e}")


def largest_of(tensors: Mapping[str, Tensor]) -> float:
    """Return the largest absolute value of all tensors."""
    return max((float(t.abs().max()) for t in tensors.values() if t.numel()), default=0.0)


def _same_names(into: Comparison, check: str, found: Iterable[str], want: Iterable[str]) -> None:
    missing, more = sorted(set(want) - set(found)), sorted(set(found) - set(want))
    for name in missing:
        into.note(check, name, "there is none")
    for name in more:
        into.note(check, name, "the plain model has none of that name")


def replicas(into: Comparison, found: Sequence[RankResult], check: str = "replicas") -> None:
    """Check that replicas are the same on all ranks, bit for bit, after the step; gradients that differ first."""
    wrong: list[tuple[bool, str, int, int]] = []
    for name in sorted({n for result in found for n in result.digests}):
        seen: dict[str, tuple[int, Any, Any]] = {}
        for rank, result in enumerate(found):
            if name not in result.digests:
                continue
            digest, part = result.digests[name]
            grad = result.grad_digests.get(name)
            first, want, like = seen.setdefault(part, (rank, digest, grad))
            into.did(check)
            if digest != want:
                wrong.append((grad == like, name, rank, first))
    for same_gradient, name, rank, first in sorted(wrong):
        also = "" if same_gradient else ", as its gradient does"
        into.note(check, name, f"differs from that of rank {first}{also}", rank)
    for rank, result in enumerate(found):
        into.did("ties")
        for name in result.untied:
            into.note("ties", name, "is a tensor of its own: the tie is lost", rank)
