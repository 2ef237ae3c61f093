"""GPT-2 and BERT, each head class, on every layout, against plain transformers."""

import pytest
import torch

from parity import LAYOUTS, Case, checkpoint, compare, references, scheduled

CASES = [
    Case("GPT2LMHeadModel", ("tokens",)),
    Case("GPT2LMHeadModel", ("tokens",), (("add_cross_attention", True),)),
    Case("GPT2DoubleHeadsModel", ("tokens", "mc"), (("num_labels", 1),), choices=2),
    Case("GPT2ForSequenceClassification", ("class",), (("num_labels", 3),)),
    Case("GPT2ForTokenClassification", ("tags",), (("num_labels", 3),)),
    Case("GPT2ForQuestionAnswering", ("span",)),
    Case("BertForMaskedLM", ("tokens",)),
    Case("BertForPreTraining", ("tokens", "next")),
    Case("BertLMHeadModel", ("tokens",), (("is_decoder", True),)),
    Case("BertForNextSentencePrediction", ("two",)),
    Case("BertForSequenceClassification", ("class",), (("num_labels", 3),)),
    Case("BertForSequenceClassification", ("number",), (("num_labels", 1),)),
    Case("BertForSequenceClassification", ("multi",), (("num_labels", 3), ("problem_type", "multi_label_classification"))),
    Case("BertForTokenClassification", ("tags",), (("num_labels", 3),)),
    Case("BertForQuestionAnswering", ("span",)),
    Case("BertForMultipleChoice", ("choice",), choices=2),
]  # fmt: skip


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.cls}-{c.labels[0]}-{len(c.config)}")
def test_equals_plain_transformers(case, layout, root, ranks):
    folder = checkpoint(case, root)
    truth, plains = references(case, folder)
    sizes = LAYOUTS[layout]
    results = ranks.run(scheduled, sizes[0] * sizes[1] * sizes[2], case, folder, sizes)
    compare(results[0][0], plains, truth)
    _all_ranks_agree(results, sizes)


def _all_ranks_agree(results, sizes):
    """Losses and outputs are on every rank; tp and dp peers hold the same replicated weights."""
    first = results[0][0]
    for result, _ in results:
        assert result.losses == pytest.approx(first.losses, rel=1e-6)
        for name, want in first.outputs.items():
            torch.testing.assert_close(result.outputs[name], want, rtol=1e-5, atol=1e-6)
    tp, pp, dp = sizes[:3]
    for stage in range(pp):
        stage_ranks = results[stage * tp * dp : (stage + 1) * tp * dp]
        assert all(replicated == stage_ranks[0][1] for _, replicated in stage_ranks)
