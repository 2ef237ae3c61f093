"""Jobs of `slapo-zoo tune`: which ranks, options and tolerance a configuration gets, and which the planner refuses."""

import dataclasses
from dataclasses import replace

import pytest
import torch

from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.tune import trial
from slapo_zoo.tune.grid import Grid
from slapo_zoo.tune.outcome import OK, Outcome
from slapo_zoo.tune.planner.layout import Layout
from slapo_zoo.tune.planner.layout_search import Planner
from slapo_zoo.tune.trial import Job, differs
from slapo_zoo.tune.tuning_job import forecasts, scope_of
from slapo_zoo.zoo.options import BuildOptions

pytestmark = pytest.mark.usefixtures("shared_dry_runs")

MIB = 2**20
TINY = {"n_layer": 4, "n_embd": 64, "n_head": 4, "vocab_size": 512, "n_positions": 64, "loss_type": "ForCausalLMLoss"}  # fmt: skip


def judged(*points, **fields):
    return forecasts(Job("gpt2", seq_len=64, changes=TINY, device="cpu", **fields), Grid(points))


def layouts_of(monkeypatch, *points, **fields):
    """Return the layouts that the planner is asked to forecast for configurations, and the planner's dtypes."""
    seen, own, any_one = [], Planner.forecast, []

    def forecast(self, layout):
        seen.append((layout, self.precision.dtype))
        any_one[:] = any_one or [own(self, Layout())]  # what it forecasts is of no account
        return any_one[0]

    monkeypatch.setattr(Planner, "forecast", forecast)
    judged(*points, **fields)
    return seen


@pytest.mark.parametrize("point", [{"cp": 4}, {"cp": 2, "dp": 2}, {"tp": 2, "pp": 2, "cp": None}])
def test_tuner_starts_as_many_ranks_as_the_sizes_of_a_configuration_multiply_to(point, monkeypatch):
    started = []
    monkeypatch.setattr(
        trial, "run_local", lambda _, world, *more, **options: started.append(world) or [Outcome(OK)]
    )  # fmt: skip
    trial.run(Job("gpt2", point))
    assert started == [4]


def test_layout_has_every_option_of_the_loader_that_the_planner_knows():
    chosen = {
        "pipeline_order": "interleaved_1f1b", "stages_per_rank": 4, "checkpoint_ratio": 0.5, "checkpoint_policy": "offload",
        "sequence_parallel": True, "dp_shard": 2, "zero_stage": 1, "cp_attention": "ulysses",
    }  # fmt: skip
    sizes = {"tp": 2, "pp": 3, "dp": 4, "cp": 5}
    found = Layout.of(BuildOptions(**chosen), Mesh(**sizes), 6, 7)
    assert found == Layout(**chosen, **sizes, rows=6, micro_batches=7)
    defaults = Layout()
    same = [f.name for f in dataclasses.fields(Layout)
            if getattr(found, f.name) == getattr(defaults, f.name)]  # fmt: skip
    assert not same, "give these another value above, so that the test sees them"
    assert Layout.of(BuildOptions(pipeline_order="zbv"), Mesh(pp=2), 1, None).stages_per_rank == 2


def test_tuner_forecasts_a_configuration_with_all_its_options_of_a_layout(monkeypatch):
    points = [
        {"cp": 2, "cp_attention": "ulysses", "dp": 2, "dp_shard": 4, "zero_stage": 1},
        {"pp": 2, "pipeline_order": "interleaved_1f1b", "stages_per_rank": 2, "micro_batches": 4},
        {"tp": 2, "sequence_parallel": True, "checkpoint_ratio": 0.5, "batch_size": 2},
    ]
    found = [layout for layout, _ in layouts_of(monkeypatch, *points)]
    assert found == [
        Layout(cp=2, cp_attention="ulysses", dp=2, dp_shard=4, zero_stage=1, rows=8),
        Layout(pp=2, pipeline_order="interleaved_1f1b", stages_per_rank=2, micro_batches=4, rows=2),
        Layout(tp=2, sequence_parallel=True, checkpoint_ratio=0.5, rows=2),
    ]


def test_tuner_refuses_no_configuration_that_fits_into_memory_thanks_to_zero_or_cp():
    rows, weights = {"batch_size": 32}, {"batch_size": 1, "dp": 4}
    assert set(judged(rows, {**rows, "cp": 4}, memory=64 * MIB)[1]) == {0}
    points = weights, {**weights, "dp_shard": 4}
    assert set(judged(*points, memory=int(10.3 * MIB))[1]) == {0}


def test_tuner_refuses_no_ring_for_its_memory_which_the_planner_does_not_simulate():
    ring = {"batch_size": 32, "cp": 4, "cp_attention": "ring"}
    expected, refused = judged({**ring, "cp_attention": "gather"}, ring, memory=16 * MIB)
    assert set(refused) == {0}
    assert expected[1] == expected[0]


def test_tuner_refuses_sizes_of_zero_that_the_loader_refuses():
    _, refused = judged({"dp": 2, "dp_shard": 4}, {"dp": 2, "zero_stage": 1}, {"dtype": "int8"})
    assert "does not divide dp=2" in refused[0]
    assert "nothing is sharded" in refused[1]
    assert "not a floating torch dtype" in refused[2]


def test_tuner_forecasts_as_many_micro_batches_as_a_training_step_takes_if_none_are_given(
    monkeypatch,
):
    zbv = {"pp": 2, "pipeline_order": "zbv", "batch_size": 6}
    found = layouts_of(monkeypatch, {}, {"pp": 2, "batch_size": 16}, zbv)
    assert [(x.micro_batches, x.rows) for x, _ in found] == [(1, 8), (4, 4), (6, 1)]


def test_tuner_forecasts_a_configuration_in_its_own_precision(monkeypatch):
    points = [{}, {"dtype": "bf16"}, {"precision": "bf16"}, {"precision": "fp32"}]
    found = [dtype for _, dtype in layouts_of(monkeypatch, *points)]
    assert found == ["float32", "bfloat16", "bfloat16", "float32"]


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [({"dtype": "bf16"}, "bfloat16"), ({"dtype": "fp16"}, "float16"), ({"dtype": "torch.float32"}, "float32")],
)  # fmt: skip
def test_dtypes_of_a_tuning_job_have_one_name_in_results_and_tolerance(fields, dtype):
    job = Job("gpt2", probe=2.0, **fields)
    assert job == Job("gpt2", probe=2.0, dtype=dtype)
    assert scope_of(job).setting["dtype"] == dtype
    assert scope_of(replace(job, point={"precision": "bf16"})).setting["dtype"] == "bfloat16"
    assert (differs(2.03, job) == "") == (dtype != "float32")
    assert differs(2.2, job)


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"point": {"dtype": "bf16"}}, 0.05), ({"point": {"dtype": torch.float16}}, 0.02),
        ({"point": {"precision": "bf16"}}, 0.05), ({"point": {"precision": "fp32"}}, 1e-3),
        ({"point": {"dtype": "float32"}, "dtype": "bf16"}, 0.05), ({"dtype": "float64"}, 1e-3),
    ],
)  # fmt: skip
def test_tolerance_of_a_tuned_loss_follows_the_dtypes_of_both_runs(fields, allowed):
    job = Job("gpt2", probe=1.0, **fields)
    assert differs(1 + 0.9 * allowed, job) == ""
    assert differs(1 + 1.1 * allowed, job)


def test_tuned_precision_chooses_the_dtype_of_the_parameters():
    found = {name: Job("gpt2", {"precision": name}).options.dtype for name in ("bf16", "bf16-pure")}
    assert found == {"bf16": torch.float32, "bf16-pure": torch.bfloat16}
    assert Job("gpt2", {"kernels": "geglu+rms_norm"}).options.kernels == ["geglu", "rms_norm"]
