"""The planner: profiles of few blocks, memory and cuts equal to the built model's, reasons for layouts that do not fit."""

import json
import warnings
from dataclasses import asdict, replace

import pytest
import torch
from transformers import GPT2Config

from in_flight import most_in_flight
from parity import Case, checkpoint, tiny_config
from slapo_zoo import AutoScheduledModel, Mesh, MeshError, SlapoError
from slapo_zoo.cli.commands.plan_search import make_planner
from slapo_zoo.cli.main import main
from slapo_zoo.pipeline.orders import ORDERS, StageMap
from slapo_zoo.pipeline.timeline import makespan, simulate
from slapo_zoo.tune.planner import calibrate, hardware
from slapo_zoo.tune.planner.hardware import HARDWARE, find_hardware
from slapo_zoo.tune.planner.layout import Layout, divisors, in_flight, layouts, places_of
from slapo_zoo.tune.planner.layout_report import worth
from slapo_zoo.tune.planner.layout_search import Planner
from slapo_zoo.tune.planner.profile import Recompute
from slapo_zoo.tune.planner.profiling import Family, shorter
from slapo_zoo.tune.planner.runtime_kind import find_precision, find_runtime
from slapo_zoo.tune.planner.search_result import no_layout
from slapo_zoo.tune.planner.stage_memory import stage_memory
from slapo_zoo.tune.planner.timing import How, StageTime, step_time
from slapo_zoo.weights.load_rank_slices import to_dtype
from slapo_zoo.zoo.outline import Outline
from slapo_zoo.zoo.survey import rank_sizes
from slapo_zoo.zoo.table import families

pytestmark = pytest.mark.usefixtures("shared_dry_runs")

GPT2 = Case("GPT2LMHeadModel", ("tokens",), (("n_layer", 6),))
LLAMA = Case("LlamaForCausalLM", ("tokens",), (("num_hidden_layers", 5),))
T5 = Case("T5ForConditionalGeneration", ("tokens",), (("num_layers", 4), ("num_decoder_layers", 5)))
CPU = HARDWARE["cpu"]


def config_for(case):
    config, cls = tiny_config(case)
    config.architectures = [cls.__name__]
    return config


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", [GPT2, T5, LLAMA], ids=lambda case: case.cls)
def test_planner_costs_extrapolated_from_three_blocks_equal_costs_of_the_full_model(case):
    short, whole = Family(config_for(case)), Family(config_for(case))
    assert short.is_small
    whole.small, whole.is_small = whole.config, False
    a, b = (family.profile(1, False, 8, torch.float32) for family in (short, whole))
    assert [unit.name for unit in a.units] == [unit.name for unit in b.units]
    assert a.shared == b.shared
    for rows in (1, 3):
        for again in (Recompute(), Recompute(frozenset(short.blocks)),
                      Recompute(frozenset(short.blocks), "save_matmuls")):  # fmt: skip
            one, two = (stage_memory(p, 0, len(p.units), rows, again) for p in (a, b))
            assert one.parameters == two.parameters
            assert one.held == pytest.approx(two.held, rel=0.01)
            assert one.growing == pytest.approx(two.growing, rel=0.01)
            assert one.peak + one.held == pytest.approx(two.peak + two.held, rel=0.01)


@pytest.mark.one_in(2, 2)
@pytest.mark.parametrize("cls, changes", [
    ("WhisperForConditionalGeneration", {}),
    ("CLIPForImageClassification", {"vision_config": {"num_hidden_layers": 7, "hidden_size": 36}}),
    ("M2M100ForConditionalGeneration", {"encoder_layers": 6, "decoder_layers": 6, "encoder_layerdrop": 0.5}),
    ("SwinForImageClassification", {"drop_path_rate": 0.1}), ("DebertaV2ForMaskedLM", {}),
    ("Gemma2ForCausalLM", {"num_hidden_layers": 6}),
])  # fmt: skip
def test_planner_weight_memory_equals_the_parameter_count_of_the_model(cls, changes):
    """Each parameter is counted once, in families with sub-configs, windows, relative positions or skipped layers."""
    config = config_for(Case(cls, ("class",), tuple(changes.items()), dropout=0.1))
    planner = Planner(config, CPU, 12)
    whole = planner.family.total_parameters
    assert planner.forecast(Layout(rows=2)).ranks[0].weights == pytest.approx(2 * whole, rel=0.01)


def test_planner_profiles_every_block_when_blocks_of_a_model_differ():
    neo = config_for(Case("GPTNeoForCausalLM", ("tokens",)))
    assert shorter(neo, {4}) is None
    assert not Family(neo).is_small
    assert not Family(config_for(Case("AlbertForMaskedLM", ("tokens",)))).is_small
    mistral = config_for(Case("MistralForCausalLM", ("tokens",), (("num_hidden_layers", 5),)))
    assert Family(mistral).is_small


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", [T5, GPT2], ids=lambda case: case.cls)
@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 4)])
def test_planner_weight_bytes_and_pipeline_cuts_equal_those_of_the_built_model(case, tp, pp):
    planner = Planner(config_for(case), CPU, 8, "fp32")
    found = planner.forecast(Layout(tp, pp, 1, 1, pp))
    outline = Outline(config_for(case), None, Mesh(tp, pp), torch.float32)
    units = [unit.name for unit in planner.profile(tp).units]
    assert [units[i - 1] for i in planner.cuts(pp)] == [unit for unit, _ in outline.state.cuts]
    sizes = {size.stage: size.bytes for size in rank_sizes(outline) if size.tp_coord == 0}
    assert {r: rank.weights for r, rank in enumerate(found.ranks)} == sizes


def test_planner_activation_bytes_equal_the_bytes_saved_by_autograd():
    """Compare with the bytes that a forward on real tensors, with dropout, keeps alive."""
    config = config_for(Case("GPT2LMHeadModel", ("tokens",), (("n_layer", 4),), dropout=0.1))
    model = AutoScheduledModel.from_config(config, kernels="reference").train()
    ids = torch.zeros((3, 8), dtype=torch.int64)
    seen, saved = {p.untyped_storage().data_ptr() for p in model.parameters()}, 0

    def keep(tensor):
        nonlocal saved
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen and tensor is not ids:
            seen.add(storage.data_ptr())
            saved += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=ids, labels=ids, use_cache=False)
    profile = Family(config).profile(1, False, 8, torch.float32)
    predicted = stage_memory(profile, 0, len(profile.units), 3, Recompute()).held
    assert predicted == pytest.approx(saved, rel=0.1)


@pytest.mark.parametrize(
    ("order", "virtual"), [("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2), ("zbv", 2)]
)
@pytest.mark.parametrize("micro_batches", [4, 8, 24])
def test_planner_counts_the_micro_batches_in_flight_of_each_pipeline_order(
    order, virtual, micro_batches
):
    places = StageMap.make(order, 4, virtual if virtual > 1 else None)
    assert order in ORDERS
    for rank, actions in enumerate(places.actions(micro_batches)):
        held = in_flight(order, 4, virtual, micro_batches, rank)
        assert sum(held) == most_in_flight(actions)


@pytest.mark.parametrize(
    ("order", "virtual", "count"),
    [("1f1b", 1, 8), ("gpipe", 1, 8), ("interleaved_1f1b", 2, 8), ("zbv", 2, 8), ("1f1b", 1, 2),
     ("interleaved_1f1b", 2, 1), ("interleaved_1f1b", 4, 3), ("interleaved_1f1b", 2, 4)],
)  # fmt: skip
def test_planner_closed_form_step_time_equals_simulation(order, virtual, count):
    """The stages are equal and communication is free; also with fewer micro-batches than ranks."""
    stage = StageTime(1.0, 2.0, 1.0, 0.0, 0.0, 1)
    layout = Layout(1, 4, 1, 1, count, order, virtual)
    cost = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    whole = simulate(places_of(layout).actions(count), lambda action: cost[action.kind])
    how = How(CPU, find_runtime("eager"), find_precision("fp32"))
    found = step_time([stage] * 4 * virtual, layout, 0.0, how)
    assert found.seconds == pytest.approx(makespan(whole))
    assert found.bubble == pytest.approx(1 - count * virtual * 3 / makespan(whole))


def test_planner_float32_flops_without_tf32_equal_the_data_sheet():
    v100, a100 = (HARDWARE[name] for name in ("v100", "a100"))
    assert v100.flops("float32") / v100.flops("float16") == pytest.approx(15.7 / 125)
    assert a100.flops("float32") / a100.flops("float16") == pytest.approx(0.5)


def test_planner_layouts_use_every_gpu_and_every_sample_of_the_batch():
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]
    found = list(layouts(2, 24, 96, 6))
    assert {(at.tp * at.pp * at.dp, at.dp * at.rows * at.micro_batches) for at in found} == {
        (24, 96)
    }
    assert {at.pp for at in found} == {1, 2, 3, 4, 6}
    assert len(set(found)) == len(found)


def test_planner_with_less_memory_finds_fewer_layouts_and_says_why_others_are_refused():
    planner = Planner(config_for(GPT2), CPU, 16, "fp32")
    wide = planner.search(4, 32)
    assert wide.feasible
    assert [f.step.seconds for f in wide.feasible] == sorted(f.step.seconds for f in wide.feasible)
    middle = sorted(f.memory for f in wide.feasible)[len(wide.feasible) // 4]
    planner.hardware = hardware.with_memory(CPU, middle + CPU.reserved)
    tight = planner.search(4, 32)
    assert 0 < len(tight.feasible) < len(wide.feasible)
    assert all(f.memory <= middle for f in tight.feasible)
    planner.hardware = hardware.with_memory(CPU, CPU.reserved)
    none = planner.search(4, 32)
    assert not none.feasible
    assert all("needs" in why and "GiB of" in why for _, why in none.refused)
    with pytest.raises(MeshError, match="no layout of 7 devices divides 3 rows"):
        planner.search(7, 3)


def test_planner_predicts_memory_savings_of_recomputation_and_sequence_parallelism():
    device = HARDWARE["a100"]
    planner = Planner(config_for(LLAMA), device, 16, "fp32")
    plain = planner.forecast(Layout(2, 1, 1, 8, 2))
    for change in ({"checkpoint_ratio": 1.0}, {"sequence_parallel": True},
                   {"checkpoint_ratio": 1.0, "checkpoint_policy": "save_matmuls"}):  # fmt: skip
        other = planner.forecast(Layout(2, 1, 1, 8, 2, **change))
        assert other.ranks[0].activations < plain.ranks[0].activations
    again = planner.forecast(Layout(2, 1, 1, 8, 2, checkpoint_ratio=1.0))
    assert again.step.flops > plain.step.flops


def test_plan_command_prints_layouts_and_writes_a_schedule_file(tmp_path, capsys, verify_here):
    folder, written = checkpoint(GPT2, tmp_path / "model"), tmp_path / "schedule.json"
    command = [
        "plan",
        str(folder),
        "--gpus",
        "1",
        "--batch",
        "4",
        "--seq",
        "8",
        "--precision",
        "fp32",
    ]
    with pytest.raises(SystemExit) as caught:
        main([*command, "--json", "--write", str(written)])
    assert caught.value.code in (0, None)
    out = capsys.readouterr().out
    found = json.loads(out[out.index("{\n") :])  # a library may say something before
    assert found["fit"] == len(found["layouts"]) or found["fit"] > 10
    assert found["layouts"][0]["knobs"]["tp"] == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoScheduledModel.from_pretrained(folder, schedule=str(written))
    plain = AutoScheduledModel.from_pretrained(folder)
    assert model.schedule.history == plain.schedule.history
    with pytest.raises(SystemExit) as caught:
        main([*command, "--memory", "1537MiB", "--explain"])
    assert caught.value.code == 2
    said = capsys.readouterr()
    assert "GiB of 1.5" in said.out
    assert "no layout fits" in said.err
    with pytest.raises(SystemExit):
        main([*command[:-4], "--seq", "99"])
    assert "the model has 16 positions" in capsys.readouterr().err


FEW = ("vit",)  # the weights of Whisper are counted above


@pytest.mark.parametrize(
    "family",
    [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in families()],
)
def test_planner_search_finds_a_layout_or_reports_memory_for_every_family_name(family):
    """Half of the families name no head in their default config; image and speech models are included."""
    found = make_planner(family, None, ("h100", None, "bf16", "eager")).search(1, 2)
    assert found.feasible or "GiB of 80.0" in found.refused[0][1]
    assert len(found.feasible) <= found.looked_at


def test_planner_raises_for_a_model_without_loss():
    planner = Planner(config_for(GPT2), CPU, 8, auto_class="AutoModel")
    with pytest.raises(
        MeshError, match=r"every tp size was refused; tp=1: GPT2Model has no loss.*\n.*names a head"
    ):
        planner.search(2, 8)
    assert "divides 3 rows" in str(no_layout(64, 3, [("tp=8", "4 heads cannot be sharded")]))


def test_every_spelling_of_float32_selects_the_same_precision():
    for name in ("float32", "torch.float32", torch.float32, "fp32"):
        assert find_precision(name) is find_precision("fp32")
        model = AutoScheduledModel.from_config(config_for(GPT2), precision=name, dtype="float32")
        assert next(model.parameters()).dtype == to_dtype(name) == torch.float32


def test_hardware_profile_written_by_calibration_is_read_back_unchanged(tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate, "SIZE", 64)  # a product of 1024 takes some CPUs 2 s in bf16
    found = calibrate.measure("cpu", ranks=1)
    found.write(tmp_path / "here.json")
    assert find_hardware(str(tmp_path / "here.json")) == found
    assert found.flops("float64") > 0
    (tmp_path / "bad.json").write_text("{}")
    (tmp_path / "list.json").write_text("[1]")
    for name, figures in (("zero", {"link": 0}), ("text", {"matmul": {"float32": "x"}})):
        (tmp_path / f"{name}.json").write_text(json.dumps(asdict(found) | figures))
    for name, problem in (
        ("bad.json", "the file is no hardware profile"),
        ("list.json", r"found \[1\], expected a JSON object"),
        ("none.json", "no such profile"),
        ("zero.json", "link: found 0, expected a number above 0"),
        ("text.json", "matmul float32: found 'x'"),
    ):
        with pytest.raises(SlapoError, match=problem):
            find_hardware(str(tmp_path / name))


@pytest.mark.parametrize("name", ["v100", "cpu"])
def test_planner_counts_full_attention_scores_on_gpu_and_blocks_of_scores_on_cpu(name):
    """A GPU holds the attention scores of all tokens at once, a CPU only of a block of them."""
    fields = {"n_layer": 1, "n_embd": 32, "n_head": 8, "vocab_size": 64, "n_positions": 2048}
    config = GPT2Config(**fields, loss_type="ForCausalLMLoss", bos_token_id=1, eos_token_id=2)
    config.architectures = ["GPT2LMHeadModel"]
    profile = Planner(config, HARDWARE[name], 2048, "fp32").profile(1)
    peak = max(unit.few.forward_peak for unit in profile.units)
    scores = 8 * 2048**2 * 4
    assert peak > 2 * scores if name == "v100" else peak < scores


def test_planner_forecast_with_a_zero_stage_shards_optimizer_then_gradients_then_weights():
    planner = Planner(config_for(GPT2), HARDWARE["a100"], 16)
    plain = Layout(1, 1, 4, 1, 2)
    whole = planner.forecast(plain)
    sizes = [planner.forecast(replace(plain, dp_shard=4, zero_stage=z)).ranks[0] for z in (1, 2, 3)]
    first = whole.ranks[0]
    assert first.weights + first.gradients + first.optimizer == 9 * first.weights  # 18 bytes of 2
    assert [rank.optimizer * 4 for rank in sizes] == [first.optimizer] * 3
    assert [rank.gradients for rank in sizes] == [first.gradients] + [first.gradients // 4] * 2
    config = config_for(GPT2)
    around = (config.vocab_size + config.n_positions + 2) * config.n_embd
    assert [rank.weights for rank in sizes] == [first.weights] * 2 + [2 * around]
    parts = worth(planner, whole)
    assert sum(parts.binds.values()) == pytest.approx(1.0)
    assert 0 < parts.faster_link < 1
    assert 0 < parts.mfu < 1
    assert "GPU hours for 10^9 tokens" in parts.text()
    assert worth(planner.on(HARDWARE["h100"]), whole).error is None
