"""Masked-language models whose loss is computed from masked tokens alone."""

import copy

import pytest
import torch
import transformers

from kernel_checks import KERNELS

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 40, "embedding_size": 24,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
MODELS = ["Bert", "Roberta", "Albert"]
HEADS = {"Bert": "cls.predictions", "Roberta": "lm_head", "Albert": "predictions"}


class Site:
    def __init__(self, module):
        self.module = module


def pair(kind):
    """A model, and its copy with the kernel."""
    sizes = (
        dict(SIZES)
        if kind == "Albert"
        else {k: v for k, v in SIZES.items() if k != "embedding_size"}
    )
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}ForMaskedLM")(config)
    model.train()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    fast = copy.deepcopy(model)
    kernel = KERNELS["sparse_mlm_head_loss"]
    head = fast.get_submodule(HEADS[kind])
    assert kernel.refuses(head) == ""
    kernel.install(Site(head))
    return model, fast


def batch(masked=0.15):
    ids = torch.randint(3, 97, (3, 17))
    labels = torch.where(torch.rand(3, 17) < masked, ids, -100)
    mask = torch.ones_like(ids)
    mask[0, 9:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("kind", MODELS)
def test_sparse_mlm_head_kernel_has_the_loss_and_gradients_of_transformers(kind):
    model, fast = pair(kind)
    given = batch()
    want, found = model(**given), fast(**given)
    torch.testing.assert_close(found.loss, want.loss)
    want.loss.backward()
    found.loss.backward()
    for (name, p), q in zip(model.named_parameters(), fast.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, atol=2e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("kind", MODELS)
def test_sparse_mlm_head_kernel_computes_full_logits_only_when_they_are_read(kind):
    model, fast = pair(kind)
    given, calls = batch(), []
    decoder = [m for n, m in fast.named_modules() if n.endswith("decoder")][-1]

    def see(_module, arguments):
        calls.extend(x.shape for x in arguments if len(x))

    see.__module__ = "slapo_zoo.of_tests"  # a hook of others would make them at once
    decoder.register_forward_pre_hook(see)
    found, want = fast(**given), model(**given)
    assert found.logits.shape == want.logits.shape
    assert not calls
    torch.testing.assert_close(found.logits + 0, want.logits)
    torch.testing.assert_close(found.logits.argmax(-1), want.logits.argmax(-1))
    assert len(calls) == 1


def test_sparse_mlm_head_kernel_without_labels_or_targets_equals_plain_transformers():
    model, fast = pair("Bert")
    given = batch()
    labels = given.pop("labels")
    torch.testing.assert_close(fast(**given).logits, model(**given).logits)
    given["labels"] = torch.full_like(labels, -100)
    loss = fast(**given).loss
    assert loss.isnan()
    assert model(**given).loss.isnan()
    loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in fast.parameters())


def test_sparse_mlm_head_kernel_returns_a_tuple_when_return_dict_is_false():
    _, fast = pair("Bert")
    loss, logits = fast(**batch(), return_dict=False)
    assert logits.shape == (3, 17, 97)
    assert loss.ndim == 0


def test_sparse_mlm_head_kernel_in_eval_mode_runs_the_transformers_head():
    """In eval mode, without gradients and in compiled code the plain head runs."""
    model, fast = pair("Bert")
    given = batch()
    with torch.no_grad():
        assert type(fast(**given).logits) is torch.Tensor
    torch.testing.assert_close(fast.eval()(**given).logits, model.eval()(**given).logits)


def test_sparse_mlm_head_kernel_refuses_a_linear_module():
    assert "serves" in KERNELS["sparse_mlm_head_loss"].refuses(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("kind", MODELS)
def test_sparse_mlm_head_kernel_calls_user_hooks_on_the_decoder(kind):
    """A hook acts on every row, so all logits are computed as the model computes them."""
    model, fast = pair(kind)
    for each in (model, fast):
        decoder = each.get_submodule(f"{HEADS[kind]}.decoder")
        decoder.register_forward_pre_hook(lambda _, args: (2 * args[0],))
    given = batch()
    torch.testing.assert_close(fast(**given).loss, model(**given).loss)
