"""User's head on a model without one: its gradient equals one process, or the step is refused."""

import copy

import pytest
import torch
import transformers
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slapo_zoo import AutoScheduledModel, MeshError, SlapoError, emulate

CONFIG = transformers.BertConfig(
    hidden_size=32, num_attention_heads=4, num_hidden_layers=4, intermediate_size=64, vocab_size=64,
    max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
IDS, KINDS = torch.arange(32).reshape(4, 8) * 5 % 64, torch.tensor([0, 1, 1, 0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(3)
    place = tmp_path_factory.mktemp("headless")
    transformers.BertModel(CONFIG).save_pretrained(place)
    return place


class Head(nn.Module):
    """Classifier loss, used as a module, or its `forward` as a function."""

    def __init__(self, seed=0):
        super().__init__()
        self.linear = nn.Linear(32, 2)
        drawn = torch.randn(2, 32, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            self.linear.weight.copy_(0.1 * drawn)
            self.linear.bias.zero_()

    def forward(self, output, batch):
        logits = self.linear(output.last_hidden_state[:, 0].to(self.linear.weight.dtype))
        return nn.functional.cross_entropy(logits, batch["kind"])

    def grads(self):
        return [p.grad for p in self.parameters()]


def part_of(model, dp):
    rank = model.mesh.coord("dp")
    return {"input_ids": IDS.tensor_split(dp)[rank], "kind": KINDS.tensor_split(dp)[rank]}


@pytest.fixture(scope="module")
def want(folder):
    model, head = transformers.BertModel.from_pretrained(folder), Head()
    head(model(IDS), {"kind": KINDS}).backward()
    return head.grads()


def load(folder, tp, pp, dp, **options):
    return AutoScheduledModel.from_pretrained(
        folder, tp=tp, pp=pp, dp=dp, auto_class="AutoModel", **options
    ).train()


def step(folder, mesh, options, micro_batches, as_module, times):
    model, head = load(folder, *mesh, **options), Head()
    if as_module == "added to the model":
        model.head = head
    loss_fn = head if as_module else head.forward
    for _ in range(times):
        model.train_step(part_of(model, mesh[2]), micro_batches, loss_fn=loss_fn)
    return head.grads()


CASES = [
    ((2, 1, 1), {}, False), ((1, 1, 2), {}, False), ((1, 1, 2), {"dp_shard": 2}, False),
    ((1, 1, 2), {}, True), ((1, 2, 1), {}, True), ((1, 2, 2), {}, True), ((2, 2, 1), {}, True),
    ((1, 2, 1), {"pipeline_order": "zbv"}, True), ((1, 1, 2), {"precision": "fp16"}, False),
]  # fmt: skip


@pytest.mark.one_in(3, 2)
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(("mesh", "options", "as_module"), CASES)
def test_user_parameters_inside_a_loss_function_get_the_full_batch_gradient(
    folder, want, mesh, options, as_module, micro_batches
):
    close = {"rtol": 2e-2, "atol": 1e-3} if "precision" in options else {"rtol": 1e-4, "atol": 1e-6}
    for times in (1, 2):  # gradients add up
        args = (folder, mesh, options, micro_batches, as_module, times)
        for found in emulate(step, *args, mesh=mesh):
            for mine, whole in zip(found, want, strict=True):
                torch.testing.assert_close(mine, times * whole, **close)


@pytest.mark.parametrize("as_module", [False, "added to the model"])
def test_loss_function_with_user_parameters_is_refused_with_pipeline_stages(folder, as_module):
    args = (folder, (1, 2, 1), {}, 1, as_module, 1)
    with pytest.raises(SlapoError, match="that only the last of pp="):
        emulate(step, *args, mesh=(1, 2, 1), timeout_s=3)


def fails(folder):
    model, head = load(folder, 1, 1, 2), Head()
    for p in head.parameters():
        p.grad = torch.ones_like(p)
    batch = part_of(model, 2) | {"kind": torch.tensor([0, 99])}
    with pytest.raises(IndexError):  # no such class
        model.train_step(batch, loss_fn=head)
    return head.grads()


def test_failed_train_step_keeps_earlier_gradients_of_a_user_head(folder):
    for grads in emulate(fails, folder, mesh=(1, 1, 2)):
        assert all(torch.equal(grad, torch.ones_like(grad)) for grad in grads)


def with_little_gradients(folder):
    """Train a head differently on each rank, beside large weights."""
    model, head = load(folder, 1, 1, 2), nn.Linear(32, 2)
    with torch.no_grad():
        head.weight.fill_(100.0)
        head.bias.fill_(0.0)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=1e-3)
    output = model(part_of(model, 2)["input_ids"]).last_hidden_state
    (1e-3 * head(output)).square().mean().backward()
    optimizer.step()


def test_user_head_with_slightly_different_gradients_on_dp_ranks_raises(folder):
    with pytest.raises(MeshError, match="dp ranks have different values or gradients"):
        emulate(with_little_gradients, folder, mesh=(1, 1, 2))


def by_hand(folder, mesh, seeds, wraps):
    model, head = load(folder, *mesh), Head(seeds * 7)
    head = Head(model.mesh.rank) if seeds else head
    called = head
    if wraps:
        called = DistributedDataParallel(head, process_group=model.mesh.group("dp"))
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=1e-3)
    batch = part_of(model, mesh[2])
    called(model(batch["input_ids"]), batch).backward()
    grads = copy.deepcopy(head.grads())
    optimizer.step()
    return grads


@pytest.mark.parametrize(("mesh", "wraps"), [((2, 1, 1), False), ((1, 1, 2), True)])
def test_user_head_in_a_hand_written_loop_gets_the_full_batch_gradient(folder, want, mesh, wraps):
    for found in emulate(by_hand, folder, mesh, 0, wraps, mesh=mesh):
        for mine, whole in zip(found, want, strict=True):
            torch.testing.assert_close(mine, whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("mesh", "seeds", "which"), [((2, 1, 1), 1, "tp"), ((1, 1, 2), 0, "dp"), ((1, 1, 2), 1, "dp")]
)
def test_user_head_whose_weights_differ_between_ranks_is_refused(folder, mesh, seeds, which):
    with pytest.raises(
        MeshError, match=rf"{which} ranks .* parameters outside the model: \[2, 32\]"
    ):
        emulate(by_hand, folder, mesh, seeds, False, mesh=mesh)


def fed_unlike(folder):
    model = load(folder, 2, 1, 1)
    model(IDS.roll(model.mesh.rank, 0)).last_hidden_state.sum().backward()


def test_hand_written_loop_with_different_batches_on_ranks_of_a_tp_group_raises(folder):
    with pytest.raises(MeshError, match=r"ranks \[1\] were fed another batch than rank 0"):
        emulate(fed_unlike, folder, mesh=(2, 1, 1))


SMALL = {"num_hidden_layers": 2, "vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4}
CACHED = {
    "GPT2LMHeadModel": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "LlamaForCausalLM": {"num_key_value_heads": 2, "intermediate_size": 64},
}


@pytest.mark.parametrize("name", CACHED)
def test_base_model_called_without_head_has_equal_gradients_with_and_without_recomputation(name):
    cls = getattr(transformers, name)
    config, found = cls.config_class(**SMALL, **CACHED[name], bos_token_id=0, eos_token_id=0), []
    for ratio in (0.0, 1.0):
        model = AutoScheduledModel.from_config(
            config, auto_class=cls, seed=0, checkpoint_ratio=ratio
        )
        model.train().base_model(input_ids=IDS).last_hidden_state.square().mean().backward()
        found.append({n: p.grad for n, p in model.base_model.named_parameters()})
    torch.testing.assert_close(found[1], found[0])
