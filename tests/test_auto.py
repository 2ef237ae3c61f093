"""Families without a table: refused with what is near, or derived from the plan and checked."""

import pytest
import transformers

from parity import LAYOUTS, LLAMA, TINY, Case, checkpoint, compare, references, scheduled
from refusals import refused
from slapo_zoo import ArchitectureError
from slapo_zoo import AutoScheduledModel
from slapo_zoo import SlapoError
from slapo_zoo.zoo import derive
from slapo_zoo.zoo.table import families

SMALL = {k: v for k, v in LLAMA.items() if k != "head_dim"} | {"hidden_size": 32}
DERIVED = {
    "qwen2": Case("Qwen2ForCausalLM", ("tokens",), (("tie_word_embeddings", True),)),
    "gemma": Case("GemmaForCausalLM", ("tokens",), (("head_dim", 4),)),
    "olmo": Case("OlmoForCausalLM", ("tokens",)),
    "starcoder2": Case("Starcoder2ForCausalLM", ("tokens",)),
    "phi3": Case("Phi3ForCausalLM", ("tokens",), (("intermediate_size", 64),)),
    "qwen2-classes": Case("Qwen2ForSequenceClassification", ("class",), (("num_labels", 3),)),
}  # fmt: skip
for _case in DERIVED.values():  # their tiny configs are Llama's
    TINY.setdefault(getattr(transformers, _case.cls).config_class.model_type, SMALL)


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("auto")


def run(case, folder, sizes):
    return scheduled(case, folder, sizes, schedule="auto")


def cells():
    """All families on three layouts; always one of each in turn, Qwen2 on all."""
    for i, name in enumerate(DERIVED):
        for j, layout in enumerate(("2x1x1", "2x2x1", "2x2x1-sp")):
            marks = () if i % 3 == j or name == "qwen2" else pytest.mark.slow
            yield pytest.param(name, layout, marks=marks, id=f"{name}-{layout}")


@pytest.mark.parametrize(("name", "layout"), [*cells()])
def test_a_derived_table_equals_plain_transformers(name, layout, root, ranks):
    case, sizes = DERIVED[name], LAYOUTS[layout]
    folder = checkpoint(case, root)
    truth, plains = references(case, folder)
    results = ranks.run(run, sizes[0] * sizes[1] * sizes[2], case, folder, sizes)
    compare(results[0][0], plains, truth)


def test_a_table_of_the_zoo_comes_first(root):
    folder = checkpoint(Case("GPT2LMHeadModel", ("tokens",)), root)
    model = AutoScheduledModel.from_pretrained(folder, schedule="auto")
    assert str(model.schedule) == str(AutoScheduledModel.from_pretrained(folder).schedule)


def test_without_auto_the_hint_names_it(root):
    text = refused(ArchitectureError, checkpoint(DERIVED["qwen2"], root))
    assert "model_type='qwen2'" in text
    assert "nearest: ['qwen3'" in text
    assert 'schedule="auto"' in text
    assert all(name in text for name in families())


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (transformers.BloomConfig(), "transformers no base_model_tp_plan"),
        (transformers.Starcoder2Config(residual_dropout=0.1), "found residual_dropout=0.1"),
        (
            transformers.Phi3Config(attention_dropout=0.1, pad_token_id=0),
            "found attention_dropout=0.1",
        ),
        (transformers.Qwen2MoeConfig(num_hidden_layers=2), "the plan has the style"),
    ],
)
def test_what_cannot_be_derived(config, found):
    with pytest.raises(ArchitectureError, match=found):
        AutoScheduledModel.from_config(config, schedule="auto", auto_class="AutoModelForCausalLM")


def spoiled(case, folder, rule):
    """from_pretrained with a table whose rule for rows is wrong."""
    right = getattr(derive, rule)
    setattr(derive, rule, () if rule == "enter" else lambda *a, **k: right(*a, **k)[:1])
    try:
        AutoScheduledModel.from_pretrained(folder, tp=2, schedule="auto")
    except SlapoError as error:
        return str(error)
    finally:
        setattr(derive, rule, right)
    return ""


@pytest.mark.parametrize(("rule", "found"), [("enter", "the gradients of"), ("row", "output")])
def test_the_probe_finds_a_wrong_table(rule, found, root, ranks):
    """Without the sum of dx only gradients are wrong; without that of y, outputs are."""
    case = DERIVED["qwen2"]
    for text in ranks.run(spoiled, 2, case, checkpoint(case, root), rule):
        assert "failed its check" in text
        assert found in text


def test_the_probe_keeps_heads_and_groups():
    from slapo_zoo.zoo.derived_check import shrunken

    config = transformers.Qwen2Config(num_attention_heads=28, num_key_value_heads=4, attention_dropout=0.1)  # fmt: skip
    small = shrunken(config, 4)
    assert (small.num_attention_heads, small.num_key_value_heads) == (28, 4)
    assert small.num_hidden_layers == 4
    assert small.attention_dropout == 0.0
    assert config.attention_dropout == 0.1
    assert small.hidden_size == 28 * 8


def test_parts_that_are_gathered_are_equal(root, ranks):
    """Phi3's fused weights are no multiple of 3: refused, not gathered wrongly."""
    case = DERIVED["phi3"]
    for text in ranks.run(over_three, 3, checkpoint(case, root)):
        assert "not a multiple of mesh_dim tp=3" in text


def over_three(folder):
    try:
        AutoScheduledModel.from_pretrained(folder, tp=3, schedule="auto")
    except SlapoError as error:
        return str(error)
    return ""
