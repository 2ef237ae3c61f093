"""Report of a verification, as JSON (verify.json) and as text."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from slapo_zoo.errors import SlapoError
from slapo_zoo.parallel.compat import software
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.verify.compare import CHECKS, Comparison, Divergence, Finding

VERIFIED, FAILED, UNMEASURED = "verified", "failed", "unmeasured"
SHOWN = 3  # findings of one check that the text lists
NAMED = 8  # directives


@dataclass(frozen=True)
class Report:
    """The outcome of a verification; its verdict `ok` is True if there are neither findings nor an error.

    Args:
        model: class of the model.
        mesh: sizes of tp, pp and dp, and of cp if it is used.
        config: how the verified model was made: "given", "shrunken", or "layer by layer".
        checks: check --> number of comparisons ("compared") and largest error divided by the allowed one ("worst"); or
            "unmeasured" for a check that could not be made.
        findings: the differences that were found.
        divergence: the first module that differs, with the modules that can have caused it (`suspects`); or None.
        directives: (path, "sch[pattern].directive") for directives (`shard`, ...) at suspects, likeliest cause first.
        error: text of the exception that the schedule raised, or None.
        seed: seed of weights, batch and dropout.
        seconds: wall time.
        software: package --> version.
    """

    model: str
    mesh: Mapping[str, int]
    config: str
    checks: Mapping[str, Any]
    findings: Sequence[Finding] = ()
    divergence: Divergence | None = None
    directives: Sequence[tuple[str, str]] = ()
    error: str | None = None
    seed: int = 0
    seconds: float = 0.0
    software: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(
        model: type, mesh: Mesh, found: Comparison, divergence: Divergence | None, schedule: Any,
        error: str | None, seed: int, seconds: float = 0.0,
    ) -> "Report":  # fmt: skip
        """Make the report of a comparison `found`. `divergence` is the first module that differs, `schedule` has the
        directives to blame (None if it could not be made), `error` is an exception's text, `seconds` the wall time.
        """
        suspects = divergence.suspects if divergence and schedule else ()
        directives = directives_at(schedule, suspects)
        return Report(
            model.__name__, mesh.sizes, "given", figures(found), found.findings, divergence, directives,
            error, seed, seconds, software(),
        )  # fmt: skip

    @property
    def ok(self) -> bool:
        """Return whether no difference was found and the schedule ran; checks that could not be made do not count."""
        return not self.findings and self.error is None

    def document(self) -> dict[str, Any]:
        """Return this report as the content of verify.json, with at most 100 findings."""
        found = asdict(self)
        found["findings"] = found["findings"][:100]
        return {"verdict": VERIFIED if self.ok else FAILED, **found}

    def __str__(self) -> str:
        sizes = " ".join(f"{k}={v}" for k, v in self.mesh.items())
        head = f"{self.model} on {sizes} ({self.config} config): {self.document()['verdict']}"
        lines = [f"{head} in {self.seconds:.1f} s"]
        for check, meaning in CHECKS.items():
            lines.append(f"  {self._mark(check)} {check:<15} {meaning}{self._figures(check)}")
            lines += self._wrong(check)
        if self.error:
            lines.append(f"  the schedule does not run: {self.error}")
        return "\n".join(lines + self._where())

    def _mark(self, check: str) -> str:
        if any(f.check == check for f in self.findings):
            return "✗"
        return "✓" if isinstance(self.checks.get(check), Mapping) else "·"

    def _figures(self, check: str) -> str:
        found = self.checks.get(check)
        if not isinstance(found, Mapping):
            return f" ({UNMEASURED})"
        return f" ({found['compared']} compared, largest error {found['worst']:.2f} of the allowed)"

    def _wrong(self, check: str) -> list[str]:
        wrong = [f for f in self.findings if f.check == check]
        lines = [
            f"      {f.what}{'' if f.rank is None else f' on rank {f.rank}'}: {f.problem}"
            for f in wrong[:SHOWN]
        ]
        return lines + ([f"      and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else [])

    def _where(self) -> list[str]:
        if self.divergence is None:
            return []
        d = self.divergence
        lines = [f"  first divergence, {d.phase}: {d.path}, {d.what}, on rank {d.rank}"]
        lines.append(f"    caused in: {', '.join(s for s in d.suspects if s)}")
        if not self.directives:
            return [*lines, "    no directive touches these modules: one may be missing"]
        lines.append("    directives of these modules, the likeliest first (or one is missing):")
        return lines + [f"      {path}: {text}" for path, text in self.directives[:NAMED]]

    def raise_if_wrong(self, where: str) -> None:
        """Raise a VerifyError with the text of this report if `ok` is False; `where` names the caller in the error."""
        if not self.ok:
            missing = "correct the schedule where the lines above name a module: a shard or sync may be missing there"
            hint = "repair the directives named above" if self.directives else missing
            raise VerifyError(where, "", str(self), hint)


class VerifyError(SlapoError, AssertionError):
    """Error raised when a sharded model does not compute what the plain model computes."""


def figures(comparison: Comparison) -> dict[str, Any]:
    """Return {check: {"compared": number of comparisons, "worst": largest error / allowed error}};
    the value is "unmeasured" for a check that could not be made.
    """
    found: dict[str, Any] = dict.fromkeys(CHECKS, UNMEASURED)
    for check, count in comparison.counts.items():
        found[check] = {"compared": count, "worst": round(comparison.worst[check], 4)}
    for finding in comparison.findings:
        if not isinstance(found[finding.check], dict):
            found[finding.check] = {"compared": 1, "worst": 0.0}
    return found


def directives_at(schedule: Any, paths: Sequence[str]) -> list[tuple[str, str]]:
    """Return (path, text like `sch["*.fc"].shard(...)`) of each directive that changed a module, by order of `paths`."""
    found = []
    for path in paths:
        for landed, (pattern, directive) in zip(schedule.landed, schedule.history, strict=True):
            if path in landed:
                found.append((path, f"sch[{pattern!r}].{directive}"))
    return found
