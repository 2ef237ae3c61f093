"""Initialisation: every tensor of a model, equal on every layout."""

import pytest
import torch
import transformers

from heads import HEADS
from parity import tiny_config
from slapo_zoo import AutoScheduledModel, Mesh, MeshError
from slapo_zoo.errors import WeightsError
from slapo_zoo.hf.models import build_on_meta
from slapo_zoo.model.loader import Assembly
from slapo_zoo.weights.initialize import fill_buffers, initialize_weights
from slapo_zoo.zoo.options import BuildOptions
from tiny_configs import TINY


def bart(**changes):
    config = transformers.BartConfig(**{**TINY["bart"], **changes})
    config.architectures = ["BartForConditionalGeneration"]
    return config


def test_final_logits_bias_outside_the_transformer_blocks_is_initialized_to_zero(monkeypatch):
    """`final_logits_bias` belongs to the model itself; it must not keep values of freed memory."""
    empty = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty(*a, **k).fill_(7))
    model = AutoScheduledModel.from_config(bart())
    assert not model.final_logits_bias.any()


class Held(torch.nn.Module):
    """Model with a parameter of its own, with or without an initializer."""

    def __init__(self, begins):
        super().__init__()
        with torch.device("meta"):
            self.block, self.scale = torch.nn.Linear(2, 2), torch.nn.Parameter(torch.empty(3))
        self.begins = begins

    def _init_weights(self, module):
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight)
            torch.nn.init.zeros_(module.bias)
        elif self.begins:
            torch.nn.init.uniform_(module.scale)


def test_parameter_outside_the_transformer_blocks_is_initialized_from_the_seed():
    def drawn(seed):
        found = {}
        names = {"scale", "block.weight", "block.bias"}
        initialize_weights(Held(begins=True), ["block"], names, seed, found.__setitem__)
        return found

    one, again, other = drawn(1), drawn(1), drawn(2)
    assert set(one) == {"scale", "block.weight", "block.bias"}
    assert torch.equal(one["scale"], again["scale"])
    assert not torch.equal(one["scale"], other["scale"])


def test_tensor_without_an_initializer_is_refused_and_named():
    with pytest.raises(WeightsError, match=r"scale.*does not set this tensor"):
        initialize_weights(Held(begins=False), ["block"], {"scale"}, 0, lambda *_: None)


@pytest.mark.parametrize("name", ["encoder_layerdrop", "decoder_layerdrop"])
def test_config_with_layerdrop_is_refused_with_several_pipeline_stages(name):
    with pytest.raises(MeshError, match=rf"{name} with pp=2.*LayerDrop leaves out"):
        Assembly(bart(**{name: 0.1}), None, Mesh(pp=2), torch.float32, BuildOptions())
    AutoScheduledModel.from_config(bart(**{name: 0.1}))


def test_from_config_keeps_a_weight_value_that_the_model_constructor_sets():
    """CLIP's logit_scale is set by the constructor, not by `_init_weights` of transformers."""
    model = AutoScheduledModel.from_config(tiny_config(HEADS["clip"][0])[0], seed=0)
    scale = dict(model.named_parameters())["logit_scale"]
    assert float(scale.detach()) == pytest.approx(model.config.logit_scale_init_value)


class Tables(torch.nn.Module):
    """Model within a model; each initialises the buffers that it knows."""

    def __init__(self, *names):
        super().__init__()
        self.names = names
        with torch.device("meta"):
            self.rotary = torch.nn.Module()
            for name in ("own", "above", "forgotten"):
                self.rotary.register_buffer(name, torch.empty(2), persistent=False)

    def _init_weights(self, module):
        for name in self.names:
            if hasattr(module, name):
                getattr(module, name).fill_(1)


def test_buffer_that_no_enclosing_model_initializes_is_refused():
    """A buffer that nothing sets would hold values of freed memory, so it is refused."""
    outer = Tables()
    outer.inner = Tables("own")
    outer.rotary = torch.nn.Module()
    outer._init_weights = lambda module: outer.inner.rotary.above.fill_(2) if module is outer else 0
    with pytest.raises(
        WeightsError, match=r"inner.rotary.forgotten: the model's own initialisation"
    ):
        fill_buffers(outer, torch.device("cpu"))
    found = outer.inner.rotary
    assert (found.own.tolist(), found.above.tolist()) == ([1.0, 1.0], [2.0, 2.0])


def test_buffer_that_a_constructor_computes_from_an_expanded_number_has_the_values_of_transformers():
    config = transformers.Wav2Vec2ConformerConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, conv_dim=(8,),
        conv_kernel=(3,), conv_stride=(2,), num_conv_pos_embedding_groups=2, max_source_positions=8,
    )  # fmt: skip
    model = build_on_meta(transformers.Wav2Vec2ConformerModel, config, torch.float32)
    fill_buffers(model, torch.device("cpu"))
    want = transformers.Wav2Vec2ConformerModel(config).encoder.embed_positions.pe
    assert torch.equal(model.encoder.embed_positions.pe, want)
