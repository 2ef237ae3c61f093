"""The comparison that `verify` and derivations share: it detects a fault in the cases of both."""

from dataclasses import replace

import pytest
import torch
import transformers

from slapo_zoo.language.primitives import ForkRng
from slapo_zoo.verify import judge as judging
from slapo_zoo.verify.case import Trial, case_for
from slapo_zoo.verify.compare import Comparison, FixedTolerance, Result
from slapo_zoo.verify.derive import Search
from slapo_zoo.verify.judge import judge
from slapo_zoo.verify.tiny_case import tiny_case
from slapo_zoo.zoo.tiny_config import Sizes, tiny

MESH, SP = (2, 1, 1), {"sequence_parallel": True}


@pytest.fixture(scope="module")
def search(tmp_path_factory):
    """Return a search for a table of CTRL, whose blocks have dropout on sequence shards."""
    config = tiny(transformers.CTRLConfig(resid_pdrop=0.1, embd_pdrop=0.1))
    folder = tmp_path_factory.mktemp("ctrl")
    case = tiny_case(config, transformers.CTRLLMHeadModel, folder, Sizes())
    return Search(case.config, case, MESH, SP)


@pytest.fixture(params=["derived", "verified"])
def case(request, search):
    """Return the same weights as a case of the search in fp64, and as one of `verify` in fp32."""
    if request.param == "derived":
        return search.case
    return case_for(search.case.config, search.case.cls, MESH, search.case.folder)


# the correct table in fp32: test_core.py; the faults: one in each way
IN_FP64 = pytest.mark.parametrize(
    "case", ["derived", pytest.param("verified", marks=pytest.mark.slow)], indirect=True
)
IN_FP32 = pytest.mark.parametrize(
    "case", ["verified", pytest.param("derived", marks=pytest.mark.slow)], indirect=True
)


def right_table(search):
    return search.candidates()[0](search.case.config, search.small)


@IN_FP64
def test_verification_reports_no_difference_for_a_correct_schedule_table(case, search):
    """The table passes in fp32 too: the tolerance depends on the dtype."""
    found = judge(Trial(case, MESH, right_table(search), SP))
    assert not found.findings
    assert {"outputs", "loss", "gradients", "replicas", "dropout"} <= found.counts.keys()


@pytest.mark.parametrize("always", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", ["verified"], indirect=True)
def test_verification_drops_a_small_gradient_error_that_vanishes_under_rounding_noise(
    case, search, monkeypatch, always
):
    """An input of a ReLU may round to the other side of 0 in one run; a wrong schedule is wrong in every run."""
    real = judging.scheduled

    def off_by_2_percent(trial, dtype, save=None, shake=None):
        result = real(trial, dtype, save, shake)
        name = next(iter(result.grads), None)
        if name and (always or shake is None):
            result.grads[name].view(-1)[0] += 0.02 * result.grads[name].abs().max()
        return result

    monkeypatch.setattr(judging, "scheduled", off_by_2_percent)
    found = judge(Trial(case, MESH, right_table(search), SP)).findings
    assert bool(found) is always, found
    assert {finding.check for finding in found} <= {"gradients"}


@IN_FP32
def test_verification_detects_equal_dropout_masks_on_ranks_with_different_tokens(case, search):
    """The ranks hold different tokens and drop the same elements of them, which no rank alone can notice."""
    table = right_table(search)
    rows = [
        (pattern, any(getattr(d, "tokens", "") for d in rule), rule)
        for pattern, rule, *_ in table.body
    ]
    alike = tuple((pattern, (ForkRng(),) if wrong else rule) for pattern, wrong, rule in rows)
    assert alike != table.body
    found = judge(Trial(case, MESH, replace(table, body=alike), SP))
    assert {finding.check for finding in found.findings} == {"dropout"}
    assert "error" in found.words()


@IN_FP64
def test_verification_detects_replicated_weights_that_drift_apart(case, search):
    """Without an all-reduce of the gradient before a sharded product, each rank trains different norms."""
    table = right_table(search)
    unsummed = tuple(
        (row[0], tuple(d for d in row[1] if getattr(d, "mode", "") != "bwd_post"))
        for row in table.body
    )
    assert unsummed != table.body
    found = judge(Trial(case, MESH, replace(table, body=unsummed)))
    drifts = [finding for finding in found.findings if finding.check == "replicas"]
    assert drifts
    assert drifts[0].problem == "differs from that of rank 0, as its gradient does"


def test_verification_accepts_equal_infinities_of_a_mask_and_rejects_nan():
    """Only minus infinity is right where the expected value is minus infinity, and NaN where some values are NaN."""
    truth = torch.tensor([1.0, -torch.inf, torch.nan], dtype=torch.float64)
    near = FixedTolerance(Result(outputs={"logits": truth}), 1e-4)
    for found, right in (
        ([1.0, -torch.inf, torch.nan], True),
        ([1.0, -1e9, torch.nan], False),
        ([torch.nan, -torch.inf, torch.nan], False),
        ([1.0, -torch.inf, 0.0], False),
    ):
        into = Comparison()
        near.check(into, "outputs", "logits", torch.tensor(found), lambda r: r.outputs["logits"])
        assert (not into.findings) == right, found


def test_saved_files_whose_model_does_not_run_are_a_finding_beside_the_others(search, monkeypatch):
    case, into = search.case, Comparison()

    def fail(self, *args, **kwargs):
        raise RuntimeError("no such kernel")

    plain = case.cls.from_pretrained(case.folder)
    weights = {name: p.detach() + 1 for name, p in plain.named_parameters()}
    monkeypatch.setattr(case.cls, "forward", fail)
    judging.files(into, case.folder, case.cls, case.batch, Result(weights=weights))
    said = [(finding.what, finding.problem) for finding in into.findings]
    assert said[0] == ("forward", "RuntimeError: no such kernel")
    assert {what for what, _ in said[1:]} == weights.keys()
