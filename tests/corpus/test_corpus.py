"""Published silent bugs of parallel training: each is injected here, detected and named."""

from dataclasses import replace

import corpus_page
import pytest
from corpus_all import BUGS
from corpus_bug import CHECKERS, LAYOUTS
from corpus_checks import RIGHT, asked_of, damage, first_to_find, look

REAL, ROUNDING = (
    1e-2,
    2e-3,
)  # least difference from plain `transformers` with a bug, and most by rounding


def label(bug):
    """The id of a test."""
    return bug.name.replace(" ", "_")


def marked(bugs):
    """Mark the bugs: some run always, all in the full grid."""
    return [b if b.always else pytest.param(b, marks=pytest.mark.slow) for b in bugs]


def right_of(bugs):
    """Return one bug for each model, mesh and dropout, whose correct training is run."""
    cases = {(b.cls, b.config, b.dropout, b.layout): replace(b, fault=RIGHT, always=b.layout == "tp2") for b in bugs}  # fmt: skip
    return list(cases.values())


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    """Return the folder of the tiny checkpoints of all bugs."""
    return tmp_path_factory.mktemp("corpus")


@pytest.mark.parametrize("bug", marked(BUGS), ids=label)
def test_injected_bug_changes_the_training_and_is_reported_by_the_checker_listed_for_it(bug, root):
    """With all checks off the bug changes the training; the checker listed for the bug detects it and names the place."""
    assert damage(bug, root) > REAL
    found = look(bug, bug.checker, root) if bug.always else first_to_find(bug, root)
    assert found.checker == bug.checker
    if bug.checker:
        assert found.says(bug.named), found.names


@pytest.mark.slow
@pytest.mark.parametrize("bug", right_of(BUGS), ids=lambda b: f"{b.cls}-{b.layout}-{b.dropout}")
def test_training_without_injected_bug_equals_the_reference_and_no_checker_reports(bug, root):
    assert damage(bug, root) < ROUNDING
    assert not first_to_find(bug, root).checker


def test_every_injected_bug_has_a_unique_name_and_an_existing_checker():
    assert len({bug.name for bug in BUGS}) == len(BUGS)
    assert all(bug.threads and bug.met and bug.wrong and bug.layout in LAYOUTS for bug in BUGS)
    assert {bug.checker for bug in BUGS} <= {*CHECKERS, ""}
    assert all(bug.checker in asked_of(bug) for bug in BUGS if bug.checker)


def test_at_least_95_percent_of_the_published_bugs_have_a_checker_that_detects_them():
    found = [bug for bug in BUGS if bug.checker]
    assert len(found) >= 0.95 * len(BUGS)
    assert all(bug.named for bug in found)


def test_docs_page_on_injected_bugs_lists_every_bug():
    """The page equals the generated one but for the seconds, which depend on the machine."""
    text = corpus_page.PAGE.read_text(encoding="utf-8")
    seconds = corpus_page.measured(text)
    assert set(seconds) == {bug.name for bug in BUGS}, "run: python3 ci/run.py corpus"
    assert corpus_page.rendered(text, BUGS, seconds) == text, "run: python3 ci/run.py corpus"
