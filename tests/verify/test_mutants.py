"""Broken schedules of the corpus: each is detected, and its faulty module is named."""

import re

import pytest
import torch

from mutants import LAYOUTS, MUTANTS, config_of, mutate
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.verify.compare import Comparison, Result, Tolerance
from slapo_zoo.verify.core import verify
from slapo_zoo.zoo.outline import Outline


def label(mutant):
    """The id of a test; a parameter that is no mutant names itself."""
    return f"{mutant.cls}-{mutant.layout}-{mutant.name}".replace(" ", "_")


def verified(mutant):
    """The report of a mutant."""
    sizes, knobs = LAYOUTS[mutant.layout]
    config = config_of(mutant)
    outline = Outline(config, mutant.cls, Mesh(*sizes), torch.float32, **knobs)
    schedule = mutate(mutant, outline.schedule.history)
    own = {k: v for k, v in knobs.items() if k != "sequence_parallel"}  # the steps say it
    return verify(config, mutant.cls, sizes, schedule, quick=False, **own)


def named(mutant, report):
    """Return the position of the faulty module among the suspects, or None."""
    culprit = re.compile(re.escape(mutant.culprit).replace(r"\*", "[^.]*"))
    suspects = report.divergence.suspects if report.divergence else ()
    return next((i for i, path in enumerate(suspects) if culprit.fullmatch(path)), None)


def every_other(mutants):
    """Mark every other mutant slow."""
    return [m if i % 2 else pytest.param(m, marks=pytest.mark.slow) for i, m in enumerate(mutants)]


def test_corpus_of_broken_schedules_has_40_entries_over_10_model_classes():
    assert len(MUTANTS) >= 40
    assert len({mutant.cls for mutant in MUTANTS}) >= 10


@pytest.mark.one_in(5, 2)
@pytest.mark.parametrize("mutant", every_other(MUTANTS), ids=label)
def test_verify_detects_each_broken_schedule_and_names_its_module(mutant):
    report = verified(mutant)
    assert not report.ok, f"not caught: {mutant}"
    place = named(mutant, report)
    assert place is not None, f"not named: {report}"
    assert place <= 4, f"named late: {report}"


def test_verify_fails_a_schedule_that_unties_a_weight_and_names_the_weight():
    report = verified(next(m for m in MUTANTS if m.name == "head untied"))
    assert "lm_head.weight: the parameter was tied to transformer.wte.weight" in report.error
    assert report.divergence.path == "lm_head"


def test_verify_report_names_a_tensor_of_another_shape_with_both_shapes():
    """The checks go on after the shape, and the report names the place."""
    plain, found = Result(loss=1.0, weights={"w": torch.zeros(3)}), Comparison()
    near = Tolerance(plain, [plain])
    near.check(found, "optimizer step", "w", torch.zeros(2), lambda result: result.weights["w"])
    (finding,) = found.findings
    assert (finding.check, finding.what) == ("optimizer step", "w")
    assert "found shape [2], expected [3]" in str(finding)
