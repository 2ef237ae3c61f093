"""Correct schedules pass on every family and layout; the reduced config keeps the features of the original."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from slapo_zoo.errors import ArchitectureError
from slapo_zoo.hf import models as hf
from slapo_zoo.hf.example_inputs import padded_batch
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.verify.case import Trial, case_for, expressive, expressive_config
from slapo_zoo.verify.core import known_schedule, verify
from slapo_zoo.verify.judge import cast, tensors_of
from slapo_zoo.verify.report import Report, VerifyError
from slapo_zoo.zoo.argument_values import config_of, usual_head
from slapo_zoo.zoo.table import families
from slapo_zoo.zoo.tiny_config import tiny_like

LAYOUTS = {
    "tp2": ((2, 1, 1), {}), "tp4": ((4, 1, 1), {}), "pp2": ((1, 2, 1), {}),
    "tp2-pp2": ((2, 2, 1), {}), "tp2-dp2": ((2, 1, 2), {}),
    "tp2-sp": ((2, 1, 1), {"sequence_parallel": True}),
}  # fmt: skip
IN_CI = [("gpt2", "tp2-pp2"), ("t5", "tp2"), ("mixtral", "tp2-sp"), ("albert", "pp2"), ("bart", "tp2"),
         ("camembert", "pp2"), ("albert", "tp2-dp2"), ("wideresnet", "tp2")]  # fmt: skip
GRID = [
    pytest.param(family, layout, marks=() if (family, layout) in IN_CI else pytest.mark.slow)
    for family in families()
    for layout in LAYOUTS
]
OPTIONAL = {"dropout", "collectives"}  # a family without dropout; one rank of tp


@pytest.mark.one_in(4, 2)
@pytest.mark.parametrize(("family", "layout"), GRID)
def test_verify_passes_the_schedule_of_every_model_family_on_every_layout(family, layout):
    config, head = config_of(family)
    sizes, knobs = LAYOUTS[layout]
    if family in ("wideresnet", "swin") and knobs:
        with pytest.raises(ArchitectureError, match="no rule that shards tokens"):
            verify(config, head, sizes, **knobs)
        return
    report = verify(
        config, hf.resolve_class(config, usual_head(config, head)).__name__, sizes, **knobs
    )
    assert report.ok, str(report)
    unmeasured = {check for check, found in report.checks.items() if found == "unmeasured"}
    assert unmeasured <= OPTIONAL
    if sizes[0] > 1:
        assert "collectives" not in unmeasured


@pytest.mark.parametrize(
    ("family", "seed"), [pytest.param("mt5", 1, marks=pytest.mark.slow), ("wideresnet", 3)]
)
def test_verify_accepts_differences_within_rounding_error(family, seed):
    """One rank may round a gradient exactly; a ReLU's input may be 1e-7 on one rank and -1e-7 on another."""
    config, head = config_of(family)
    report = verify(
        config, hf.resolve_class(config, usual_head(config, head)).__name__, (2, 1, 1), seed=seed
    )
    assert report.ok, str(report)


def test_verify_report_as_json_and_text_contains_verdict_mesh_and_checks(capfd):
    config = transformers.GPT2Config(architectures=["GPT2LMHeadModel"])
    transformers.logging.enable_progress_bar()  # a command that ran before may have put them out
    report = verify(config)
    document = json.loads(json.dumps(report.document()))
    assert document["verdict"] == "verified"
    assert document["mesh"] == {"tp": 2, "pp": 1, "dp": 1}
    assert document["software"].keys() == {"slapo-zoo", "torch", "transformers"}
    assert document["checks"]["gradients"]["compared"] > 25
    assert "every gradient" in str(report)
    assert "%|" not in capfd.readouterr().err  # no bars of the files between
    assert transformers.logging.is_progress_bar_enabled()


@pytest.mark.parametrize(
    ("cls", "fields", "heads"),
    [("GPT2Config", {"n_head": 25, "n_embd": 1600, "n_layer": 48}, (5, 5)),
     ("LlamaConfig", {"num_attention_heads": 64, "num_key_value_heads": 8}, (16, 2)),
     ("LlamaConfig", {"num_attention_heads": 8, "num_key_value_heads": 1}, (8, 1)),
     ("BertConfig", {}, (4, 4))],
)  # fmt: skip
def test_config_shrunk_for_verification_keeps_head_ratio_and_vocabulary_parity(cls, fields, heads):
    config = getattr(transformers, cls)(**fields)
    before = config.to_dict()
    small = tiny_like(config, Mesh(2))
    assert config.to_dict() == before
    assert (small.num_attention_heads, getattr(small, "num_key_value_heads", heads[1])) == heads
    assert small.num_hidden_layers == 2
    assert small.vocab_size % 2 == config.vocab_size % 2
    assert hf.count_parameters(small, "AutoModel") < 1e6


@pytest.mark.parametrize("family", families())
def test_model_of_every_family_shrunk_for_verification_runs_in_float64(family):
    """The reference is finite: each row has a real token, and rotary dims fit the reduced heads."""
    config, head = config_of(family)
    small = tiny_like(config, Mesh(4), num_stages=2)
    for name, value in expressive(small).items():
        setattr(small, name, value)
    small._experts_implementation = "eager"
    cls = hf.resolve_class(small, hf.resolve_class(config, usual_head(config, head)).__name__)
    model = cls._from_config(small, attn_implementation="eager").double().eval()
    assert model.num_parameters() < 3e6
    batch = cast(padded_batch(model, 4, 16, seed=100, tp=4), torch.float64)
    with torch.no_grad():
        outputs = tensors_of(model(**batch))
    assert outputs
    assert all(x.isfinite().all() for x in outputs.values() if x.is_floating_point())


@pytest.mark.parametrize(("rows", "tokens"), [(1, 8), (2, 3)])
def test_padded_batch_of_few_tokens_has_as_many_border_ids_as_fit(rows, tokens):
    config = transformers.GPT2Config(vocab_size=64, n_embd=8, n_layer=1, n_head=1, eos_token_id=3)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    ids = padded_batch(model, rows, tokens, tp=4)["input_ids"]
    assert {15, 16} <= {*ids.flatten().tolist()}


@pytest.mark.parametrize("family", ["whisper", "clip", "vit", "bert"])
def test_predicted_collectives_include_all_gathers_for_text_image_and_audio_models(family):
    config, head = config_of(family)
    small = tiny_like(config, Mesh(2))
    cls = hf.resolve_class(small, hf.resolve_class(config, usual_head(config, head)).__name__)
    case = case_for(small, cls, (2, 1, 1), Path())
    counts = Trial(case, (2, 1, 1), knobs={"sequence_parallel": True}).predicted_collectives()
    assert counts["all_gather"] > 0
    assert counts["reduce_scatter"] > 0


def test_verify_with_schedule_auto_uses_a_family_schedule_and_is_refused_without_one():
    small = transformers.GPT2Config(architectures=["GPT2LMHeadModel"])
    assert known_schedule(small, "auto") == known_schedule(small, "zoo") == "zoo"
    with pytest.raises(ArchitectureError, match="slapo-zoo derive MODEL"):
        verify(transformers.ConvBertConfig(), "AutoModelForMaskedLM", schedule="auto")


def test_verify_error_hint_mentions_directives_only_when_the_report_lists_some():
    wrong = Report("m", {}, "small", {}, error="it differs")
    with pytest.raises(VerifyError, match="hint: correct the schedule where the lines"):
        wrong.raise_if_wrong("m")
    with pytest.raises(VerifyError, match="hint: repair the directives named above"):
        replace(wrong, directives=[("fc", "shard()")]).raise_if_wrong("m")


def test_comparison_config_keeps_the_type_of_a_dropout_rate_that_is_a_whole_number():
    config = transformers.LevitConfig()  # strict: its drop_path_rate must be an int
    assert type(expressive_config(config).drop_path_rate) is int


@pytest.mark.parametrize("padded", [True, False])
def test_each_step_of_a_verification_has_a_batch_of_its_own(padded):
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=64, n_positions=16)
    case = case_for(config, transformers.GPT2LMHeadModel, (1, 1, 1), Path())
    case = replace(case, padded=padded, batch={})
    ids = [case.batch["input_ids"], *(case.batch_of(step)["input_ids"] for step in (0, 1, 2))]
    assert torch.equal(ids[0], ids[1])
    assert torch.equal(case.batch_of(2)["input_ids"], ids[3])
    other = replace(case, seed=7, batch={}).batch["input_ids"]
    assert not any(
        torch.equal(a, b) for a, b in ((ids[1], ids[2]), (ids[2], ids[3]), (ids[0], other))
    )
