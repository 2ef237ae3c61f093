"""Layer-wise verification: few layers of the true widths at a time; the wrong layer is named."""

import copy

import pytest
import torch
import transformers

from slapo_zoo.cli.commands.verify import verify as command  # noqa: F401 - it must import
from slapo_zoo.errors import SlapoError
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.verify import layerwise
from slapo_zoo.verify.layerwise import few_layers, verify_layers
from slapo_zoo.zoo.outline import Outline
from tiny_models import MODELS


def config_of(family, **changes):
    name, fields, *_ = MODELS[family]
    config = getattr(transformers, name).config_class(**{**fields, **changes})
    config.architectures = [name]
    return config


def steps_of(config):
    given = copy.deepcopy(config)
    return Outline(given, None, Mesh(2), torch.float32).schedule.history


@pytest.fixture
def verified(monkeypatch):
    """Return the list of verified configs."""
    seen = []
    run = layerwise.verify
    monkeypatch.setattr(layerwise, "verify", lambda c, *a, **k: seen.append(c) or run(c, *a, **k))
    return seen


@pytest.mark.slow  # the tests below verify two kinds of layers, and one layer of nine that differs
def test_layerwise_verify_of_nine_equal_layers_runs_one_pair_of_layers(verified):
    report = verify_layers(config_of("gpt2", n_layer=9))
    assert report.ok, str(report)
    assert report.config == "layer by layer"
    assert [c.n_layer for c in verified] == [2]
    assert verified[0].n_embd == 32


@pytest.mark.parametrize(
    ("layer", "runs"),
    [
        pytest.param(0, 1, marks=pytest.mark.slow),
        (5, 2),
        pytest.param(8, 2, marks=pytest.mark.slow),
    ],
)
def test_layerwise_verify_names_the_one_layer_of_nine_that_lacks_an_all_reduce(
    layer, runs, verified
):
    """One layer of nine lacks one all-reduce in the backward."""
    config = config_of("gpt2", n_layer=9)
    every = [(f"transformer.h.{i}.mlp", d) for p, d in steps_of(config)
             if p == "transformer.h.*.mlp" and d.name == "sync" for i in range(9) if i != layer]  # fmt: skip
    others = [s for s in steps_of(config)
              if not (s[0] == "transformer.h.*.mlp" and s[1].name == "sync")]  # fmt: skip
    assert len(every) == 8
    report = verify_layers(config, schedule=others + every)
    assert not report.ok
    assert len(verified) == runs
    assert report.divergence is not None
    named = " ".join((report.divergence.path, *report.divergence.suspects))
    assert f"transformer.h.{layer}." in named


def test_layerwise_verify_runs_each_kind_of_gpt_neo_attention_layer_once(verified):
    """Pairs of GPT-Neo layers that begin with global and with local attention are each verified."""
    kinds = [["global", "local"], 3]
    report = verify_layers(
        config_of("gpt_neo", num_layers=7, attention_types=[kinds, [["global"], 1]])
    )
    assert report.ok, str(report)
    assert [c.attention_layers for c in verified] == [["global", "local"], ["local", "global"]]


@pytest.mark.slow
def test_layerwise_verify_passes_with_sequence_parallelism(verified):
    report = verify_layers(config_of("llama", num_hidden_layers=6), sequence_parallel=True)
    assert report.ok, str(report)


def test_layerwise_verify_of_albert_runs_its_shared_block_once(verified):
    report = verify_layers(config_of("albert", num_hidden_layers=6))
    assert report.ok, str(report)
    assert report.config == "layer by layer"
    assert len(verified) == 1


def test_config_for_layerwise_verify_has_two_layers_of_full_width():
    config = transformers.T5Config(num_layers=24, num_decoder_layers=24)
    few = few_layers(config, 10)
    assert (few.num_layers, few.num_decoder_layers, few.d_model) == (2, 2, config.d_model)


def test_layerwise_verify_is_refused_when_its_layers_exceed_the_free_memory():
    """The error comes before any allocation."""
    with pytest.raises(SlapoError, match=r"needs about \d+ GB of memory, \d+ GB are free"):
        verify_layers(transformers.LlamaConfig(hidden_size=16384, intermediate_size=65536))


def test_layerwise_verify_refuses_pipeline_stages_and_models_without_a_layer_count():
    with pytest.raises(SlapoError, match="have no pipeline stages"):
        verify_layers(config_of("gpt2"), mesh=(1, 2, 1))
    from slapo_zoo.hf import models as hf

    hf.register_models()
    config = transformers.AutoConfig.for_model("wideresnet")
    with pytest.raises(SlapoError, match="how many layers"):
        verify_layers(config)
