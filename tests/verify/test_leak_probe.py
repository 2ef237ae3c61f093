"""Leak probe: classes whose tokens can be cut over cp are found, and what mixes tokens in another way is named."""

import pytest
import torch
import transformers

from slapo_zoo import AutoScheduledModel, SlapoError
from slapo_zoo.errors import ArchitectureError
from slapo_zoo.verify.cut_classes import nearer
from slapo_zoo.verify.derive import cut_table, derive
from slapo_zoo.verify.leak_probe import Seen, first_unlike, leaks, reached
from slapo_zoo.zoo.rules import attention_of_all
from slapo_zoo.zoo.table import families, table_for

SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 96}


def probed(name, **how):
    """The table that the probe makes for a class of a family of the zoo, with its default config."""
    cls = getattr(transformers, name)
    return cut_table(cls.config_class(), cls, table_for(cls.config_class.model_type), **how)


def derived(name):
    """The table that is derived for a class of another family, and probed."""
    cls = getattr(transformers, name)
    return derive(cls.config_class(), cls, (1, 1, 1), cp=2).table


def test_cp_support_probe_detects_that_camembert_counts_positions_over_real_tokens():
    assert probed("CamembertForMaskedLM").cut_tokens == {"CamembertForMaskedLM": "counted real"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "positions"),
    [("GPTNeoForCausalLM", "counted"), ("MBartForConditionalGeneration", "placed"), ("GPTNeoXForCausalLM", "counted")],
)  # fmt: skip
def test_cp_support_probe_detects_how_each_model_class_numbers_its_positions(name, positions):
    assert probed(name).cut_tokens[name] == positions


@pytest.mark.parametrize(
    ("name", "positions"),
    [
        ("DistilBertForMaskedLM", "counted"),
        pytest.param("GPTNeoXForCausalLM", "counted", marks=pytest.mark.slow),
        pytest.param("MBartForConditionalGeneration", "placed", marks=pytest.mark.slow),
    ],
)
def test_cp_support_probe_detects_how_positions_are_numbered_with_ulysses_and_ring_attention(
    name, positions
):
    assert probed(name, way="ulysses").cut_tokens[name] == positions
    assert probed(name, way="ring").cut_tokens[name] == positions


def test_cp_support_probe_refuses_bloom_and_names_the_first_module_that_differs_with_sharded_tokens():
    with pytest.raises(ArchitectureError) as raised:
        probed("BloomForCausalLM")
    assert (
        "changing token 0 changes 16 positions of the plain model and 8 of the sharded one; "
        "the first module that differs is transformer.h.0.self_attention" in str(raised.value)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "module"), [("FNetForMaskedLM", "fourier"), ("ConvBertForMaskedLM", "conv"), ("MambaForCausalLM", "mixer")]
)  # fmt: skip
def test_cp_support_probe_refuses_models_with_convolutions_state_spaces_or_fourier_transforms(
    name, module
):
    cls = getattr(transformers, name)
    config = cls.config_class()
    probe = probed if config.model_type in families() else derived
    with pytest.raises(ArchitectureError, match="cannot be sharded over cp") as raised:
        probe(name)
    assert module in str(raised.value)


@pytest.mark.slow
def test_automatically_derived_schedule_records_how_positions_are_numbered_with_cp():
    assert derived("GraniteForCausalLM").cut_tokens == {"GraniteForCausalLM": "counted"}


def test_automatically_derived_schedule_replaces_attention_once_per_attention_module():
    table = derived("BioGptForCausalLM")
    assert ("biogpt.layers.*.self_attn", attention_of_all) in table.heads
    assert sum(rule == attention_of_all for _, rule in table.heads) == 1
    assert table.seam
    assert table.cut_tokens == {"BioGptForCausalLM": "counted"}


@pytest.mark.slow
def test_cp_support_probe_of_an_unknown_class_on_two_ranks_gives_both_the_same_result(ranks):
    """Two processes load a class that no table names, and refuse another with its module."""
    for found, said in ranks.run(both, 2):
        assert found == "counted real"
        assert "the first module that differs is" in said


def both():
    config = transformers.CamembertConfig(**SMALL, intermediate_size=64)
    load = AutoScheduledModel.from_config
    model = load(config, auto_class="CamembertForMaskedLM", cp=2)
    try:
        load(transformers.BloomConfig(n_layer=2, hidden_size=32, n_head=4, vocab_size=96), auto_class="BloomForCausalLM", cp=2)  # fmt: skip
    except SlapoError as error:
        return model._slapo.table.cut_tokens["CamembertForMaskedLM"], str(error)
    return model._slapo.table.cut_tokens["CamembertForMaskedLM"], ""


def test_refusal_of_a_model_that_leaks_over_cp_counts_the_outputs_that_one_token_changed():
    """A causal model whose second rank does not see the first one's tokens."""
    plain, cut = torch.zeros(5, 4, 2), torch.zeros(5, 4, 2)
    for token in range(4):
        plain[token + 1, token:] = 1.0
        cut[token + 1, token : 2 if token < 2 else 4] = 1.0
    assert reached(plain).tolist()[1] == [-1, 1, 1, 1]
    ranks = [Seen(part, {"attention": part, "mlp": part}) for part in cut.split(2, 1)]
    whole = Seen(plain, {"attention": cut, "mlp": plain})
    assert leaks(whole, ranks) == (
        "changing token 0 changes 4 positions of the plain model and 2 of the sharded one; "
        "the first module that differs is mlp"
    )
    assert first_unlike(whole.modules, [seen.modules for seen in ranks]) == "mlp"
    assert leaks(Seen(cut, {}), ranks) == ""


def test_cp_support_probe_shrinks_sliding_windows_below_the_tokens_of_one_rank():
    config = nearer(transformers.MistralConfig(sliding_window=4096))
    assert config.sliding_window == 6
