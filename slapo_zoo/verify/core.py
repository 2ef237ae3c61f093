"""Comparison of a sharded model with plain `transformers`; the report names the directives (`shard`, ...) to blame."""

import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from slapo_zoo.errors import ArchitectureError, MeshError, ScheduleError, SlapoError
from slapo_zoo.hf import models as hf
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.pipeline.orders import StageMap
from slapo_zoo.verify.blame import Blame, parent_of
from slapo_zoo.verify.case import Trial, case_for, write_weights
from slapo_zoo.verify.compare import Comparison, Divergence, Finding
from slapo_zoo.verify.judge import judge, on_mesh, one_rank_run, recorded
from slapo_zoo.verify.report import Report
from slapo_zoo.zoo.table import families
from slapo_zoo.zoo.tiny_config import tiny_like

DTYPES = (torch.float64, torch.float32)  # of the truth, and of plain runs in the dtype under test


@hf.no_progress_bars()
def verify(
    config: Any, auto_class: Any = None, mesh: tuple[int, int, int] = (2, 1, 1),
    schedule: Any = "zoo", quick: bool = True, seed: int = 0, folder: Path | None = None,
    **knobs: Any,
) -> Report:  # fmt: skip
    """Run a sharded model on a mesh, every rank a thread of this process; report how it differs from the plain model.

    Args:
        config: a config of `transformers`.
        auto_class: class of the model with its head; None takes the config's own class.
        mesh: sizes of tp, pp and dp.
        schedule: "zoo" (the built-in one of the family), a Schedule, a list of (pattern of module paths, directive), or
            a function that shards the Schedule that it gets. "auto" means "zoo" if there is one, and is refused
            otherwise, as a derived schedule is verified when it is derived.
        quick: verify a small config of the same family; False verifies the given one.
        seed: seed of weights, batch and dropout.
        folder: checkpoint to take weights from; None draws random ones. It is not read with `quick`.
        knobs: arguments of from_pretrained, such as sequence_parallel=True, pipeline_order="1f1b", stages_per_rank=2,
            cp=2 or kernels="auto"; by default no fused kernels are used, as only the schedule is compared.
    """
    begin = time.perf_counter()
    hf.register_models()
    schedule = known_schedule(config, schedule)
    cls = hf.resolve_class(config, auto_class)
    stages = StageMap.make(
        knobs.get("pipeline_order", "1f1b"), mesh[1], knobs.get("stages_per_rank")
    ).num_stages
    small = tiny_like(config, Mesh(*mesh), stages) if quick else config
    with tempfile.TemporaryDirectory(prefix="slapo_zoo-verify-") as scratch:
        if folder is None or quick:
            folder = Path(scratch, "weights")
            small = write_weights(small, cls, folder, seed)
        trial = Trial(case_for(small, cls, mesh, folder, seed), mesh, schedule, knobs)
        found = _Verification(trial, Path(scratch)).run()
    seconds = round(time.perf_counter() - begin, 2)
    return replace(found, config="shrunken" if quick else "given", seconds=seconds)


def known_schedule(config: Any, schedule: Any) -> Any:
    """Return "zoo" (the built-in sharding rules of the config's family) if `schedule` is "auto", else `schedule`.
    ArchitectureError is raised if the schedule is "auto" and the family has no built-in rules.
    """
    if not (isinstance(schedule, str) and schedule == "auto"):
        return schedule
    if config.model_type in families():
        return "zoo"
    problem = f"found no built-in sharding rules of {config.model_type}; derived rules are verified when they are derived"
    hint = "slapo-zoo derive MODEL --tp N --pp N derives and verifies them; --write makes them built-in"
    raise ArchitectureError("verify", 'schedule="auto"', problem, hint)


class _Verification:
    """Runner of all checks of one trial (a schedule on a mesh); temporary files are written below `scratch`."""

    def __init__(self, trial: Trial, scratch: Path):
        self.trial, self.scratch = trial, scratch
        self.comparison = Comparison()

    def run(self) -> Report:
        """Run every check and return the report; if a check fails, search for the first module that differs."""
        try:
            self.trial.outline()
        except (ArchitectureError, MeshError) as error:
            if self.trial.schedule == "zoo":
                raise  # the arguments are wrong, not the schedule
            return self._does_not_run(error)
        except SlapoError as error:
            return self._does_not_run(error)
        try:
            judge(self.trial, self.comparison, self.scratch)
        except Exception as error:
            return self._does_not_run(error)
        return self._reported(self._located() if self.comparison.findings else None)

    def _reported(self, divergence: Divergence | None, error: str | None = None) -> Report:
        schedule, case = None, self.trial.case
        with suppress(SlapoError):
            schedule = self.trial.outline().schedule if divergence else None
        found = self.comparison
        return Report.of(case.cls, self.trial.mesh, found, divergence, schedule, error, case.seed)

    def _does_not_run(self, error: Exception) -> Report:
        """Return the report of a schedule that raised `error`; it names the module that was running as first difference."""
        text = f"{type(error).__name__}: {error}"
        named = isinstance(error, ScheduleError)
        paths = (str(error.where),) if named else self._where_it_raises() or self._named_by(error)
        suspects = tuple(dict.fromkeys((*paths, *map(parent_of, paths))))
        divergence = Divergence(paths[0], "error", "its call", 0, suspects) if paths else None
        return self._reported(divergence, text)

    def _named_by(self, error: Exception) -> tuple[str, ...]:
        """Return the path of the module whose parameter the text of an error names, in a tuple; () if it names none."""
        path = str(getattr(error, "what", "")).rpartition(".")[0]
        known = path and path in dict(self.trial.outline().model.named_modules())
        return (path,) if known else ()

    def _where_it_raises(self) -> tuple[str, ...]:
        """Run a step again; return paths of the module that raises and of the module that ran before it, () if none raises."""
        try:
            on_mesh(recorded, self.trial, DTYPES[1])
        except Exception as error:
            return getattr(error, "slapo_modules", ())
        return ()

    def _located(self) -> Divergence | None:
        """Search for the first place where the sharded model differs from the plain one; None if none is found. All
        modules' tensors of a new step are compared, with dropout if only the check with dropout failed; with cp > 1,
        where a rank has only some tokens, only the findings of the checks are read.
        """
        if self.trial.mesh.cp > 1:
            return self._beyond_modules(None) or self._at_named_parameter()
        wrong = [f.what for f in self.comparison.findings if f.check == "gradients"]
        divergence = None
        if {f.check for f in self.comparison.findings} != {"dropout"}:
            events = [events_of_plain(self.trial, dtype) for dtype in DTYPES]
            divergence = self._blame(False, events, [w for w in wrong if "." in w])
        elif self.trial.case.draws:
            alone = self.trial.on_one_rank()
            runs = [one_rank_run(recorded, alone, dtype, True) for dtype in DTYPES]
            divergence = self._blame(True, [run.events for run in runs], [])
        return self._beyond_modules(divergence) or self._at_named_parameter()

    def _blame(self, dropout: bool, events: Sequence[Any], wrong: list[str]) -> Divergence | None:
        found = on_mesh(recorded, self.trial, DTYPES[1], dropout)
        truth, plain = events
        partial, experts = self._paths_with("sync_op_or_fn"), self._paths_with("count")
        return Blame(found, truth, plain, partial, experts).first(wrong)

    def _beyond_modules(self, divergence: Divergence | None) -> Divergence | None:
        """Return "loss", "every gradient" (all wrong by one factor) or "norm" as the place of the difference if a check
        found it wrong, else `divergence`, the first module that differs (or None). A module that differs in the forward
        is always returned. If only the gradient norm is wrong, since ranks differ in the gradient of a replicated
        parameter, return None.
        """
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
        if gradients == {"norm"} and not self._replica_findings():
            return Divergence("norm", "beyond the modules", "of right gradients", 0, ("norm",))
        return None if gradients == {"norm"} else divergence

    def _replica_findings(self) -> list[Finding]:
        """Return the findings on replicated parameters whose values and gradients differ between the ranks that hold them."""
        end = "as its gradient does"
        return [f for f in self.comparison.findings if f.problem.endswith(end)]

    def _at_named_parameter(self) -> Divergence | None:
        """Return a Divergence at the module of the first parameter that a finding of the checks names; None without."""
        for finding in (*self._replica_findings(), *self.comparison.findings):
            if "." in finding.what:
                path = parent_of(finding.what)
                return Divergence(path, finding.check, finding.what, finding.rank or 0, (path,))
        return None

    def _paths_with(self, field: str) -> frozenset[str]:
        """Return the paths of modules that a directive changed whose attribute `field` is "all_reduce_twice" (`field`
        "sync_op_or_fn": their output gradients are partial sums) or "num_experts" ("count": their experts are sharded).
        """
        schedule, meant = self.trial.outline().schedule, ("all_reduce_twice", "num_experts")
        steps = zip(schedule.landed, schedule.history, strict=True)
        found = (paths for paths, (_, d) in steps if getattr(d, field, None) in meant)
        return frozenset(path for paths in found for path in paths)


def events_of_plain(trial: Trial, dtype: torch.dtype) -> Any:
    """Return {Event (path, "in" or "out", ...): Seen (copy of that argument or output, and its gradient)} of one step
    of the plain model of `trial` on one rank. To record q, k and v too, its attentions get a new child `core_attn`.
    """

    def seam(sch: Any) -> None:
        for pattern, directive in trial.outline().schedule.history:
            if directive.name == "core_attention":
                sch.do(pattern, directive)

    alone = replace(trial.on_one_rank(), schedule=seam)
    return one_rank_run(recorded, alone, dtype).events
