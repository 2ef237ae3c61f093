"""Logits that are computed only when read, with their gradients."""

import copy

import pytest
import torch
from torch.nn import functional
from transformers import BertConfig, GPT2Config

from slapo_zoo import AutoScheduledModel, SlapoError

ENDS = {"bos_token_id": 1, "eos_token_id": 2}
CONFIGS = {
    "gpt2": GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=31, loss_type="ForCausalLMLoss", **ENDS,
                       architectures=["GPT2LMHeadModel"]),
    "bert": BertConfig(num_hidden_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=31,
                       intermediate_size=32, architectures=["BertForMaskedLM"]),
}  # fmt: skip
IDS = torch.arange(12).view(2, 6)


class OwnLoss(torch.autograd.Function):
    """User's autograd function that computes a loss with its own backward."""

    @staticmethod
    def forward(ctx, logits):
        ctx.save_for_backward(logits)
        return (logits.double() ** 2).sum()

    @staticmethod
    def backward(ctx, d):
        (logits,) = ctx.saved_tensors
        return (2 * d * logits).to(logits.dtype)


def through_own_loss(model):
    return OwnLoss.apply(model(input_ids=IDS).logits)


def through_a_view(model):
    return OwnLoss.apply(model(input_ids=IDS).logits[:, :-1].float())


def through_a_loss_in_cpp(model):
    logits = model(input_ids=IDS).logits
    return torch.ops.aten.nll_loss(logits.reshape(-1, 31).log_softmax(-1), IDS.reshape(-1))


def through_both(model):
    logits = model(input_ids=IDS).logits
    return functional.cross_entropy(logits.view(-1, 31), IDS.view(-1)) + OwnLoss.apply(logits)


def with_a_hook_on_the_head(model):
    model.get_output_embeddings().register_full_backward_hook(lambda module, dx, dy: None)
    return model(input_ids=IDS, labels=IDS).loss


def with_hooks_everywhere(model):
    for module in model.modules():
        module.register_full_backward_hook(lambda module, dx, dy: None)
    return model(input_ids=IDS, labels=IDS).loss


USES = [through_own_loss, through_a_view, through_a_loss_in_cpp, through_both, with_a_hook_on_the_head,
        with_hooks_everywhere]  # fmt: skip


@pytest.mark.filterwarnings("ignore:For backward hooks to be called")
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen-body"])
def test_lazy_logits_used_in_a_loss_have_the_gradients_of_eager_logits(family, use, frozen):
    grads = []
    for kernels in ("auto", "reference"):
        model = AutoScheduledModel.from_config(CONFIGS[family], seed=0, kernels=kernels).train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        model.base_model.requires_grad_(not frozen)
        model.get_output_embeddings().weight.requires_grad_(True)
        use(model).backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], rtol=1e-4, atol=1e-5, msg=name)


def test_retain_grad_of_lazy_logits_that_the_loss_did_not_use_raises():
    model = AutoScheduledModel.from_config(CONFIGS["gpt2"], seed=0).train()
    with pytest.raises(SlapoError, match="reference"):
        model(input_ids=IDS, labels=IDS).logits.retain_grad()
    logits, seen = model(input_ids=IDS).logits, []
    logits.register_hook(seen.append)
    logits.retain_grad()
    logits.sum().backward()
    assert torch.equal(logits.grad, torch.ones(2, 6, 31))
    assert len(seen) == 1


def test_model_with_loss_kernel_materializes_logits_only_when_they_are_read():
    model = AutoScheduledModel.from_config(CONFIGS["gpt2"], seed=0).train()
    logits = model(input_ids=IDS, labels=IDS).logits
    assert logits.requires_grad
    assert logits.grad_fn is not None
    assert logits.made is None
    assert logits.sum().isfinite()
    assert logits.made is not None


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("family", CONFIGS)
def test_lm_loss_kernel_applies_the_loss_scale_while_it_computes_gradients(
    family, micro_batches, monkeypatch
):
    """Dividing afterwards would take another pass over the gradient of the whole vocabulary."""
    from slapo_zoo.kernels.loss import lm_loss as kernel

    seen, own = [], kernel._scaled
    monkeypatch.setattr(kernel, "_scaled", lambda t, d: seen.append(float(d)) or own(t, d))
    config = copy.deepcopy(CONFIGS[family])
    for name in vars(config):
        if "drop" in name and name != "classifier_dropout":
            setattr(config, name, 0.0)
    batch = {"input_ids": IDS, "labels": IDS.masked_fill(IDS % 5 == 0, -100)}
    model = AutoScheduledModel.from_config(config, seed=0, kernels="auto").train()
    loss = model.train_step(batch, micro_batches=micro_batches)
    assert set(seen) == {1.0}
    plain = AutoScheduledModel.from_config(config, seed=0, kernels="reference").train()
    torch.testing.assert_close(loss, plain.train_step(batch, micro_batches=1))
    theirs = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad)


def _shifted(logits):
    return logits[:, :-1], IDS[:, 1:]


def log_probabilities(logits):
    shifted, targets = _shifted(logits)
    return shifted.log_softmax(-1).gather(-1, targets[..., None]).sum()


def distillation(logits):
    return (logits.float().log_softmax(-1) * logits.detach().softmax(-1)).sum()


def per_token(logits):
    shifted, targets = _shifted(logits)
    loss = functional.cross_entropy(shifted.reshape(-1, 31), targets.reshape(-1), reduction="none")
    return (loss * torch.arange(len(loss))).sum()


def weighted_classes(logits):
    return functional.cross_entropy(logits.view(-1, 31), IDS.view(-1), torch.arange(31.0))


def beside_another(logits):
    loss = functional.cross_entropy(logits.view(-1, 31), IDS.view(-1))
    return loss + logits.float()[:, 1:].logsumexp(-1).square().mean()


def a_target_of_no_gradient(logits):
    with torch.no_grad():
        target = logits[:, :-1].float() * 0.5
        assert not target.requires_grad
    return (logits[:, :-1] - target).square().sum()


def in_place(logits):
    before, view, copy = logits[:, :-1], logits.view(-1, 31), logits.double()
    logits.div_(3.0)
    logits[:, 0] = 0.0
    return before.square().sum() + (2 * view).sin().sum() + copy.cos().sum() + logits.exp().sum()


def in_place_through_a_view(logits):
    some, copy = logits[:, 1:], logits.double()
    some.mul_(2.0)
    return copy.square().sum() + logits.square().sum()


def an_index_that_changes(logits):
    index = IDS % 3 == 0
    with torch.no_grad():
        some = logits[index]
    index.fill_(True)
    return (logits.square() * some.sum()).sum()


def halves(logits):
    return logits.half().float().square().sum() + logits.to(torch.float64).sin().sum()


def a_hook_that_changes_gradients(logits):
    logits.register_hook(lambda grad: 5 * grad)
    return functional.cross_entropy(logits.view(-1, 31), IDS.view(-1))


def by_autograd_grad(logits):
    loss = logits.float().square().sum()
    (d_logits,) = torch.autograd.grad(loss, logits, create_graph=True)
    return d_logits.sin().sum()


def compiled(logits):
    return torch.compile(
        lambda x: x[:, :-1].float().log_softmax(-1).square().sum(), backend="eager"
    )(logits)


LOSSES = [log_probabilities, distillation, per_token, weighted_classes, beside_another, a_target_of_no_gradient,
          in_place, in_place_through_a_view, an_index_that_changes, halves, a_hook_that_changes_gradients,
          by_autograd_grad, compiled, OwnLoss.apply]  # fmt: skip


def gradients_of_losses(tp):
    """Return loss and unsharded gradients of each loss, with logits on demand and with computed logits."""
    found = {}
    for kernels in ("auto", "reference"):
        for number, loss_of in enumerate(LOSSES):
            torch._dynamo.reset()
            model = AutoScheduledModel.from_config(
                CONFIGS["gpt2"], tp=tp, seed=0, kernels=kernels
            ).train()
            for module in model.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.0
            loss = loss_of(model(input_ids=IDS).logits)
            loss.backward()
            found[kernels, number] = loss.detach(), model.consolidated_state_dict(grads=True)
    return found


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at its inputs
@pytest.mark.parametrize("tp", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_user_loss_on_lazy_logits_has_the_loss_and_gradients_of_eager_logits(ranks, tp):
    found = ranks.run(gradients_of_losses, tp, tp)[0]
    for number, loss_of in enumerate(LOSSES):
        (loss, grads), (expected, theirs) = found["auto", number], found["reference", number]
        name = getattr(loss_of, "__name__", "OwnLoss")
        torch.testing.assert_close(loss, expected, msg=name)
        for key, grad in grads.items():
            torch.testing.assert_close(
                grad, theirs[key], rtol=1e-4, atol=1e-5, msg=f"{name}: {key}"
            )
