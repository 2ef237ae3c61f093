"""Pipeline training with other lengths, accumulation, recomputation, evaluation and logits."""

import functools

import pytest
import torch

from parity import Case, batch_of, checkpoint
from slapo_zoo import AutoScheduledModel
from tiny_configs import TINY

GPT2 = Case("GPT2LMHeadModel", ("tokens",), (("n_layer", 8),), dropout=0.2)
T5 = Case(
    "T5ForConditionalGeneration", ("tokens",), (("num_layers", 4), ("num_decoder_layers", 4)),
    dropout=0.2,
)  # fmt: skip
QA = Case("BertForQuestionAnswering", ("span",), (("num_hidden_layers", 4),))


@functools.cache
def folder_of(case, root):
    return checkpoint(case, root)


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("training")


def build(case, folder, layout, **options):
    tp, pp, dp = layout
    return AutoScheduledModel.from_pretrained(
        folder, tp=tp, pp=pp, dp=dp, seed=3, auto_class=case.cls, **options
    ).train()


def shorter(batch, tokens):
    """The first tokens of the batch; targets are cut likewise."""
    return {k: v[:, :tokens].contiguous() for k, v in batch.items()}


def losses_and_gradients(case, folder, layout, **options):
    """Losses of steps of several lengths with evaluation between; gradients add up over all."""
    model = build(case, folder, layout, **options)
    losses = []
    for step, tokens in enumerate((12, 8, 12, 6)):
        batch = shorter(batch_of(case, step), tokens)
        losses.append(float(model.train_step(batch)))
        if step == 1:
            model.eval()
            with torch.no_grad():
                losses.append(float(model(**batch_of(case, 7)).loss))
            model.train()
    return losses, model.consolidated_state_dict(grads=True)


RUNS = [
    (GPT2, (1, 2, 1), {"pipeline_order": "zbv", "checkpoint_ratio": 1.0, "micro_batches": 4}),
    (GPT2, (1, 4, 1), {"pipeline_order": "1f1b", "checkpoint_ratio": 0.5}),
    (GPT2, (2, 2, 1), {"pipeline_order": "interleaved_zero_bubble", "checkpoint_ratio": 0.5}),
    (T5, (1, 2, 1), {"pipeline_order": "dualpipev", "checkpoint_ratio": 0.5, "micro_batches": 4}),
    (T5, (1, 4, 1), {"pipeline_order": "gpipe", "checkpoint_ratio": 1.0}),
]


@pytest.mark.one_in(3, 2)
@pytest.mark.parametrize(("case", "layout", "options"), RUNS)
def test_pipeline_training_with_dropout_has_the_losses_and_gradients_of_one_process(
    case, layout, options, root, threads
):
    """Train with dropout, recomputation, four sequence lengths, accumulation, and evaluation between steps."""
    folder = folder_of(case, root)
    ((want, gradients),) = threads.run(losses_and_gradients, 1, case, folder, (1, 1, 1))
    world = layout[0] * layout[1] * layout[2]

    results = threads.run(with_options, world, case, folder, layout, options)
    for losses, _ in results:
        assert losses == pytest.approx(want, rel=2e-5)
    found = results[0][1]
    assert found.keys() == gradients.keys()
    largest = max(float(g.abs().max()) for g in gradients.values())
    for name, grad in gradients.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=2e-6 * largest, msg=name)


def with_options(case, folder, layout, options):
    return losses_and_gradients(case, folder, layout, **options)


def logits_of_step(case, folder, layout, order):
    """Logits of a training step without dropout, and those of a forward."""
    model = build(case, folder, layout, pipeline_order=order)
    rows = case.rows // layout[2]
    part = slice(model.mesh.coord("dp") * rows, (model.mesh.coord("dp") + 1) * rows)
    batch = {k: v[part] for k, v in batch_of(case).items()}
    stepped = model.train_step(batch, return_logits=True)
    loss = model.train_step(batch)
    assert torch.equal(loss, stepped.loss)
    with torch.no_grad():
        plain = model.eval()(**batch)
    return {k: (stepped[k], plain[k]) for k in plain if k.endswith("logits")}


@pytest.mark.parametrize(
    ("case", "layout", "order"),
    [
        (Case("GPT2LMHeadModel", ("tokens",), (("n_layer", 4),)), (2, 2, 1), "1f1b"),
        (Case("GPT2LMHeadModel", ("tokens",), (("n_layer", 4),)), (1, 2, 1), "zbv"),
        (QA, (1, 2, 1), "looped_bfs"),
        (QA, (1, 1, 1), "1f1b"),
    ],
)
def test_train_step_of_a_pipeline_returns_logits_on_every_rank(case, layout, order, root, threads):
    results = threads.run(logits_of_step, layout[0] * layout[1] * layout[2],
                        case, folder_of(case, root), layout, order)  # fmt: skip
    names = {"start_logits", "end_logits"} if case is QA else {"logits"}
    for found in results:
        assert found.keys() == names
        for stepped, plain in found.values():
            torch.testing.assert_close(stepped, plain, rtol=1e-4, atol=1e-5)
            assert not stepped.requires_grad
    width = TINY["gpt2"]["vocab_size"] if case is not QA else 12
    assert next(iter(results[0].values()))[0].shape[-1] == width
