"""Every family of the zoo, each head class, against plain transformers.

The LM head of each family runs on every layout; the other heads run on tp=2 x pp=2.
"""

import pytest
import torch
from safetensors.torch import load_file

from parity import LAYOUTS, Case, checkpoint, compare, references, scheduled

THREE = (("num_labels", 3),)
LM = [
    Case("RobertaForMaskedLM", ("tokens",)),
    Case("AlbertForMaskedLM", ("tokens",)),
    Case("GPTNeoForCausalLM", ("tokens",)),
    Case("OPTForCausalLM", ("tokens",)),
    Case("T5ForConditionalGeneration", ("tokens",)),
    Case("LlamaForCausalLM", ("tokens",)),
    Case("MistralForCausalLM", ("tokens",)),
    Case("Qwen3ForCausalLM", ("tokens",), (("tie_word_embeddings", True),)),
    Case("MixtralForCausalLM", ("tokens",)),
    Case("GPTNeoXForCausalLM", ("tokens",)),
    Case("MambaForCausalLM", ("tokens",)),
    Case("ViTForImageClassification", ("class",), THREE),
]
HEADS = [
    Case("RobertaForCausalLM", ("tokens",), (("is_decoder", True),)),
    Case("RobertaForSequenceClassification", ("class",), THREE),
    Case("RobertaForTokenClassification", ("tags",), THREE),
    Case("RobertaForQuestionAnswering", ("span",)),
    Case("RobertaForMultipleChoice", ("choice",), choices=2),
    Case("AlbertForSequenceClassification", ("class",), THREE),
    Case("AlbertForTokenClassification", ("tags",), THREE),
    Case("AlbertForQuestionAnswering", ("span",)),
    Case("AlbertForMultipleChoice", ("choice",), choices=2),
    Case("GPTNeoForSequenceClassification", ("class",), THREE),
    Case("GPTNeoForTokenClassification", ("tags",), THREE),
    Case("GPTNeoForQuestionAnswering", ("span",)),
    Case("OPTForSequenceClassification", ("class",), THREE),
    Case("OPTForQuestionAnswering", ("span",)),
    Case("OPTForCausalLM", ("tokens",), (("word_embed_proj_dim", 14), ("do_layer_norm_before", False))),
    Case("T5ForConditionalGeneration", ("tokens",), (("feed_forward_proj", "gated-gelu"), ("tie_word_embeddings", False))),
    Case("T5ForTokenClassification", ("tags",), THREE),
    Case("LlamaForCausalLM", ("tokens",), (("tie_word_embeddings", True),)),
    Case("LlamaForSequenceClassification", ("class",), THREE),
    Case("LlamaForTokenClassification", ("tags",), THREE),
    Case("LlamaForQuestionAnswering", ("span",)),
    Case("MistralForSequenceClassification", ("class",), THREE),
    Case("MistralForTokenClassification", ("tags",), THREE),
    Case("MistralForQuestionAnswering", ("span",)),
    Case("MixtralForCausalLM", ("tokens",), (("tie_word_embeddings", True), ("sliding_window", 5))),
    Case("MixtralForSequenceClassification", ("class",), THREE),
    Case("MixtralForTokenClassification", ("tags",), THREE),
    Case("MixtralForQuestionAnswering", ("span",)),
    Case("GPTNeoXForCausalLM", ("tokens",), (("use_parallel_residual", False), ("attention_bias", False))),
    Case("GPTNeoXForSequenceClassification", ("class",), THREE),
    Case("GPTNeoXForTokenClassification", ("tags",), THREE),
    Case("GPTNeoXForQuestionAnswering", ("span",)),
    Case("MambaForCausalLM", ("tokens",), (("use_bias", True), ("tie_word_embeddings", False))),
    Case("Qwen3ForSequenceClassification", ("class",), THREE),
    Case("Qwen3ForTokenClassification", ("tags",), THREE),
    Case("Qwen3ForQuestionAnswering", ("span",)),
]  # fmt: skip
GRID = [(case, layout) for case in LM for layout in LAYOUTS] + [(case, "2x2x1") for case in HEADS]


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("zoo")


@pytest.mark.parametrize(("case", "layout"), GRID, ids=lambda x: x if isinstance(x, str) else x.cls)
def test_equals_plain_transformers(case, layout, root, ranks):
    folder = checkpoint(case, root)
    truth, plains = references(case, folder)
    sizes = LAYOUTS[layout]
    results = ranks.run(scheduled, sizes[0] * sizes[1] * sizes[2], case, folder, sizes)
    compare(results[0][0], plains, truth)
    first = results[0][0]  # compared with the truth above; every rank has the same
    assert all(result.losses == pytest.approx(first.losses, rel=1e-6) for result, _ in results)


def save(case, folder, sizes, out):
    from slapo_zoo import AutoScheduledModel

    tp, pp, dp = sizes
    model = AutoScheduledModel.from_pretrained(folder, tp=tp, pp=pp, dp=dp, auto_class=case.cls)
    model.save_pretrained(out)


@pytest.mark.parametrize("case", LM, ids=lambda case: case.cls)
def test_saved_as_plain_transformers_saves(case, root, ranks, tmp_path):
    folder = checkpoint(case, root)
    ranks.run(save, 4, case, folder, (2, 2, 1), tmp_path / "out")
    want, found = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    assert found.keys() == want.keys()
    assert all(torch.equal(found[key], want[key]) for key in want)
