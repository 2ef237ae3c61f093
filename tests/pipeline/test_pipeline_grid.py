"""Every family over every pipeline order and layout, against plain transformers (minutes).

`ci/run.py grid -k pipeline_grid` runs all that is slow; `-k "zbv and 1x4x1"` a part of it.
"""

from dataclasses import replace

import pytest

from parity import Case, checkpoint, compare, references, scheduled
from slapo_zoo.pipeline.orders import ORDERS

ROWS = 8  # DualPipeV on 8 stages needs as many micro-batches


def case(cls, labels="tokens", **config):
    """Return the case with 8 blocks, one per stage of interleaved orders on four ranks."""
    return Case(cls, (labels,), tuple(config.items()), rows=ROWS)


HALF = {"attention_types": ((("global", "local"), 2),), "num_layers": 2, "num_decoder_layers": 2}


def halved(case):
    """Return the case with 4 blocks, one per stage of interleaved orders on two ranks."""
    blocks = {name: HALF.get(name, 4) for name, value in case.config if value == 8 or name in HALF}
    if "attention_types" in blocks:
        blocks["num_layers"] = 4
    return replace(case, config=tuple((dict(case.config) | blocks).items()))


FAMILIES = [
    case("GPT2LMHeadModel", n_layer=8),
    case("BertForMaskedLM", num_hidden_layers=8),
    case("RobertaForMaskedLM", num_hidden_layers=8),
    case("AlbertForMaskedLM", num_hidden_layers=8),
    case("GPTNeoForCausalLM", num_layers=8, attention_types=((("global", "local"), 4),)),
    case("OPTForCausalLM", num_hidden_layers=8),
    case("T5ForConditionalGeneration", num_layers=3, num_decoder_layers=5),
    case("LlamaForCausalLM", num_hidden_layers=8),
    case("MistralForCausalLM", num_hidden_layers=8),
    case("Qwen3ForCausalLM", num_hidden_layers=8, tie_word_embeddings=True),
    case("MixtralForCausalLM", num_hidden_layers=8),
    case("GPTNeoXForCausalLM", num_hidden_layers=8),
    case("MambaForCausalLM", num_hidden_layers=8),
    case("ViTForImageClassification", "class", num_hidden_layers=8, num_labels=3),
]
LAYOUTS = {"1x2x1": (1, 2, 1), "1x4x1": (1, 4, 1), "2x2x1": (2, 2, 1), "1x2x2": (1, 2, 2)}


def micro_batches(order, layout):
    """Return the number of micro-batches that the order needs."""
    return 8 if (order, layout[1]) == ("dualpipev", 4) else 4


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("grid")


def run(case, folder, layout, order):
    count = micro_batches(order, layout)
    return scheduled(case, folder, layout, micro_batches=count, pipeline_order=order)


def grid():
    """Return the full grid; one case per family and two per order run always."""
    for i, family in enumerate(FAMILIES):
        for j, order in enumerate(ORDERS):
            for layout in LAYOUTS:
                always = layout == "1x2x1" and j == i % len(ORDERS)
                marks = () if always else pytest.mark.slow
                sized = halved(family) if LAYOUTS[layout][1] == 2 else family
                yield pytest.param(sized, order, layout, marks=marks,
                                   id=f"{family.cls}-{order}-{layout}")  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("case", "order", "layout"), list(grid()))
def test_pipeline_training_on_every_layout_has_the_gradients_of_plain_transformers(
    case, order, layout, root, threads
):
    folder = checkpoint(case, root)
    truth, plains = references(case, folder)
    results = threads.run(run, 2 if layout == "1x2x1" else 4, case, folder, LAYOUTS[layout], order)
    compare(results[0][0], plains, truth)
    first = results[0][0]  # compared with the truth above; every rank has the same
    assert all(result.losses == pytest.approx(first.losses, rel=1e-6) for result, _ in results)
