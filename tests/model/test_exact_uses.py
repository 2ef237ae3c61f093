"""Uses of a model with `exact=` beside plain steps: what they return, and those that are refused in words."""

import copy
import os
from functools import partial

import pytest
import torch

from parity import Case, batch_of, checkpoint
from slapo_zoo import AutoScheduledModel
from slapo_zoo.errors import SlapoError

GPT2 = Case("GPT2LMHeadModel", ("tokens",), rows=8)


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("exact")


def with_penalty(model):
    return lambda output, _: output.loss + 0.1 * sum(p.square().sum() for p in model.parameters())


def weighted(logits, labels, vocab_size, **_):
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    return torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), shifted.flatten(), torch.linspace(0.1, 2.0, vocab_size)
    )


def of_a_process(folder, virtual):
    """Counts of targets, logits of a step, a teacher in the loss, autocast and encoder states: what the user sees of each."""
    model = AutoScheduledModel.from_pretrained(folder, exact=virtual, seed=3).train()
    batches = [batch_of(GPT2, step) for step in (0, 1)]
    count = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    losses = [float(model.train_step(batch, targets=[count])) for batch in batches]
    found = [*losses, float(model.clip_grad_norm_(1.0))]
    output = model.train_step(batches[0], 1, True)
    found += [float(output.loss), output.logits]

    def distilled(out, batch):
        with torch.no_grad():
            states = model(**{**batch, "labels": None}, output_hidden_states=True).hidden_states
        return (out.logits - states[-1].sum((1, 2))[:, None, None]).square().mean()

    found.append(float(model.train_step(batches[1], loss_fn=distilled)))
    model.zero_grad()
    model.train_step(batches[1], loss_fn=with_penalty(model))
    found.append(float(model.clip_grad_norm_(1.0)))
    model.loss_function, own = weighted, model.hosted[0].loss_function
    found.append(float(model.train_step(batches[1])))
    model.loss_function = own
    with torch.autocast("cpu", torch.bfloat16):
        output = model(**batches[0])
    found += [float(output.loss.detach()), output.logits.mul_(2).dtype]
    child = os.fork()  # as a DataLoader does for its workers
    if not child:
        os._exit(0)
    found.append(os.waitpid(child, 0)[1])
    model.close()
    return found


def test_virtual_ranks_of_a_process_return_counts_logits_and_casts_of_all_its_rows(root, ranks):
    folder = checkpoint(GPT2, root)
    one, *several = (
        ranks.run(of_a_process, 1, folder, mesh)[0] for mesh in ({"tp": 1}, {"dp": 2}, {"tp": 2})
    )
    for found in several:
        for mine, its in zip(found[:8], one[:8], strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-5)
        assert found[8] == pytest.approx(one[8], rel=2e-2)
        assert found[9:] == one[9:] == [torch.bfloat16, 0]


def refused(folder, exact, options, act):
    model = None
    try:
        model = AutoScheduledModel.from_pretrained(folder, tp=1, exact=exact, **options)
        act(model)
    except SlapoError as error:
        return str(error)
    finally:
        if model is not None:
            model.close()


def nothing(model):
    pass


def uneven(model):
    model.train_step({"input_ids": torch.ones(3, 4, dtype=torch.int64)})


def clipped_by_torch(model):
    model.train()
    optimizer = torch.optim.AdamW(model.parameters())
    model.train_step(batch_of(GPT2))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def of_another_mesh(model):
    AutoScheduledModel.from_pretrained(model.hosted[0].name_or_path, exact={"tp": 4})


def loss_of_logits(model):
    model.train()
    model(**batch_of(GPT2)).logits.square().mean().backward()


def generated(model):
    model.generate(torch.ones(1, 3, dtype=torch.int64))


def called_by_position(model):
    ids = torch.ones(2, 3, dtype=torch.int64)
    model.eval()
    with torch.no_grad():
        same = torch.equal(model(ids).logits, model(input_ids=ids).logits)
    raise SlapoError("test", "", "the same logits" if same else "other logits")


def in_any_order(model):
    try:
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
    except RuntimeError as error:
        raise SlapoError("test", "", str(error)) from None


def called_in_part(model):
    model.transformer(torch.ones(2, 3, dtype=torch.int64))


def adafactor(model):
    model.train()
    model.train_step(batch_of(GPT2))
    torch.optim.Adafactor(model.parameters()).step()


def stepped_with(model, loss_fn=None, **changes):
    """Take a step on a batch with further entries."""
    model.train()
    model.train_step({**batch_of(GPT2), **changes}, loss_fn=loss_fn)


def on_a_list(model):
    model.train_step([1])


HEAD = torch.nn.Linear(99, 1)


def by_a_head(output, batch):
    return HEAD(output.logits.float()).square().mean()


def digest_within(model):
    stepped_with(model, lambda output, batch: (model.step_digest(), output.loss)[1])


def term_on_weights(model):
    model.train()
    (model(**batch_of(GPT2)).loss + sum(p.norm() for p in model.parameters())).backward()


def scaled_by_torch(model):
    model.train()
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.AdamW(model.parameters())
    scaler.scale(model(**batch_of(GPT2)).loss).backward()
    scaler.step(optimizer)


def after_close(model):
    model.close()
    model.train_step(batch_of(GPT2))


@pytest.mark.parametrize(
    ("exact", "options", "act", "words"),
    [
        ({"dp": 2}, {}, on_a_list, "found a list, expected a dictionary"),
        (
            {"tp": 2},
            {},
            partial(stepped_with, loss_fn=by_a_head),
            "would add to the same .grad of [",
        ),
        (
            {"tp": 2},
            {},
            partial(stepped_with, more=torch.ones(8, requires_grad=True)),
            "requires a gradient",
        ),
        ({"dp": 2}, {}, partial(stepped_with, past_key_values=()), "an entry is a KV cache"),
        ({"tp": 2}, {}, digest_within, "or this is the thread of one"),
        ({"dp": 2}, {}, term_on_weights, "reads weights of virtual ranks outside their threads"),
        ({"tp": 2}, {}, scaled_by_torch, "use slapo_zoo.GradScaler(model)"),
        ({"tp": 2}, {}, after_close, "the ranks have ended"),
        ({"tp": 0}, {}, nothing, "found tp=0, expected a positive integer"),
        ({"cols": 2}, {}, nothing, "no such mesh dim: cols"),
        ("yes", {}, nothing, "expected True, or sizes"),
        ({"tp": 2}, {"kernels": "measure"}, nothing, "chooses by timings"),
        ({"tp": 2}, {"target": "deepspeed"}, nothing, "in another order"),
        ({"dp": 2}, {}, uneven, "3 rows for 2 virtual dp ranks"),
        ({"tp": 2}, {}, clipped_by_torch, "call model.clip_grad_norm_"),
        ({"tp": 2}, {}, of_another_mesh, "use one virtual mesh for all models of a process"),
        ({"tp": 2}, {"schedule": 7}, nothing, "schedule"),
        ({"dp": 2}, {}, loss_of_logits, "train_step(batch, loss_fn=...)"),
        (
            {"tp": 2},
            {},
            generated,
            "ExactModel: generate: only a model loaded without exact= has this attribute",
        ),
        (
            {"tp": 2},
            {},
            called_in_part,
            "ExactModel: transformer: only a model loaded without exact=",
        ),
        ({"tp": 2}, {}, called_by_position, "the same logits"),
        ({"tp": 2}, {}, in_any_order, "does not have a deterministic implementation"),
        ({"tp": 2}, {}, adafactor, "element by element"),
        ({"tp": 2}, {}, copy.deepcopy, "cannot be copied"),
    ],
)
def test_bit_exact_mode_raises_for_unsupported_sizes_options_batches_and_optimizers(
    exact, options, act, words, root, ranks
):
    (found,) = ranks.run(refused, 1, checkpoint(GPT2, root), exact, options, act)
    assert words in (found or "it was taken")
    assert ranks.run(torch.are_deterministic_algorithms_enabled, 1) == [False]
