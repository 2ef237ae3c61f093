"""Gradient completion: all-reduces that begin early, second-order gradients, forwards that shard differently."""

import pytest
import torch
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint as recompute
from transformers import GPT2LMHeadModel

from loop_runs import folder_of
from slapo_zoo import AutoScheduledModel, MeshError, SlapoError

KEYS = ("input_ids", "labels")
IDS = torch.arange(32).view(4, 8) % 90 + 3


class OwnSquare(torch.autograd.Function):
    """Autograd function whose backward runs another backward, which reaches the head's weight."""

    @staticmethod
    def forward(ctx, logits):
        ctx.save_for_backward(logits)
        return logits.square().mean()

    @staticmethod
    def backward(ctx, d):
        (logits,) = ctx.saved_tensors
        return 2 * d * logits / logits.numel()


def of_rows(model, use):
    rows = 4 // model.mesh.dp
    first = model.mesh.coord("dp") * rows
    use(model, IDS[first : first + rows]).backward()


def through_own_function(model, ids):
    return OwnSquare.apply(model(input_ids=ids).logits)


def through_reentrant_recomputation(model, ids):
    hidden = model.transformer.wte(ids).detach().requires_grad_()
    return recompute(
        lambda x: model(inputs_embeds=x).logits.square().mean(), hidden, use_reentrant=True
    )


def one_embedding_unused(model, ids):
    """Return a loss on the first 4 tokens: later position embeddings get a zero gradient."""
    return (
        model(input_ids=ids[:, :4]).logits.square().mean() + 0 * model.transformer.wpe.weight.sum()
    )


USES = [through_own_function, through_reentrant_recomputation, one_embedding_unused]


def gradients(folder, layout, number):
    model = AutoScheduledModel.from_pretrained(folder, **layout).train()
    places = []
    for _ in range(2):  # the second adds to views of what the first has summed
        of_rows(model, USES[number])
        places.append([p.grad.data_ptr() for p in model.parameters() if p.grad is not None])
    flats = {
        p.grad._base.data_ptr()
        for p in model.parameters()
        if p.grad is not None and p.grad._base is not None
    }
    return model.consolidated_state_dict(grads=True), places[0] == places[1], len(flats)


@pytest.mark.parametrize("number", range(len(USES)), ids=[use.__name__ for use in USES])
def test_gradients_after_backward_on_two_dp_ranks_equal_those_of_one_process(
    ranks, number, tmp_path
):
    folder = folder_of("gpt2", tmp_path)
    want, _, _ = gradients(folder, {}, number)
    found, in_place, flats = ranks.run(gradients, 2, folder, {"dp": 2}, number)[0]
    for name, grad in want.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6, msg=name)
    assert in_place
    assert flats == 1


def of_unlike_lengths(folder):
    model = AutoScheduledModel.from_pretrained(folder, tp=2, sequence_parallel=True).train()
    model.input_check_interval = 0
    with pytest.warns(UserWarning, match="not a multiple"):
        loss = sum(model(input_ids=ids).logits.square().mean() for ids in (IDS, IDS[:, :7]))
    with pytest.raises(MeshError, match="pad both batches"):
        loss.backward()


def test_one_backward_through_forwards_with_and_without_sequence_parallelism_is_refused(
    ranks, tmp_path
):
    ranks.run(of_unlike_lengths, 2, folder_of("qwen3", tmp_path))


def penalised(folder, layout):
    """Penalise the gradient of the embeddings; return the second-order gradient, or the error's text."""
    model = AutoScheduledModel.from_pretrained(folder, attention="eager", **layout).train()
    try:
        return twice(model)
    except SlapoError as error:
        return str(error)


def twice(model):
    hidden = model.transformer.wte(IDS).detach().requires_grad_()
    loss = model(inputs_embeds=hidden, labels=IDS).loss
    (first,) = torch.autograd.grad(loss, hidden, create_graph=True)
    return torch.autograd.grad(first.square().sum(), hidden)[0]


@pytest.mark.parametrize(
    "layout",
    [{"kernels": "linear_cross_entropy"}, {"tp": 2, "kernels": "reference"}],
    ids=["kernel", "tp"],
)
def test_second_order_gradient_equals_transformers_without_loss_kernels_and_is_refused_with_them(
    ranks, layout, tmp_path
):
    """The loss kernel computes its gradients in the forward, so they have no graph of their own."""
    folder = folder_of("gpt2", tmp_path)
    exact = penalised(folder, {"kernels": "reference"})
    plain = GPT2LMHeadModel.from_pretrained(folder, attn_implementation="eager").train()
    torch.testing.assert_close(exact, twice(plain))
    for words in ranks.run(penalised, layout.get("tp", 1), folder, layout):
        assert "create_graph" in words


def transformed(folder, layout):
    model = AutoScheduledModel.from_pretrained(folder, **layout).train()
    named = {n: p.detach() for n, p in model.named_parameters()}
    batch = {"input_ids": IDS, "labels": IDS}
    torch.func.grad(lambda p: torch.func.functional_call(model, p, (), batch).loss)(named)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"dp": 2}, {"pp": 2}], ids=str)
def test_torch_func_grad_of_a_model_on_several_ranks_is_refused(threads, layout, tmp_path):
    with pytest.raises(SlapoError, match=r"torch\.func.* do not run within grad, vmap"):
        threads.run(transformed, 2, folder_of("gpt2", tmp_path), layout)


def replaced(folder, layout):
    """Return gradients of a forward on replaced parameters: scaled ones, and copies."""
    model = AutoScheduledModel.from_pretrained(folder, **layout).train()
    half, found = {n: p * 0.5 for n, p in model.named_parameters()}, []
    of_rows(model, lambda m, ids: functional_call(m, half, (), dict.fromkeys(KEYS, ids)).loss)
    found.append(model.consolidated_state_dict(grads=True))
    model.zero_grad()

    def behind_a_frozen_one(model, ids):
        loss = model(input_ids=ids, labels=ids).loss
        frozen = {n: p.detach().clone() for n, p in model.named_parameters()}
        functional_call(model, frozen, (), {"input_ids": ids})
        return loss

    of_rows(model, behind_a_frozen_one)
    return [*found, model.consolidated_state_dict(grads=True)]


@pytest.mark.parametrize("layout", [{"dp": 2}, {"tp": 2, "sequence_parallel": True}], ids=str)
def test_functional_call_with_replaced_parameters_has_the_gradients_of_one_process(
    ranks, layout, tmp_path
):
    folder = folder_of("gpt2", tmp_path)
    (want,) = ranks.run(replaced, 1, folder, {})
    found = ranks.run(replaced, 2, folder, layout)[0]
    for mine, one in zip(found, want, strict=True):
        for name, grad in one.items():
            torch.testing.assert_close(mine[name], grad, atol=1e-6, rtol=1e-4, msg=name)


def outside(folder, stage):
    """Return the errors of calls that would take shards for unsharded parameters."""
    model = AutoScheduledModel.from_pretrained(folder, dp_shard=2, zero_stage=stage).train()
    copies, said = {n: p.detach().clone() for n, p in model.named_parameters()}, []
    ids = torch.full((2, 4), 3)  # small: no rank finds them beyond its rows
    for call in (
        lambda: model.get_input_embeddings()(ids),
        lambda: model.get_output_embeddings()(torch.zeros(2, 30)),
        lambda: functional_call(model, copies, (), {"input_ids": ids}),
    ):
        with pytest.raises(MeshError, match="dp_shard=") as error:
            call()
        said.append(str(error.value))
    model(input_ids=ids, labels=ids).loss.backward()
    return said


@pytest.mark.parametrize("stage", [1, 3])
def test_direct_call_of_a_zero_sharded_submodule_is_refused(ranks, stage, tmp_path):
    for said in ranks.run(outside, 2, folder_of("gpt2", tmp_path), stage):
        assert ["outside the model" in words for words in said] == [True, True, False]


def of_a_stage(folder):
    """Return each rank's error where submodules of a pipeline are called, then run a full step."""
    model = AutoScheduledModel.from_pretrained(folder, pp=2).train()
    piece = model.transformer if model.mesh.rank == 0 else model.transformer.wte
    with pytest.raises(SlapoError) as error:
        piece(IDS)
    model.train_step({"input_ids": IDS, "labels": IDS})
    return str(error.value)


def test_direct_call_of_a_layer_of_another_pipeline_stage_is_refused(ranks, tmp_path):
    for words in ranks.run(of_a_stage, 2, folder_of("gpt2", tmp_path)):
        assert "outside the model's forward" in words
