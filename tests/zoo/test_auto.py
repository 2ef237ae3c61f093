"""Families without a table: refused with the nearest names, or derived and proven by schedule="auto"."""

import json
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import transformers
from huggingface_hub import constants

from forked_child import ForkedChild
from parity import CHANGES, LAYOUTS, Case, checkpoint, compare, references, scheduled
from refusals import refused
from slapo_zoo import ArchitectureError, AutoScheduledModel, MeshError
from slapo_zoo.errors import SlapoError
from slapo_zoo.model.load import auto_schedule as derived
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.ranks.apart import ProcessApart, python_apart
from slapo_zoo.parallel.ranks.emulation import emulate
from slapo_zoo.verify.apart import CHILD
from slapo_zoo.verify.derive import derive
from slapo_zoo.zoo.argument_values import changed_config
from slapo_zoo.zoo.options import BuildOptions
from slapo_zoo.zoo.table import families
from tiny_configs import LLAMA, TINY

SMALL = {k: v for k, v in LLAMA.items() if k != "head_dim"} | {"hidden_size": 32}
WITHOUT_PLAN = ("mpt", "convbert", "pegasus")  # transformers has no plan for them
DERIVED = {
    "arcee": Case("ArceeForCausalLM", ("tokens",), (("tie_word_embeddings", True),)),
    "cwm": Case("CwmForCausalLM", ("tokens",), (("head_dim", 4),)),
    "olmo": Case("OlmoForCausalLM", ("tokens",)),
    "starcoder2": Case("Starcoder2ForCausalLM", ("tokens",)),
    "glm": Case("GlmForCausalLM", ("tokens",), (("head_dim", 4), ("intermediate_size", 64))),
    "mpt": Case("MptForCausalLM", ("tokens",)),
    "convbert": Case("ConvBertForMaskedLM", ("tokens",)),
    "pegasus": Case("PegasusForConditionalGeneration", ("tokens",)),
    "arcee-classes": Case("ArceeForSequenceClassification", ("class",), (("num_labels", 3),)),
}  # fmt: skip
TINY.setdefault("mpt", {"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 99})
TINY.setdefault(
    "convbert",
    {
        "hidden_size": 32,
        "embedding_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "vocab_size": 99,
        "max_position_embeddings": 64,
    },
)
TINY.setdefault(
    "pegasus",
    {
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "vocab_size": 99,
        "max_position_embeddings": 64,
        "pad_token_id": 1,
        "decoder_start_token_id": 2,
    },
)
for _case in DERIVED.values():  # their tiny configs are Llama's
    TINY.setdefault(getattr(transformers, _case.cls).config_class.model_type, SMALL)


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("auto")


def proven(case, folder, sizes, knobs):
    """Fill the cache with the proof of a case, as a first load does."""
    config = changed_config(folder, dict(case.config))
    cls = getattr(transformers, case.cls)
    options = BuildOptions(schedule="auto", **knobs)
    file = derived.cache_file(config, cls, (*sizes, 1, options.cp_attention), options)
    if not file.exists():
        derived._write(file, derive(config, cls, sizes, **knobs).document())


def run(case, folder, sizes, micro_batches=None):
    home_of(folder.parent)
    return scheduled(case, folder, sizes, micro_batches, schedule="auto")


def home_of(folder):
    """Set the cache folder of this test run, in every process."""
    constants.HF_HOME = str(folder)


def cells():
    """Yield all families on three layouts; most run always on one of them, Arcee on all."""
    for i, name in enumerate(DERIVED):
        for j, layout in enumerate(("2x1x1", "2x2x1", "2x2x1-sp")):
            if layout.endswith("sp") and name in WITHOUT_PLAN:
                continue  # a table that gathers after each product shards no tokens
            quick = i % 3 == j and name not in ("cwm", "pegasus")  # Llama's and BART's layers
            marks = () if quick or name == "arcee" else pytest.mark.slow
            yield pytest.param(name, layout, marks=marks, id=f"{name}-{layout}")


@pytest.mark.one_in(4, 2)
@pytest.mark.parametrize(("name", "layout"), [*cells()])
def test_schedule_auto_training_has_the_losses_and_gradients_of_plain_transformers(
    name, layout, root, threads, monkeypatch
):
    monkeypatch.setattr(derived, "python_apart", None)  # the proof below is found in the cache
    case, sizes = DERIVED[name], LAYOUTS[layout]
    folder = checkpoint(case, root)
    home_of(root)
    proven(case, folder, sizes[:3], {"sequence_parallel": True} if sizes[3:] == (True,) else {})
    truth, plains = references(case, folder)
    results = threads.run(run, sizes[0] * sizes[1] * sizes[2], case, folder, sizes)
    compare(results[0][0], plains, truth)


def test_schedule_auto_uses_the_hand_written_schedule_of_a_known_family(root):
    folder = checkpoint(Case("GPT2LMHeadModel", ("tokens",)), root)
    model = AutoScheduledModel.from_pretrained(folder, schedule="auto")
    assert str(model.schedule) == str(AutoScheduledModel.from_pretrained(folder).schedule)


def test_error_for_an_unknown_model_family_suggests_schedule_auto(root):
    text = refused(ArchitectureError, checkpoint(DERIVED["arcee"], root))
    assert "model_type='arcee'" in text
    assert "nearest: [" in text
    assert 'schedule="auto"' in text
    assert all(name in text for name in families())


def test_schedule_auto_caches_its_derivation_and_a_second_load_has_the_same_loss(
    tmp_path, forked_child
):
    home_of(tmp_path)
    config = transformers.MptConfig(vocab_size=99, d_model=32, n_layers=2, n_heads=4)
    first, second = (emulate(load_on_two, config, mesh=(2, 1, 1))[0] for _ in range(2))
    assert first == second
    (file,) = (tmp_path / "slapo_zoo" / "derived").iterdir()
    assert file.name.startswith("mpt-")


def load_on_two(config):
    derived.PROVEN.clear()
    model = AutoScheduledModel.from_config(config, tp=2, schedule="auto", auto_class="AutoModelForCausalLM")  # fmt: skip
    ids = torch.arange(16)[None]
    return float(model.train_step({"input_ids": ids, "labels": ids}))


ALONE = {  # as one rank divides them: over micro-batches
    "no shift in spite of its name": Case("PegasusForCausalLM", ("tokens",)),
    "a shift that its name does not tell": Case("BertGenerationDecoder", ("tokens",), (("is_decoder", True),)),
    "files that spell in pieces": Case("OlmoeForCausalLM", ("tokens",)),
}  # fmt: skip
TINY.setdefault("bert-generation", {k: v for k, v in TINY["convbert"].items() if k != "embedding_size"})  # fmt: skip
CHANGES.setdefault("Olmoe", CHANGES["Mixtral"])
TINY.setdefault("olmoe", {**SMALL, "num_experts": 4, "num_experts_per_tok": 2})


@pytest.mark.one_in(3)  # a derivation takes a second or two
@pytest.mark.parametrize("name", ALONE)
def test_schedule_auto_on_one_rank_with_micro_batches_has_the_gradients_of_transformers(
    name, root, threads, monkeypatch
):
    monkeypatch.setattr(derived, "python_apart", None)  # the proof below is found in the cache
    case = ALONE[name]
    folder = checkpoint(case, root)
    home_of(root)
    proven(case, folder, (1, 1, 1), {})
    truth, plains = references(case, folder)
    compare(threads.run(run, 1, case, folder, (1, 1, 1), 2)[0][0], plains, truth)


@pytest.mark.slow
def test_schedule_auto_on_one_rank_draws_the_dropout_masks_of_two_ranks(root, ranks):
    case = Case("PegasusForCausalLM", ("tokens",), dropout=0.25)
    folder = checkpoint(case, root)
    home_of(root)
    found = []
    for tp in (1, 2):
        proven(case, folder, (tp, 1, 1), {})
        found.append(ranks.run(run, tp, case, folder, (tp, 1, 1))[0][0])
    assert found[0].losses == pytest.approx(found[1].losses, rel=1e-6)


def test_schedule_auto_refuses_micro_batches_if_no_sharding_rules_could_be_derived(monkeypatch):
    monkeypatch.setattr(
        derived, "_document", lambda *_: {"error_of": ["zoo", "auto", "no", "none"]}
    )
    config = transformers.MptConfig(vocab_size=99, d_model=32, n_layers=2, n_heads=4)
    model = AutoScheduledModel.from_config(config, schedule="auto", auto_class="AutoModelForCausalLM")  # fmt: skip
    batch = {"input_ids": torch.ones(2, 4).long(), "labels": torch.ones(2, 4).long()}
    assert not model.schedule.state.placed
    assert model.train_step(batch, micro_batches=1) > 0
    with pytest.raises(MeshError, match="the loss is no mean over rows"):
        model.train_step(batch, micro_batches=2)


def test_schedule_auto_accepts_a_config_value_of_infinity(monkeypatch, tmp_path):
    """Configs of Mamba hybrids have an infinite number, which transformers writes to JSON as a dict."""
    config, asked = transformers.BambaConfig(num_hidden_layers=1), []

    def document(request, *_):
        asked.append(json.loads(json.dumps(request))["config"])
        raise ArchitectureError("here", "", "that is enough", "")

    monkeypatch.setattr(derived, "_document", document)
    monkeypatch.setattr(derived, "cache_file", lambda *_: tmp_path / "none")
    with pytest.raises(ArchitectureError, match="that is enough"):
        derived.proven_table(config, transformers.BambaForCausalLM, Mesh(2), BuildOptions())
    again = transformers.AutoConfig.for_model(**asked[0])
    assert again.time_step_limit[1] == float("inf")


def test_schedule_auto_refuses_a_class_defined_in_main_on_two_ranks():
    cls = type("Own", (transformers.MptForCausalLM,), {"__module__": "__main__"})
    config = transformers.MptConfig(vocab_size=98, d_model=32, n_layers=2, n_heads=4)
    with pytest.raises(SlapoError, match="cannot import a class of __main__"):
        derived.proven_table(config, cls, Mesh(2), BuildOptions())
    assert derived.proven_table(
        config, cls, Mesh(), BuildOptions()
    ).blocks  # alone it runs unsharded


OWN = """
from transformers import MptConfig, MptForCausalLM
class Config(MptConfig):
    model_type = "own_of_tests"
class Own(MptForCausalLM):
    config_class = Config
"""


def test_schedule_auto_subprocess_imports_a_user_class_and_reports_an_import_error(tmp_path):
    Path(tmp_path, "own_of_tests.py").write_text(OWN)
    request = {"config": {"model_type": "own_of_tests"}, "cls": "Own", "module": "own_of_tests", "cut": 1}  # fmt: skip
    with patch.object(sys, "path", [str(tmp_path), *sys.path]):
        found = python_apart(CHILD, request).wait(60).document()
    assert "no sharding rules for this model family" in found["error_of"][2]
    found = ForkedChild(CHILD, {**request, "module": "no_module"}).wait(60).document()
    assert found["error_of"][2] == "ModuleNotFoundError: No module named 'no_module'"


def test_schedule_auto_kills_its_derivation_process_on_keyboard_interrupt(tmp_path, monkeypatch):
    started = ProcessApart([sys.executable, "-S", "-c", "import time; time.sleep(60)"])

    def interrupted(mesh, what, action):
        assert action() is None  # it runs
        raise KeyboardInterrupt

    monkeypatch.setattr(derived, "python_apart", lambda module, request: started)
    monkeypatch.setattr(derived, "together", interrupted)
    with pytest.raises(KeyboardInterrupt):
        derived._document({}, tmp_path / "none.json", Mesh())
    assert started.process.poll() is not None
