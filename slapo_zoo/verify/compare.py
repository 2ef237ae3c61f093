"""Comparison of a sharded model with the plain one, whose own rounding error sets what is allowed (docs/decisions/0003)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from slapo_zoo.model.numerics import unlike_replicas

LEARNING_RATE, EPS, DECAY, MAX_NORM = 1e-3, 1e-5, 0.1, 1.0  # AdamW and clipping of every run
ALIKE, ACCUMULATED = 1e-3, "accumulated gradients"  # relative
FLOOR = 8 * torch.finfo(torch.float32).eps
CHECKS: dict[str, str] = {
    "outputs": "forward outputs in eval mode, on every rank",
    "loss": "loss of a training step, on every rank",
    "gradients": "every gradient, and the global norm",
    "optimizer step": "every weight after one AdamW step",
    "replicas": "replicas on several ranks are equal, bit for bit",
    "ties": "tied weights are one tensor after the step",
    "dropout": "with dropout, loss and gradients equal those of one rank",
    "collectives": "the predicted number of collectives over tp",
    "files": "plain transformers loads what was saved, bit for bit",
}


@dataclass
class Result:
    """Outputs, loss, gradients, and weights after an AdamW step, of one run of a model; unsharded, by HuggingFace name.

    `uncached` has the outputs without KV cache, to compare with a pipeline, which makes none. `norm` is the 2-norm of
    all gradients, `events` are tensors recorded at modules, `tied` maps a tied parameter's names to its first.
    """

    outputs: dict[str, Tensor] = field(default_factory=dict)
    uncached: dict[str, Tensor] = field(default_factory=dict)  # outputs without KV cache (pipeline)
    loss: float = 0.0
    grads: dict[str, Tensor] = field(default_factory=dict)
    norm: float = 0.0
    weights: dict[str, Tensor] = field(default_factory=dict)
    events: dict[Any, Any] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)  # another name of a parameter --> its first

    def rename(self, tied: Mapping[str, str]) -> None:
        """Rename tied parameters in `grads` and `weights` by `tied`: name in this run --> name in the plain model."""
        self.grads = {tied.get(name, name): x for name, x in self.grads.items()}
        self.weights = {tied.get(name, name): x for name, x in self.weights.items()}


@dataclass
class RankResult(Result):
    """Result of one rank of a run; unsharded gradients and weights are on rank 0 only.

    Args:
        coords: this rank's coordinates in tp, pp and dp.
        digests: local parameter --> (hash of its bytes after the step, text that is equal on ranks with equal shards).
        untied: names of parameters that should share memory and do not.
        grad_digests: the same of the parameter's gradient before clipping.
        collectives: kind such as "all_reduce" --> number of collectives over tp in the step.
        twice: parameter --> its unsharded gradient, summed over two backwards on the same batch; rank 0 only.
    """

    coords: tuple[int, int, int] = (0, 0, 0)
    digests: dict[str, tuple[str, str]] = field(default_factory=dict)
    grad_digests: dict[str, tuple[str, str]] = field(default_factory=dict)
    untied: list[str] = field(default_factory=list)
    collectives: dict[str, int] = field(default_factory=dict)
    twice: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def on(mesh: Any) -> "RankResult":
        """Make an empty result of the rank whose coordinates `mesh` has."""
        return RankResult(coords=(mesh.coord("tp"), mesh.coord("pp"), mesh.coord("dp")))


@dataclass(frozen=True)
class Divergence:
    """First difference between a sharded model and the plain one of `transformers`.

    Args:
        path: path of the module.
        phase: "forward" or "backward" (an output or its gradient differs), "parameters" (a parameter's gradient
            differs), "error" (a call raised), "beyond the modules" (the modules agree, but the loss, the gradient
            norm or the scale of all gradients differs), or the name of a failed check ("replicas", "files", ...).
        what: description of the tensor that differs, such as "output 0".
        rank: the first rank on which it differs.
        suspects: paths of modules whose directives (`shard`, ...) can have caused it, the likeliest first.
    """

    path: str
    phase: str
    what: str
    rank: int
    suspects: tuple[str, ...]


@dataclass(frozen=True)
class Finding:
    """One difference, e.g. from the plain model or between ranks, that a check of a verification found.

    Args:
        check: name of the check, such as "gradients" or "files".
        what: name of the tensor or file.
        problem: what was found against what was expected.
        rank: rank on which it was found, or None for all.
    """

    check: str
    what: str
    problem: str
    rank: int | None = None


@dataclass
class Comparison:
    """Differences that the checks of a verification found, and the largest error of each check.

    Args:
        findings: the differences that were found.
        worst: name of a check --> largest error divided by the allowed error.
        counts: name of a check --> number of comparisons.
        factor: f if every gradient is f times the plain model's and f is not 1; else None.
        apart: largest error among those beyond tolerance, divided by the largest element of the compared tensors.
    """

    findings: list[Finding] = field(default_factory=list)
    worst: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    factor: float | None = None
    apart: float = 0.0

    def words(self) -> str:
        """Return a text on the first difference and the number of others of the same check; "" without differences."""
        if not self.findings:
            return ""
        first = self.findings[0]
        where = "" if first.rank is None else f" on rank {first.rank}"
        more = sum(finding.check == first.check for finding in self.findings) - 1
        also = f", and {more} more" if more else ""
        return f"{first.check}: {first.what}{where}: {first.problem}{also}"

    def note(self, check: str, what: str, problem: str, rank: int | None = None) -> None:
        """Record a difference that the check named `check` found in the tensor or file `what`; `rank` None: all ranks."""
        self.findings.append(Finding(check, what, problem, rank))

    def did(self, check: str, ratio: float = 0.0) -> None:
        """Count one comparison by the check named `check`; `worst` keeps the largest `ratio`, error / allowed error."""
        self.counts[check] = self.counts.get(check, 0) + 1
        self.worst[check] = max(self.worst.get(check, 0.0), ratio)


class Tolerance:
    """Allowed error of an output, loss or gradient: 2 * largest error of plain runs + 8 fp32 eps * largest element.

    Args:
        truth: the run of the plain model in fp64, from which errors are measured.
        plains: runs of the plain model in the dtype under test.
        others: iterator that makes further such runs, when a value exceeds the tolerance that the first ones give.
    """

    def __init__(self, truth: Result, plains: Sequence[Result], others: Iterable[Result] = ()):
        self.truth, self.plains, self._others = truth, list(plains), iter(others)

    def another(self) -> bool:
        """Make one more plain run from `others` and add it to `plains`; return False if none is left."""
        self.plains += (more := list(islice(self._others, 1)))
        return bool(more)

    def own_error(self, what: Callable[[Result], Any]) -> float:
        """Return the largest absolute difference in `what(run)`, e.g. a gradient, between a plain and the fp64 run."""
        want = torch.as_tensor(what(self.truth)).double()
        return max(_distance(what(plain), want) for plain in self.plains)

    def allowed(self, what: Callable[[Result], Any], largest: float, scale: float) -> float:
        """Return the absolute error that each element may have: 2 * `own_error(what)` + 8 fp32 eps * max(`largest`,
        `scale`). `what(run)` is the compared output, loss or gradient of a run (a Result), `largest` its largest
        absolute element in the fp64 run, `scale` 0 or, for example, the largest absolute element of all gradients.
        """
        return 2 * self.own_error(what) + FLOOR * max(largest, scale)

    def check(
        self, into: Comparison, check: str, name: str, found: Any, what: Callable[[Result], Any],
        scale: float = 0.0, rank: int | None = None,
    ) -> None:  # fmt: skip
        """Compare an output, loss or gradient with that of the plain run `self.truth`; record an error above `allowed`.

        Args:
            into: record to which the outcome is added.
            check: name of the check, a key of CHECKS such as "gradients".
            name: name of the output or parameter, for the record.
            found: the output, loss or gradient of the scheduled model.
            what: function that gets a run (a Result) and returns the same output, loss or gradient of the run.
            scale: 0, or e.g. the largest absolute element of all gradients, with which the allowed error grows.
            rank: rank on which `found` was computed, or None for all.
        """
        want = torch.as_tensor(what(self.truth)).double()
        found = torch.as_tensor(found).double()
        if found.shape != want.shape:
            into.note(check, name, _other_shape(found, want), rank)
            return
        largest, error = largest_of({name: want}), _distance(found, want)
        while not error <= (allowed := self.allowed(what, largest, scale)) and self.another():
            pass
        into.did(check, error / allowed if allowed else 0.0)
        if not error <= allowed:  # also where it is NaN
            problem = f"error {error:.2e}, allowed {allowed:.2e}, largest value {largest:.2e}"
            into.note(check, name, problem, rank)
            into.apart = max(into.apart, error / (max(largest, scale) or 1.0))


class FixedTolerance(Tolerance):
    """Allowed error of a scheduled model that runs in the same dtype as the plain one: a fixed share of the largest value.

    Args:
        truth: the run of the plain model, to which the scheduled model is compared.
        relative: the share, e.g. 1e-3.
    """

    def __init__(self, truth: Result, relative: float):
        super().__init__(truth, ())
        self.relative = relative

    def own_error(self, what: Callable[[Result], Any]) -> float:
        """Return 0 for any `what`: no run in a higher precision exists from which a rounding error could be measured."""
        return 0.0

    def allowed(self, what: Callable[[Result], Any], largest: float, scale: float) -> float:
        """Return `self.relative` * (`largest` + 0.01 * `scale`): `largest` is the largest absolute element of the
        compared tensor of the plain run, `scale` is 0 or e.g. that of all its gradients. `what` is unused.
        """
        return self.relative * (largest + 0.01 * scale)


def _other_shape(found: Tensor, want: Tensor) -> str:
    return f"found shape {list(found.shape)}, expected {list(want.shape)}"


def _distance(found: Any, want: Tensor) -> float:
    if not want.numel():
        return 0.0
    found = torch.as_tensor(found).double()
    nan = want.isnan() & found.isnan() & (not want.isnan().all())  # all NaN would prove nothing
    apart = (found - want).masked_fill((found == want) | nan, 0.0)  # as infinities of a mask
    return float(apart.abs().max())


def compare(into: Comparison, found: Sequence[RankResult], near: Tolerance) -> None:
    """Compare each rank's outputs and loss, rank 0's gradients, and after an optimizer step the gradient norm and
    weights, with the plain run `near.truth`; record in `into` what is missing or differs by more than `near` allows.
    """
    truth, cached = near.truth, all(result.coords[1] == 0 for result in found)
    for rank, result in enumerate(found):
        _outputs(into, near, result, rank, cached)
        if truth.grads:
            near.check(into, "loss", "loss", result.loss, lambda r: r.loss, rank=rank)
        if truth.weights:
            near.check(into, "gradients", "norm", result.norm, lambda r: r.norm, rank=rank)
    if truth.grads:
        _gradients(into, near, found[0])
    if truth.weights:
        _weights(into, near, found[0])


def _outputs(
    into: Comparison, near: Tolerance, result: RankResult, rank: int, cached: bool
) -> None:
    def of(run: Result) -> dict[str, Tensor]:
        return run.outputs if cached else run.uncached

    for name in of(near.truth):
        if name not in result.outputs:
            into.note("outputs", name, "the model returned none", rank)
            continue
        near.check(into, "outputs", name, result.outputs[name], lambda r, n=name: of(r)[n], rank=rank)  # fmt: skip


def _gradients(into: Comparison, near: Tolerance, result: RankResult) -> None:
    largest = largest_of(near.truth.grads)
    _same_names(into, "gradients", result.grads, near.truth.grads)
    into.factor = _common_factor(result.grads, near.truth.grads)
    for name, two in result.twice.items():
        one = result.grads.get(name)
        if one is None or one.shape != two.shape:  # the comparison with the plain model reports it
            continue
        error = _distance(two, 2 * one.double())
        if not error <= ALIKE * largest and all(f.what != ACCUMULATED for f in into.findings):
            problem = f"{name} is off by {error:.2e} after a second step on the same batch"
            into.note("gradients", ACCUMULATED, problem)
    for name in sorted(near.truth.grads.keys() & result.grads.keys()):
        near.check(into, "gradients", name, result.grads[name], lambda r, n=name: r.grads[n], largest)  # fmt: skip


def _common_factor(found: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> float | None:
    """Return f if each gradient in `found` is, up to rounding, f times that in `want` and f is not 1; else None."""
    pairs = [
        (found[n].double().flatten(), g.double().flatten()) for n, g in want.items() if n in found
    ]
    if any(x.shape != y.shape for x, y in pairs):
        return None
    largest = max((float(y.norm()) for _, y in pairs), default=0.0)
    big = [(x, y) for x, y in pairs if y.norm() > ALIKE * largest]
    factors = [float(x @ y / (y @ y)) for x, y in big]
    scaled = list(zip(factors, big, strict=True))
    one = all((x - f * y).norm() <= ALIKE * x.norm() for f, (x, y) in scaled)
    least, most = min(factors, default=1.0), max(factors, default=1.0)
    same = one and most - least <= ALIKE * most
    return factors[0] if same and abs(factors[0] - 1.0) > 10 * ALIKE else None


def _weights(into: Comparison, near: Tolerance, result: RankResult) -> None:
    """Compare the weights of `result` after AdamW with the plain run `near.truth`; record in `into` an error over twice
    that of other plain runs, or over two learning rates where the gradient is only rounding noise (AdamW scales it up).
    """
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
        if found.shape != want.shape:  # e.g. a parameter that lost its tie to a sharded one
            into.note("optimizer step", name, _other_shape(found, want))
            continue
        error = _distance(found, want)
        while not error <= allowed and name not in noise and near.another():
            allowed = least = usual()
        into.did("optimizer step", error / allowed)
        if not error <= allowed:
            into.note("optimizer step", name, f"error {error:.2e}, allowed {allowed:.2e}")


def largest_of(tensors: Mapping[str, Tensor]) -> float:
    """Return the largest finite absolute value of all tensors."""
    finite = (t.nan_to_num(0.0, 0.0, 0.0) for t in tensors.values() if t.numel())
    return max((float(t.abs().max()) for t in finite), default=0.0)


def _same_names(into: Comparison, check: str, found: Iterable[str], want: Iterable[str]) -> None:
    for name in sorted(set(want) - set(found)):
        into.note(check, name, "there is none")
    for name in sorted(set(found) - set(want)):
        into.note(check, name, "the plain model has none of that name")


def replicas(into: Comparison, found: Sequence[RankResult], check: str = "replicas") -> None:
    """Check that ranks which hold the same tensor hold equal bytes, and that tied parameters are one tensor. `found` has
    a result per rank: weights are compared, or gradients if there was no step. The outcome goes into `into`.
    """
    held = [result.digests or result.grad_digests for result in found]
    wrong: list[tuple[bool, str, int, int]] = []
    for name, rank, first in unlike_replicas(held):
        mine, other = (found[i].grad_digests.get(name) for i in (rank, first))
        wrong.append((mine == other, name, rank, first))
    for _ in range(sum(map(len, held))):
        into.did(check)
    for same_gradient, name, rank, first in sorted(wrong):
        also = "" if same_gradient else ", as its gradient does"
        into.note(check, name, f"differs from that of rank {first}{also}", rank)
    for rank, result in enumerate(found):
        into.did("ties")
        for name in result.untied:
            into.note("ties", name, "is a tensor of its own: the tie is lost", rank)


def dropout(into: Comparison, found: Sequence[RankResult], near: Tolerance) -> None:
    """Compare loss and gradients of a step with dropout on all ranks (`found`) with `near.truth`, a run on one rank
    with the same dropout masks; record in `into` errors beyond the tolerance, which `near` has from other such runs.
    """
    truth, largest = near.truth, largest_of(near.truth.grads)
    errors = [near.own_error(lambda r, n=name: r.grads[n]) for name in truth.grads]
    # the error of one number may be small by chance: gradients show how rounding grows
    scale = abs(truth.loss) * max(errors, default=0.0) / (largest or 1.0) / FLOOR
    for rank, result in enumerate(found):
        near.check(into, "dropout", "loss", result.loss, lambda r: r.loss, scale, rank)
    for name in sorted(truth.grads.keys() & found[0].grads.keys()):
        near.check(into, "dropout", name, found[0].grads[name], lambda r, n=name: r.grads[n], largest)  # fmt: skip


def collective_counts(into: Comparison, found: Sequence[RankResult], want: Mapping[str, int] | None) -> None:  # fmt: skip
    """Check that each tp rank ran the predicted number of tp collectives of each kind in one step. `found` has a result
    per rank, `want` is {kind: number over all stages}; None checks nothing. The outcome goes into `into`.
    """
    if want is None:
        return
    for tp_coord in sorted({result.coords[0] for result in found}):
        mine = [r for r in found if r.coords[0] == tp_coord and r.coords[2] == 0]
        into.did("collectives")
        total = {k: sum(r.collectives.get(k, 0) for r in mine) for k in sorted({*want, *(k for r in mine for k in r.collectives)})}  # fmt: skip
        if any(total[kind] != want.get(kind, 0) for kind in total):
            problem = f"found {total}, predicted {dict(want)}"
            into.note("collectives", "over tp in one step", problem, tp_coord)
