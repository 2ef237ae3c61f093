"""verify: a schedule of a `transformers` model on a mesh against the plain model."""

import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slapo_zoo.errors import ArchitectureError, MeshError, ScheduleError, SlapoError
from slapo_zoo.hf import models as hf
from slapo_zoo.parallel.compat import software
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.ranks.emulation import emulate
from slapo_zoo.parallel.rng.random_stream import drawn_from
from slapo_zoo.pipeline.orders import StageMap
from slapo_zoo.verify import checks
from slapo_zoo.verify.blame import Blame, Divergence, directives_at, parent_of
from slapo_zoo.verify.compare import Comparison, Finding, Tolerance, compare, replicas
from slapo_zoo.verify.report import Report, figures
from slapo_zoo.verify.runs import RankResult, plain, recorded, scheduled
from slapo_zoo.verify.shrink import dropouts, shrink
from slapo_zoo.verify.subject import Subject, changes_for_comparison, one_rank, write_weights
from slapo_zoo.zoo.table import families

TIMEOUT_S = 30.0
MORE = range(8)  # seeds of plain runs that are made where a value is further off than the first
DTYPES = (torch.float64, torch.float32)  # the truth, and the same in the dtype under test


@hf.no_progress_bars()
def verify(
    config: Any, auto_class: Any = None, mesh: tuple[int, int, int] = (2, 1, 1),
    schedule: Any = "zoo", quick: bool = True, keep_layers: bool = False, seed: int = 0,
    folder: Path | None = None, **knobs: Any,
) -> Report:  # fmt: skip
    """Run a schedule on a mesh, every rank a thread of this process, and compare with the plain model.

    Args:
        config: of `transformers`.
        auto_class: which head; None takes the config's own class.
        mesh: sizes of tp, pp and dp.
        schedule: "zoo", a Schedule or its steps, or a function of the schedule; "auto" is the zoo's
            where it has a table, and refused elsewhere: a derived table was proven already.
        quick: on a small config of the same family; False takes the given one.
        keep_layers: the small config keeps the number of layers.
        seed: of weights, batch and dropout.
        folder: a checkpoint to take weights from; None draws them. Not with `quick`.
        knobs: sequence_parallel, pipeline_order, stages_per_rank, checkpoint_ratio, kernels (none of
            them unless named: what is compared is the schedule).
    """
    begin = time.perf_counter()
    hf.register_models()
    schedule = known_schedule(config, schedule)
    cls = hf.resolve_class(config, auto_class)
    stages = StageMap.make(
        knobs.get("pipeline_order", "1f1b"), mesh[1], knobs.get("stages_per_rank")
    ).num_stages
    small = shrink(config, Mesh(*mesh), stages, keep_layers) if quick else config
    subject = Subject(small, cls, mesh, schedule, folder or Path(), seed, knobs)
    with tempfile.TemporaryDirectory(prefix="slapo_zoo-verify-") as scratch:
        if folder is None or quick:
            weights = Path(scratch, "weights")
            subject = replace(
                subject, folder=weights, config=write_weights(small, cls, weights, seed)
            )
        found = _Verification(subject, Path(scratch)).run()
    how = "shrunken" if quick else "given"
    sizes: dict[str, int] = dict(zip(("tp", "pp", "dp"), mesh, strict=True))
    return Report(
        cls.__name__, sizes, how, figures(found.comparison), found.comparison.findings,
        found.divergence, found.directives, found.error, seed,
        round(time.perf_counter() - begin, 2), software(),
    )  # fmt: skip


def known_schedule(config: Any, schedule: Any) -> Any:
    """The zoo's for "auto", where it has a table of the family.

    Raises:
        ArchitectureError: it has none.
    """
    if not (isinstance(schedule, str) and schedule == "auto"):
        return schedule
    if config.model_type in families():
        return "zoo"
    problem = f"a table of {config.model_type} is proven when it is derived"
    hint = "slapo-zoo derive MODEL --tp N --pp N proves and prints it; with --write the zoo has it"
    raise ArchitectureError("verify", 'schedule="auto"', problem, hint)


@dataclass
class _Outcome:
    comparison: Comparison
    divergence: Divergence | None = None
    directives: Sequence[tuple[str, str]] = ()
    error: str | None = None


class _Verification:
    """One run of all checks; its files lie below `scratch`."""

    def __init__(self, subject: Subject, scratch: Path):
        self.subject, self.scratch = subject, scratch
        self.changes = changes_for_comparison(subject.config)
        self.comparison = Comparison.empty()

    def run(self) -> _Outcome:
        """Run every check; where one fails, find the first module that differs."""
        try:
            self.subject.outline()
        except (ArchitectureError, MeshError) as error:
            if self.subject.schedule == "zoo":
                raise  # what was asked for is impossible; no schedule is to blame
            return self._does_not_run(error)
        except SlapoError as error:
            return self._does_not_run(error)
        try:
            self._compare()
        except Exception as error:
            return self._does_not_run(error)
        if not self.comparison.findings:
            return _Outcome(self.comparison)
        return self._located()

    def _compare(self) -> None:
        subject, into = self.subject, self.comparison
        near = references(subject)
        truth = near.truth
        saved = self.scratch / "saved"
        found = on_mesh(scheduled, subject, self.changes, torch.float32, saved)
        for result in found:
            result.rename(truth.tied)
        compare(into, found, near)
        if truth.grads:
            replicas(into, found)
            checks.collective_counts(into, found, checks.predicted(subject))
            checks.files(into, saved, subject, found[0])
        if truth.grads and not into.findings:
            self._dropout()

    def _dropout(self) -> None:
        subject, changes = self.subject, self._with_dropout()
        if changes is None:
            return
        truth, single = (one_rank_run(scheduled, subject, changes, dtype) for dtype in DTYPES)
        others = (one_rank_run(scheduled, subject, changes, DTYPES[1], None, n) for n in MORE)
        found = on_mesh(scheduled, subject, changes)
        checks.dropout(self.comparison, found, Tolerance(truth, [single], others))

    def _with_dropout(self) -> dict[str, Any] | None:
        """Changes of the config that drop everywhere; None for a family without dropout."""
        names = dropouts(self.subject.config)
        return {**self.changes, **dict.fromkeys(names, checks.DROPOUT)} if names else None

    def _does_not_run(self, error: Exception) -> _Outcome:
        """The schedule raised; the module that was running when it did is the divergence."""
        text = f"{type(error).__name__}: {error}"
        named = isinstance(error, ScheduleError)
        paths = (str(error.where),) if named else self._where_it_raises() or self._named_by(error)
        if not paths:
            return _Outcome(self.comparison, error=text)
        suspects = tuple(dict.fromkeys((*paths, *map(parent_of, paths))))
        divergence = Divergence(paths[0], "error", "its call", 0, suspects)
        return _Outcome(self.comparison, divergence, self._touching(suspects), text)

    def _named_by(self, error: Exception) -> tuple[str, ...]:
        """The module whose parameter an error names."""
        path = str(getattr(error, "what", "")).rpartition(".")[0]
        known = path and path in dict(self.subject.outline().model.named_modules())
        return (path,) if known else ()

    def _where_it_raises(self) -> tuple[str, ...]:
        """The module that runs when it raises, and the one that returned last."""
        try:
            on_mesh(recorded, self.subject, self.changes)
        except Exception as error:
            return getattr(error, "slapo_modules", ())
        return ()

    def _located(self) -> _Outcome:
        """Find the first module that differs, without dropout, or else with it."""
        wrong = [f.what for f in self.comparison.findings if f.check == "gradients"]
        divergence = None
        if {f.check for f in self.comparison.findings} != {"dropout"}:
            events = [events_of_plain(self.subject, dtype) for dtype in DTYPES]
            divergence = self._blame(self.changes, events, [w for w in wrong if "." in w])
        elif changes := self._with_dropout():
            runs = [one_rank_run(recorded, self.subject, changes, dtype) for dtype in DTYPES]
            divergence = self._blame(changes, [run.events for run in runs], [])
        divergence = self._beyond_modules(divergence) or self._by_names()
        if divergence is None:
            return _Outcome(self.comparison)
        return _Outcome(self.comparison, divergence, self._touching(divergence.suspects))

    def _blame(self, changes: Any, events: Sequence[Any], wrong: list[str]) -> Divergence | None:
        found = on_mesh(recorded, self.subject, changes)
        truth, plain = events
        partial, experts = self._landed("sync_op_or_fn"), self._landed("count")
        return Blame(found, truth, plain, partial, experts).first(wrong)

    def _beyond_modules(self, divergence: Divergence | None) -> Divergence | None:
        """Name what lies beyond modules (a loss, a factor, a norm) where every module computes the right thing."""
        found = [f for f in self.comparison.findings if f.check != "dropout"]
        gradients = {f.what for f in found if f.check == "gradients"}
        factor, before = self.comparison.factor, divergence.suspects if divergence else ()
        if divergence is not None and divergence.phase == "forward":
            return divergence
        if any(f.what == "loss" for f in found):
            return Divergence("loss", "beyond the modules", "its value", 0, ("loss", *before))
        if factor is not None:
            what, problem = "every gradient", f"{factor:.4g} times what it should be"
            return Divergence(what, "beyond the modules", problem, 0, (what, *before))
        if gradients == {"norm"} and not self._drifts():
            return Divergence("norm", "beyond the modules", "of right gradients", 0, ("norm",))
        return None if gradients == {"norm"} else divergence

    def _drifts(self) -> list[Finding]:
        """Return findings for replicas of a parameter that got different gradients."""
        end = "as its gradient does"
        return [f for f in self.comparison.findings if f.problem.endswith(end)]

    def _by_names(self) -> Divergence | None:
        """Every module agrees without dropout: the findings themselves name a parameter."""
        for finding in (*self._drifts(), *self.comparison.findings):
            if "." in finding.what:
                path = parent_of(finding.what)
                return Divergence(path, finding.check, finding.what, finding.rank or 0, (path,))
        return None

    def _landed(self, kind: str) -> frozenset[str]:
        """Paths of directives of a kind: what leaves gradients partial, what has experts."""
        schedule, meant = self.subject.outline().schedule, ("all_reduce_twice", "num_experts")
        steps = zip(schedule.landed, schedule.history, strict=True)
        return frozenset(
            path for paths, (_, d) in steps if getattr(d, kind, None) in meant for path in paths
        )

    def _touching(self, paths: Sequence[str]) -> list[tuple[str, str]]:
        try:
            schedule = self.subject.outline().schedule
        except SlapoError:
            return []
        return directives_at(schedule, paths)


def references(subject: Subject) -> Tolerance:
    """The fp64 truth, and plain fp32 runs that add in different orders, to know its own error."""
    kinds = ("sdpa", "eager") if getattr(subject.cls, "_supports_sdpa", False) else ("eager",)
    truth = plain(subject, torch.float64, kinds[0])
    ways = [(kind, reverse) for kind in kinds for reverse in (False, True)]
    others = (plain(subject, DTYPES[1], *way, n) for n, way in zip(MORE, cycle(ways)))
    return Tolerance(truth, [plain(subject, DTYPES[1], *way) for way in ways], others)


def on_mesh(run: Callable[..., RankResult], subject: Subject, *arguments: Any) -> list[RankResult]:
    """The results of all ranks: of the process group that there is, or of threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if subject.mesh.world_size == 1:
            return [run(subject, *arguments)]
        if not dist.is_initialized():
            return emulate(run, subject, *arguments, mesh=subject.sizes, timeout_s=TIMEOUT_S)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, run(subject, *arguments))
        return everyone


def one_rank_run(
    run: Callable[..., RankResult], subject: Subject, changes: Any, dtype: torch.dtype, *more: Any
) -> RankResult:
    """The same schedule on a mesh of one rank, the whole batch at once."""
    with drawn_from(subject.seed):  # what no directive gives a stream of its own
        return run(alone_on_one_rank(subject), changes, dtype, *more)


def alone_on_one_rank(subject: Subject) -> Subject:
    """Return the same subject on a mesh of one rank."""
    return replace(
        subject, sizes=(1, 1, 1), schedule=one_rank(subject.schedule), knobs={}, like=subject
    )


def events_of_plain(subject: Subject, dtype: torch.dtype) -> Any:
    """One recorded step of the plain model on one rank; only its attention core is a module."""

    def seam(sch: Any) -> None:
        for pattern, directive in subject.outline().schedule.history:
            if directive.name == "core_attention":
                sch.do(pattern, directive)

    alone = replace(alone_on_one_rank(subject), schedule=seam)
    return recorded(alone, changes_for_comparison(subject.config), dtype).events
