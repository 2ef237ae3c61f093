"""The side-by-side benchmark: speeds are reported only with equal losses; its files hold all results."""

import json
from types import SimpleNamespace

import pytest
import torch
from compare.peers import CONTENDERS
from compare.run import side_by_side, write_report
from compare.shapes import Work, shape, write
from compare.summary import percentile, summarize

pytestmark = pytest.mark.slow  # minutes in all: `ci/run.py grid`

WORK = Work("folder", batch_size=2, seq_len=10)


def team(name, losses=(4.0, 3.9, 3.8), seconds=(0.1, 0.2), norm=2.0, failure="", size=100):
    start = {
        "norm": norm, "parameter bytes": size, "peak bytes": size, "load s": 1.0,
        "first gradients s": 2.0, "read": None, "save s": None, "plan lines": 0,
    }  # fmt: skip
    return SimpleNamespace(
        name=name, losses=list(losses), seconds=list(seconds), start=start, failure=failure
    )


def test_benchmark_speed_ratio_divides_times_of_the_same_round():
    teams = [team("slapo_zoo", size=50), team("transformers", seconds=(0.3, 0.4))]
    found = summarize(teams, WORK, {"DTensor": "no plan"})
    assert found["green"]
    ours, plain = found["speed"]
    assert plain["time / ours"] == pytest.approx(2.5)  # median of the ratios 3 and 2
    assert plain["ours / its bytes"] == 0.5
    assert ours["tokens/s"] == pytest.approx(20 / 0.15)
    assert {row["contender"]: row["verdict"] for row in found["parity"]}["DTensor"] == "no plan"


@pytest.mark.parametrize(
    "wrong", [{"losses": (4.0, 3.9, 3.7)}, {"norm": 2.1}, {"norm": float("nan")}]
)
def test_benchmark_reports_no_speed_for_library_with_wrong_losses(wrong):
    found = summarize([team("slapo_zoo", **wrong), team("transformers")], WORK, {})
    assert not found["green"]
    assert found["speed"] == []
    peer = summarize([team("slapo_zoo"), team("transformers"), team("DTensor", **wrong)], WORK, {})
    assert [row["contender"] for row in peer["speed"]] == ["slapo_zoo", "transformers"]


def test_benchmark_reports_the_error_of_a_failed_library():
    found = summarize(
        [team("slapo_zoo"), team("transformers"), team("DTensor", failure="ValueError: x")],
        WORK,
        {},
    )
    assert found["parity"][2]["verdict"] == "did not train: ValueError: x"


def test_percentile_of_timings_interpolates_between_values():
    assert [percentile([4, 1, 3, 2, 5], share) for share in (0, 0.2, 0.5, 0.8, 1)] == pytest.approx(
        [1, 1.8, 3, 4.2, 5]
    )


def test_benchmark_report_writes_json_markdown_and_png(tmp_path):
    found = summarize([team("slapo_zoo"), team("transformers")], WORK, {"DTensor": "no plan"})
    files = write_report(
        {"tiny": {"work": {"rounds": 2}, **found}}, tmp_path / "new", "the command"
    )
    assert [file.name for file in files] == ["side.json", "side.md", "side.png"]
    data = json.loads(files[0].read_text())
    assert data["machine"]["torch"] == torch.__version__
    assert "GPU" in data["unmeasured"]
    text = files[1].read_text()
    assert "the command" in text
    assert "| DTensor | no plan |" in text


def test_benchmark_names_the_reason_when_a_library_has_no_tp_plan_for_a_family():
    gpt2 = shape("gpt2", quick=True)
    assert CONTENDERS["transformers tp"].why_not(gpt2) == "transformers has no tp plan for gpt2"
    assert CONTENDERS["DeepSpeed AutoTP"].why_not(gpt2) == "AutoTP refuses gpt2"
    assert not CONTENDERS["transformers tp"].why_not(shape("llama", quick=True))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_libraries_in_the_benchmark_have_equal_losses_or_a_known_reason_for_refusal(
    family, tmp_path
):
    write(shape(family, quick=True), tmp_path, seed=0)
    found = side_by_side(Work(str(tmp_path), 2, 16), rounds=1)
    verdicts = {row["contender"]: row["verdict"] for row in found["parity"]}
    for name, verdict in verdicts.items():
        refused = CONTENDERS[name].why_not(shape(family, quick=True))
        assert verdict == (refused or "same"), name
    told = {row["contender"]: row for row in found["speed"]}
    for name in ("slapo_zoo", "transformers", "slapo_zoo tp=1", "FSDP2", "Accelerate"):
        assert told[name]["save s"] > 0, name
    assert told["DTensor"]["save s"] is None
    assert told["slapo_zoo"]["read MiB"] < told["slapo_zoo tp=1"]["read MiB"]
    assert told["DTensor"]["plan lines"] > 0 == told["slapo_zoo"]["plan lines"]
