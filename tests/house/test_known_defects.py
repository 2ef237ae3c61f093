"""Tests of reproduced defects of earlier schedule languages, one for each."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from transformers import BertConfig, BertModel

import slapo_zoo
from slapo_zoo import Mesh, Schedule, ScheduleError
from slapo_zoo.language.graph.pattern import call_module
from slapo_zoo.parallel.local_tensors import local_part
from slapo_zoo.parallel.placement import Placement
from slapo_zoo.zoo.apply import apply_table
from slapo_zoo.zoo.table import table_for
from tiny_models import BASE, batch_for, tiny_model

VOCAB = Placement(0, pad=True)


def world():
    return Mesh(tp=dist.get_world_size(), rank=dist.get_rank())


# --- wrong vocabulary hooks: ids at the edges of a shard, or every id of rank >= 1 ---------------


def embed(weight, padding_idx, ids, upstream):
    """Return output, local weight and local gradient of a vocab-parallel embedding."""
    module = nn.Embedding(*weight.shape, padding_idx=padding_idx, _weight=weight.clone())
    sch = Schedule(nn.ModuleDict({"wte": module}), world())
    sch["wte"].shard("weight", 0, pad=True).sync("fwd_post", "all_reduce")
    y = module(ids)
    y.backward(upstream)
    return y.detach(), module.weight.detach(), module.weight.grad


@pytest.mark.parametrize("padding_idx", [None, 0, "last", "edge"])
@pytest.mark.parametrize("size", [5, 99, 50257])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_vocab_parallel_embedding_equals_the_plain_embedding_for_every_token_id(
    n, size, padding_idx, ranks
):
    """Every id of the vocabulary is tested, forward and backward: ten random ids hardly ever show the defect."""
    share = -(-size // n)
    padding_idx = {"last": size - 1, "edge": min(share, size - 1)}.get(padding_idx, padding_idx)
    ids = torch.arange(size).repeat(2)  # twice: gradients add up
    weight, upstream = torch.randn(size, 3), torch.randn(2 * size, 3)
    plain = nn.Embedding(size, 3, padding_idx=padding_idx, _weight=weight.clone())
    want = plain(ids)
    want.backward(upstream)
    for r, (y, local, grad) in enumerate(ranks.run(embed, n, weight, padding_idx, ids, upstream)):
        assert torch.equal(y, want.detach())  # each row comes from one rank: exact
        assert len(local) == share
        assert torch.equal(local, local_part(weight, VOCAB, n, r))
        assert torch.equal(grad, local_part(plain.weight.grad, VOCAB, n, r))
        if padding_idx is not None:
            assert plain.weight.grad[padding_idx].eq(0).all()


# --- sizes and divisions -------------------------------------------------------------------------


def test_shard_of_a_linear_weight_changes_only_the_feature_count_of_its_axis():
    sch = Schedule(nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 20)), Mesh(tp=2))
    columns, rows = sch["0"].shard("weight", 0).mod, sch["1"].shard("weight", 1).mod
    assert (columns.out_features, columns.in_features) == (15, 20)
    assert (rows.out_features, rows.in_features) == (20, 15)


@pytest.mark.parametrize("second", [0, 1])
@pytest.mark.parametrize("n", [1, 2])
def test_shard_of_an_already_sharded_weight_is_refused(second, n):
    sch = Schedule(nn.Sequential(nn.Linear(8, 8)), Mesh(tp=n))
    sch["0"].shard("weight", 0)
    with pytest.raises(ScheduleError, match="sharded already, by shard"):
        sch["0"].shard("weight", second)
    assert sch["0"].mod.weight.shape == (8 // n, 8)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.filterwarnings("ignore::slapo_zoo.model.missing_sums.ScheduleWarning")  # never run
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("on_meta", [False, True])
def test_build_of_a_sharded_schedule_keeps_embedding_and_head_tied(on_meta, n):
    with slapo_zoo.init_empty_weights(enable=on_meta):
        sch = slapo_zoo.create_schedule(Tied(), mesh=Mesh(tp=n))
    sch["embed"].shard("weight", 0)
    model = slapo_zoo.build(sch)
    assert model.head.weight is model.embed.weight
    assert model.head.weight.shape == (10 // n, 4)
    assert not model.head.weight.is_meta


# --- graphs --------------------------------------------------------------------------------------


def scaled(x, slope=1.0):
    return functional.gelu(x) * slope


def test_subgraph_replaced_by_a_function_with_a_default_argument_keeps_the_logits():
    sch, plain = Schedule(tiny_model("bert")), tiny_model("bert")
    layer = sch["bert.encoder.layer.0.intermediate"]
    layer.trace(flatten=True)
    layer.replace(scaled, layer.find(lambda x: functional.gelu(x)))
    batch = batch_for(plain, 3, 11)
    torch.testing.assert_close(sch.model(**batch).logits, plain(**batch).logits)


# --- dropout and activations ---------------------------------------------------------------------


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5"])
def test_model_in_eval_mode_applies_no_dropout(family):
    """eval() also disables dropout in a graph that was traced, grouped and recomputed in train mode."""
    sch, plain = Schedule(tiny_model(family).train()), tiny_model(family)
    block = {"bert": "bert.encoder.layer.0", "gpt2": "transformer.h.0"}.get(
        family, "encoder.block.0"
    )
    sch[f"{block}.**:Dropout"].fork_rng()
    sch[block].trace(flatten=True)
    sch[block].fuse(sch[block].find(lambda x, y: call_module(".*dropout|drop", x) + y)[:1], None)
    sch[block].checkpoint()
    batch = batch_for(plain, 3, 11)
    dropped = sch.model(**batch).logits
    sch.model.eval()
    torch.testing.assert_close(sch.model(**batch).logits, plain(**batch).logits)
    assert not torch.allclose(dropped, plain(**batch).logits)


@pytest.mark.parametrize("name", ["gelu", "gelu_new", "gelu_pytorch_tanh"])
def test_schedule_and_fused_pattern_keep_the_erf_or_tanh_variant_of_gelu(name):
    """The two GELUs differ by up to 5e-4: the zoo and a fused pattern keep the model's own."""
    x = torch.linspace(-4, 4, 101)
    exact, tanh = functional.gelu(x), functional.gelu(x, approximate="tanh")
    assert (exact - tanh).abs().max() > 1e-4
    config = BertConfig(**BASE, hidden_act=name)
    torch.manual_seed(0)
    plain = BertModel(config).eval()
    sch = Schedule(BertModel(config).eval())
    sch.model.load_state_dict(plain.state_dict())
    apply_table(sch, table_for("bert"))
    act = "encoder.layer.0.intermediate.intermediate_act_fn"
    torch.testing.assert_close(
        sch[act].mod(x), exact if name == "gelu" else tanh, rtol=0, atol=2e-6
    )
    sch["encoder.layer.1.intermediate"].trace(flatten=True)
    found = sch["encoder.layer.1.intermediate"].find(lambda x: functional.gelu(x))
    assert len(found) == (name == "gelu")
    ids = torch.arange(8)[None]
    torch.testing.assert_close(sch.model(ids)[0], plain(ids)[0])


# --- the parallel loss ---------------------------------------------------------------------------

LABELS = torch.tensor([0, 10, -100, 5, 6, 7])


def parallel_loss(weight, x, labels, options):
    """Return the loss of logits that are sharded over ranks, and the gradient of x."""
    net = nn.Sequential(nn.Linear(4, 11, bias=False))
    net[0].weight.data.copy_(weight)
    sch = Schedule(net, world())
    sch["0"].shard("weight", 0, pad=True)
    sch["0"].sync("bwd_post", "all_reduce").sync("fwd_post", "vocab_logits")
    x = x.clone().requires_grad_()
    loss = functional.cross_entropy(net(x), labels, **options)
    loss.backward()
    return loss.detach(), x.grad


@pytest.mark.parametrize("options", [{"label_smoothing": 0.1}, {"ignore_index": 5}, {}], ids=str)
@pytest.mark.parametrize("n", [2, 4])
def test_vocab_parallel_loss_with_smoothing_and_ignored_labels_equals_torch(n, options, ranks):
    """Label smoothing over the local vocabulary alone is off by 0.04; counting -100 as a target gives a wrong loss."""
    weight, x = torch.randn(11, 4), torch.randn(6, 4)
    labels = LABELS.masked_fill(LABELS == -100, options.get("ignore_index", -100))
    leaf = x.clone().requires_grad_()
    want = functional.cross_entropy(leaf @ weight.t(), labels, **options)
    want.backward()
    for loss, dx in ranks.run(parallel_loss, n, weight, x, labels, options):
        torch.testing.assert_close(loss, want.detach())
        torch.testing.assert_close(dx, leaf.grad)


# --- sync ----------------------------------------------------------------------------------------


class TwoInputs(nn.Module):
    def forward(self, x, y, *, scale=1.0):
        return (x * y).sum() * scale


def two_inputs(x, y):
    sch = Schedule(nn.Sequential(TwoInputs()), world())
    sch["0"].sync("fwd_pre", "all_gather", axis=0)
    return sch["0"].mod(x.chunk(2)[dist.get_rank()], y, scale=2.0)


def test_collective_before_a_forward_changes_only_the_first_argument_of_the_forward(ranks):
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    for found in ranks.run(two_inputs, 2, x, y):
        torch.testing.assert_close(found, (x * y).sum() * 2)


def resharded(x):
    sch = Schedule(nn.Sequential(nn.Identity()), world())
    sch["0"].sync("fwd_post", "RR->RS").sync("fwd_post", "RS->SR").sync("fwd_post", "SR->RR")
    x = x.clone().requires_grad_()
    sch.model(x).square().sum().backward()
    return x.grad


def test_reshard_of_a_sharded_tensor_has_the_gradient_of_the_full_tensor(ranks):
    """One form is tested here; tests/language/primitives/test_sync.py tests values and gradients of all forms."""
    x = torch.randn(4, 6)
    for grad in ranks.run(resharded, 2, x):
        assert grad is not None
        torch.testing.assert_close(grad, 2 * x)
