"""Forecasts against real runs: FLOPs, saved activations, weights, and pipeline cuts."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from parity import Case, checkpoint, tiny_config
from slapo_zoo import AutoScheduledModel
from slapo_zoo.cli.main import main
from slapo_zoo.hf.example_inputs import training_batch
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.pipeline import unit_costs as costs
from slapo_zoo.tune.planner.hardware import find_hardware
from slapo_zoo.tune.planner.layout import Layout, places_of
from slapo_zoo.tune.planner.layout_report import forecast
from slapo_zoo.tune.planner.layout_search import Planner
from slapo_zoo.zoo.outline import Outline
from slapo_zoo.zoo.table import table_for

pytestmark = pytest.mark.usefixtures("shared_dry_runs")

GPT2 = Case("GPT2LMHeadModel", ("tokens",), (("n_layer", 8),))
CASES = [
    GPT2,
    Case("BertForMaskedLM", ("tokens",)),
    Case("T5ForConditionalGeneration", ("tokens",)),
    Case("LlamaForCausalLM", ("tokens",)),
    Case("AlbertForMaskedLM", ("tokens",)),
]


def outline_of(case, mesh=None, **options):
    config, cls = tiny_config(case)
    return Outline(config, cls, mesh or Mesh(), torch.float32, **options)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.cls)
def test_forecast_flops_equal_those_of_the_torch_flop_counter(case, monkeypatch):
    monkeypatch.setattr(costs, "ELEMENT", 0.0)
    costs._unit_costs.cache_clear()
    outline = outline_of(case)
    found = costs.unit_costs(outline.skeleton, outline.units, seq_len=8)
    costs._unit_costs.cache_clear()
    config, cls = tiny_config(case)
    config._attn_implementation = "eager"
    with FlopCounterMode(display=False) as counter:
        cls(config)(**training_batch(outline.skeleton, 1, 8))
    assert sum(cost.forward for cost in found) == counter.get_total_flops()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", CASES[:4], ids=lambda case: case.cls)
def test_forecast_activation_bytes_equal_the_bytes_saved_by_autograd(case):
    """Equal within 10 %: fused attention on real tensors may copy where it makes a view on fake ones."""
    config, cls = tiny_config(case)
    config.architectures = [cls.__name__]
    model = AutoScheduledModel.from_config(config, kernels="reference").eval()
    seen = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved = 0

    def keep(tensor):
        nonlocal saved
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            saved += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(**training_batch(model, 2, 8))
    planner = Planner(config, find_hardware("a100"), 8, "fp32")
    _, (stage,) = forecast(planner, Layout(rows=2))
    assert stage.activations == pytest.approx(saved, rel=0.1)


def planner_of(case):
    config, cls = tiny_config(case)
    return Planner(config, find_hardware("a100"), 12, "fp32", auto_class=cls)


def test_forecast_of_gpipe_and_1f1b_has_equal_bubbles_and_in_flight_activations_of_the_order():
    planner = planner_of(GPT2)
    one, whole = forecast(planner, Layout(micro_batches=8))
    runs = {order: forecast(planner, Layout(pp=4, micro_batches=8, pipeline_order=order))
            for order in ("1f1b", "gpipe")}  # fmt: skip
    found, stages = runs["1f1b"]
    assert one.step.bubble == 0
    assert found.step.bubble == runs["gpipe"][0].step.bubble > 0.2
    first, last = found.ranks[0], found.ranks[-1]
    assert first.activations == 4 * stages[0].activations
    assert last.activations == stages[-1].activations
    assert runs["gpipe"][0].ranks[0].activations == 8 * stages[0].activations
    assert sum(stage.flops for stage in stages) == pytest.approx(whole[0].flops)
    tied = 99 * 30 * 4  # the embedding is on the first rank and on the last
    assert sum(rank.weights for rank in found.ranks) == one.ranks[0].weights + tied


def test_forecast_with_recomputation_has_less_memory_and_more_flops():
    planner, at = planner_of(GPT2), Layout(pp=2, micro_batches=4)
    (kept, before), (again, after) = (
        forecast(planner, replace(at, checkpoint_ratio=ratio)) for ratio in (0.0, 1.0)
    )
    assert again.ranks[0].activations < kept.ranks[0].activations / 2
    more = sum(s.flops for s in after) / sum(s.flops for s in before)
    assert 1.15 < more <= 4 / 3


LAYOUTS = [(1, 2, "1f1b"), (2, 1, "1f1b"), (1, 2, "gpipe")]
ANSWERS = [  # a layout of each family at every run, all of them in the slow grid
    pytest.param(case, *layout, marks=[pytest.mark.slow] * (j != i % 3), id=f"{case.cls}-{layout}")
    for i, case in enumerate(CASES[:4])
    for j, layout in enumerate(LAYOUTS)
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("case", "tp", "pp", "order"), ANSWERS)
def test_forecast_of_one_layout_equals_that_layout_in_the_plan_search(
    case, tp, pp, order, tmp_path, capsys
):
    """`plan` of one layout and `plan --gpus`, which tries it among others, agree to the byte."""
    planner = planner_of(case)
    virtual = places_of(Layout(pp=pp, pipeline_order=order)).per_rank
    orders = [order] if pp > 1 else None
    searched = planner.search(tp * pp, 4, orders).feasible
    at = Layout(tp, pp, 1, 1, 4, order, virtual)
    (same,) = [found for found in searched if found.layout == at]
    found, stages = forecast(planner_of(case), at)
    assert found == same
    assert [s.rank for s in stages] == [places_of(at).rank_of(i) for i in range(len(stages))]


def test_expensive_head_or_deeper_decoder_moves_the_pipeline_cuts_to_later_blocks():
    plain = outline_of(GPT2, Mesh(pp=2)).state.cuts
    dear = Case("GPT2LMHeadModel", ("tokens",), (("n_layer", 8), ("vocab_size", 6000)))
    assert plain == [("transformer.h.3", 0)]
    assert outline_of(dear, Mesh(pp=2)).state.cuts[0][0] > "transformer.h.3"
    uneven = (("num_layers", 2), ("num_decoder_layers", 6))
    t5 = outline_of(Case("T5ForConditionalGeneration", ("tokens",), uneven), Mesh(pp=2))
    assert t5.state.cuts[0][0].startswith("decoder.block")


def test_cost_estimate_includes_a_head_whose_forward_depends_on_data():
    """T5's classifier reads the last end token of each row, which a dry run without data cannot know."""
    case = Case("T5ForSequenceClassification", ("class",), (("num_labels", 3),))
    found = costs.unit_costs(outline_of(case).skeleton, outline_of(case).units, seq_len=8)
    assert "classification_head" in {cost.unit for cost in found}
    assert all(cost.forward > 0 for cost in found)


def test_forecast_counts_flops_of_the_experts_that_each_token_is_routed_to():
    case = Case("MixtralForCausalLM", ("tokens",))
    outline = outline_of(case)
    found = costs.unit_costs(outline.skeleton, outline.units, seq_len=8)
    block = next(cost for cost in found if cost.unit.endswith("layers.0"))
    config = outline.model.config
    expert = 3 * config.hidden_size * config.intermediate_size
    assert block.forward > 2 * 8 * config.num_experts_per_tok * expert
    assert table_for("mixtral").model_type == "mixtral"


def test_plan_command_prints_flops_memory_and_bubble(tmp_path, capsys):
    folder = checkpoint(GPT2, tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["plan", str(folder), "--pp", "2", "--tp", "2", "--pipeline-order", "zbv",
              "--micro-batches", "4", "--no-weights"])  # fmt: skip
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "a step of 4 micro-batches, order zbv" in out
    assert "predicted bubble: " in out
    assert "optimizer" in out
