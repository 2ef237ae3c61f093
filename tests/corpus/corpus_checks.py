"""Checks that look for a bug: which one finds it, what it names, and in how many seconds."""

import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from corpus_bug import CHECKERS, FILE, LAYOUTS, LOOP, SCHEDULE, Bug, Fault
from corpus_training import Trained, config_of, distance, on_rank, plain, quiet

from mutants import mutate
from slapo_zoo import SlapoError, create_schedule, emulate
from slapo_zoo.hf.models import no_progress_bars
from slapo_zoo.model.missing_sums import missing_sums
from slapo_zoo.verify.case import Trial, case_for, write_weights
from slapo_zoo.verify.context import Verify
from slapo_zoo.verify.core import verify
from slapo_zoo.verify.report import Report, VerifyError

RIGHT = Fault()
LATEST = 5  # modules that a report may name before the one that is to blame
TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Found:
    """Result of a checker for a bug.

    Args:
        checker: of CHECKERS; empty where none finds it.
        names: modules and arguments that it names, or its whole text.
        seconds: of CPU time of that checker alone; ranks are threads of this process.
    """

    checker: str = ""
    names: tuple[str, ...] = ()
    seconds: float = 0.0

    def says(self, named: str) -> bool:
        """Return True where the module (its number left out) or the argument is named."""
        if "*" not in named:
            return any(named in name for name in self.names)
        culprit = re.compile(
            r"(?<![\w.])" + re.escape(named).replace(r"\*", r"[^.\s]*") + r"(?!\w)"
        )
        return any(culprit.search(name) for name in self.names)


@cache
def _weights(cls: str, config: Any, root: Path) -> tuple[Path, Any]:
    """A tiny checkpoint of a family, and its config."""
    folder = root / f"{cls}-{abs(hash(config))}"
    made = config_of(cls, config)
    with no_progress_bars():
        return folder, write_weights(made, getattr(transformers, cls), folder, 0)


def trial_of(bug: Bug, root: Path) -> Trial:
    """The model, the mesh and the batches of a bug, its schedule mutated."""
    sizes, knobs = LAYOUTS[bug.layout]
    folder, config = _weights(bug.cls, bug.config, root)
    case = case_for(config, getattr(transformers, bug.cls), sizes, folder)
    right = Trial(case, sizes, "zoo", dict(knobs))
    if not bug.fault.edits:
        return right
    steps = right.outline().schedule.history
    own = {k: v for k, v in knobs.items() if k != "sequence_parallel"}  # the steps say it
    return replace(right, schedule=mutate(bug.fault, steps), knobs=own)


def right_trial(bug: Bug, root: Path) -> Trial:
    """Return the same trial without the bug."""
    return trial_of(replace(bug, fault=RIGHT), root)


@cache
def _reference(
    cls: str, config: Any, dropout: float, layout: str, right: Any, root: Path
) -> Trained:
    """Plain `transformers`; with dropout, or a loop that it does not know, our right one on one rank."""
    bug = Bug("", (), "", "", cls, RIGHT, "", "", layout, config, dropout)
    trial = right_trial(bug, root)
    if not dropout and right is None:
        return plain(trial)
    return on_rank(trial.on_one_rank(), right or RIGHT.training, dropout, False, False)


def damage(bug: Bug, root: Path) -> float:
    """Measure the difference of a training with the bug, all checks off, from plain `transformers`."""
    right = bug.fault.training.right
    want = _reference(bug.cls, bug.config, bug.dropout, bug.layout, right, root)
    with quiet():
        return distance(_trained(bug, trial_of(bug, root), False), want)


def _trained(bug: Bug, trial: Trial, guarded: bool, watched: bool = False) -> list[Trained]:
    arguments = (trial, bug.fault.training, bug.dropout, guarded, watched)
    with bug.fault.patch(), nullcontext() if guarded else _checks_off():
        return emulate(on_rank, *arguments, mesh=trial.sizes, timeout_s=TIMEOUT_S)


@contextmanager
def _checks_off() -> Iterator[None]:
    """Context in which all checks with an interval are off."""
    with (
        mock.patch("slapo_zoo.model.gradients.step_guard._require_own_scaler", return_value=None),
        mock.patch("slapo_zoo.weights.training_folder.TrainingFolder.check_values"),
    ):
        yield


def _texts(run: Callable[[], Any]) -> tuple[str, ...]:
    """Return the texts of the errors and warnings of this package in a run."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            run()
        except SlapoError as error:
            return (str(error),)
    return tuple(str(w.message) for w in seen if w.category.__module__.startswith("slapo_zoo"))


def _build(bug: Bug, root: Path) -> tuple[str, ...]:
    trial = trial_of(bug, root)
    return _texts(trial.outline) or tuple(missing_sums(trial.outline().schedule))


def _guard(bug: Bug, root: Path) -> tuple[str, ...]:
    return _texts(lambda: _trained(bug, trial_of(bug, root), True))


def _watch(bug: Bug, root: Path) -> tuple[str, ...]:
    return _texts(lambda: _trained(bug, trial_of(bug, root), False, True))


def _verify(bug: Bug, root: Path) -> tuple[str, ...]:
    sizes, knobs = LAYOUTS[bug.layout]
    schedule = trial_of(bug, root).schedule
    own = {k: v for k, v in knobs.items() if schedule == "zoo" or k != "sequence_parallel"}
    config = config_of(bug.cls, bug.config)
    with bug.fault.patch(), quiet():
        return _named_by(verify(config, bug.cls, sizes, schedule, quick=False, **own))


def _named_by(report: Report) -> tuple[str, ...]:
    """Return the modules that a report names or, where it names none, its findings."""
    if report.ok:
        return ()
    found = tuple(finding.what for finding in report.findings)
    return report.divergence.suspects[:LATEST] if report.divergence else found or (str(report),)


def _context(bug: Bug, root: Path) -> tuple[str, ...]:
    trial = trial_of(bug, root)
    with bug.fault.patch(), quiet():
        reports = emulate(_in_context, trial, mesh=trial.sizes, timeout_s=TIMEOUT_S)
    return next((names for names in map(_named_by, reports) if names), ())


def _in_context(trial: Trial) -> Any:
    case = trial.case
    with no_progress_bars():
        model = case.cls.from_pretrained(case.folder, dtype=torch.float32, **case.changes())
    inputs = {k: v for k, v in case.batch.items() if k != "labels"}
    sch = create_schedule(model)
    try:
        with Verify(sch, inputs) as context:
            trial.schedule(sch)
    except VerifyError:
        pass
    return context.report


CHECKS: dict[str, Callable[[Bug, Path], tuple[str, ...]]] = {
    "build": _build, "load": _guard, "guard": _guard, "verify": _verify, "Verify": _context, "watch": _watch,
}  # fmt: skip
NONE_OF = {
    SCHEDULE: {"load"},
    LOOP: {"build", "load", "Verify"},
    FILE: {"build", "guard", "Verify", "watch"},
}


def asked_of(bug: Bug) -> list[str]:
    """Return the checkers that apply to the kind of a bug: `verify` does not read a user's loop."""
    own_loop = bug.fault.training is not RIGHT.training and bug.fault.patch is nullcontext
    left_out = NONE_OF[bug.fault.kind] | ({"verify"} if own_loop else set())
    return [name for name in CHECKERS if name not in left_out]


def look(bug: Bug, checker: str, root: Path) -> Found:
    """Return the result of one checker."""
    begin = time.process_time()
    names = CHECKS[checker](bug, root)
    seconds = time.process_time() - begin
    return Found(checker, names, seconds) if names else Found()


def first_to_find(bug: Bug, root: Path) -> Found:
    """The first checker that finds a bug and names it, in the order in which a user meets them."""
    found = Found()
    for checker in asked_of(bug):
        seen = look(bug, checker, root)
        if seen.checker and bug.named and seen.says(bug.named):
            return seen
        found = found if found.checker else seen
    return found
