"""The sync primitive: values and gradients of reshards on two ranks; ops that fit a sharded output."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn

from slapo_zoo import Mesh, Schedule, ScheduleError, build
from slapo_zoo.language.primitives.bias_after_sum import sum_before_bias
from slapo_zoo.language.primitives.sync_reshard import AXIS
from slapo_zoo.language.schedule import from_json

FORMS = [f"{a}->{b}" for a, b in product(AXIS, AXIS)]
SHAPES = [(4, 6), (3, 4, 6)]


def world():
    return Mesh(tp=dist.get_world_size(), rank=dist.get_rank())


def lay(x, form, n, r):
    """Return this rank's shard of a tensor."""
    return x if AXIS[form] is None else x.chunk(n, AXIS[form])[r]


class Twice(nn.Module):
    """Module whose result shows whether an op was applied to its input or its output."""

    def forward(self, x):
        return x * 2


# --- the reshard forms --------------------------------------------------------------------------


def moved(op, mode, x, upstream, is_part):
    """Return y and dx of this rank; the upstream gradient is this rank's partial one, or the full one."""
    n, r = dist.get_world_size(), dist.get_rank()
    source, target = op.split("->")
    sch = Schedule(nn.Sequential(Twice()), world())
    sch["0"].sync(mode, op, tensor_parallel_output_grad=is_part or None)
    local = lay(x, source, n, r).clone().requires_grad_()
    y = sch.model(local)
    y.backward(lay(upstream[r] if is_part else upstream[0], target, n, r))
    return y.detach(), local.grad


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mode", ["fwd_pre", "fwd_post"])
@pytest.mark.parametrize("op", FORMS)
def test_reshard_redistributes_values_in_forward_and_gradients_in_backward(op, mode, shape, ranks):
    source, target = op.split("->")
    x, upstream = torch.randn(shape), torch.randn(2, *shape)
    for r, (y, dx) in enumerate(ranks.run(moved, 2, op, mode, x, upstream, False)):
        assert torch.equal(y, lay(2 * x, target, 2, r))
        assert torch.equal(dx, lay(2 * upstream[0], source, 2, r))


@pytest.mark.parametrize("op", ["RR->RR", "RS->RR", "SR->RR"])
def test_reshard_with_partial_gradients_all_reduces_them_in_backward(op, ranks):
    source, target = op.split("->")
    x, upstream = torch.randn(4, 6), torch.randn(2, 4, 6)
    for r, (y, dx) in enumerate(ranks.run(moved, 2, op, "fwd_post", x, upstream, True)):
        assert torch.equal(y, lay(2 * x, target, 2, r))
        torch.testing.assert_close(dx, lay(2 * upstream.sum(0), source, 2, r))


@pytest.mark.parametrize("op", FORMS)
def test_reshard_on_one_rank_leaves_values_and_gradients_unchanged(op):
    x = torch.randn(4, 6, requires_grad=True)
    sch = Schedule(nn.Sequential(Twice()))
    sch["0"].sync("fwd_pre", op).sync("fwd_post", op)
    sch.model(x).sum().backward()
    assert torch.equal(sch.model(x), 2 * x)
    assert torch.equal(x.grad, torch.full_like(x, 2.0))


def mlp(seed=5):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4), nn.Linear(4, 8), nn.GELU())


def chained(x):
    """Chain reshards: columns -> tokens -> replicated -> columns -> replicated, another layout in each layer."""
    net = mlp()
    sch = Schedule(net, world())
    sch["0"].sync("bwd_post", "all_reduce")
    sch["0"].shard("weight", 0).shard("bias", 0).sync("fwd_post", "RS->SR")
    sch["2"].sum_gradient("weight").sum_gradient("bias").sync("fwd_post", "SR->RR")
    sch["3"].sync("bwd_post", "all_reduce").shard("weight", 0).shard("bias", 0)
    sch["4"].sync("fwd_post", "RS->RR")
    x = x.clone().requires_grad_()
    y = build(sch)(x)
    y.square().sum().backward()
    return y.detach(), x.grad, [p.grad for p in net.parameters()]


def test_model_with_several_reshards_has_the_output_and_gradients_of_one_rank(ranks):
    x, net = torch.randn(3, 2, 4), mlp()
    plain = x.clone().requires_grad_()
    y = net(plain)
    y.square().sum().backward()
    for r, (mine, dx, grads) in enumerate(ranks.run(chained, 2, x)):
        torch.testing.assert_close(mine, y.detach())
        torch.testing.assert_close(dx, plain.grad)
        wanted = [p.grad for p in net.parameters()]
        for i in (0, 1, 4, 5):
            wanted[i] = wanted[i].chunk(2)[r]
        for grad, want in zip(grads, wanted, strict=True):
            torch.testing.assert_close(grad, want)


def uneven(op):
    sch = Schedule(nn.Sequential(Twice()), world())
    sch["0"].sync("fwd_post", op, axis=0)
    with pytest.raises(ScheduleError) as caught:
        sch.model(torch.ones(3, 3))
    return str(caught.value)


@pytest.mark.parametrize("op", ["RR->SR", "RS->SR", "scatter", "reduce_scatter"])
def test_reshard_of_uneven_axis_is_refused_before_communication(op, ranks):
    """Elements beyond an even split would be dropped silently, or crash the process in C++."""
    for text in ranks.run(uneven, 2, op):
        assert "is not a multiple of tp=2" in text
        assert "pad the axis" in text


def test_reshard_with_an_invalid_layout_mode_or_input_is_refused():
    sch = Schedule(nn.Sequential(Twice()), Mesh(tp=2, dry_run=True))
    with pytest.raises(ScheduleError, match="mode fwd_pre with 'RR->RS' does this to the gradient"):
        sch["0"].sync("bwd_post", "RS->RR")
    with pytest.raises(ScheduleError, match="no sync op 'RR->XR'"):
        sch["0"].sync("fwd_post", "RR->XR")
    sch["0"].sync("fwd_post", "RR->RS")
    with pytest.raises(ScheduleError, match="expected two axes or more"):
        sch.model(torch.ones(4))
    again = Schedule(nn.Sequential(Twice()), Mesh(tp=2, rank=1)).replay(from_json(sch.to_json()))
    assert str(again) == str(sch) == "sch['0'].sync(mode='fwd_post', sync_op_or_fn='RR->RS')"


# --- the output of a division -------------------------------------------------------------------


def divided(axis):
    sch = Schedule(nn.Sequential(nn.Linear(4, 6)), Mesh(tp=2))
    sch["0"].shard("weight", axis)
    return sch["0"]


@pytest.mark.parametrize("op", ["all_gather", "scatter", "RR->RS", "RS->RR"])
def test_reshard_of_an_output_that_is_a_partial_sum_is_refused(op):
    with pytest.raises(ScheduleError, match="each rank holds a partial sum of the output"):
        divided(1).sync("fwd_post", op)


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "RR->RS"])
def test_all_reduce_of_an_output_sharded_by_columns_is_refused(op):
    with pytest.raises(ScheduleError, match="each rank holds different columns of the output"):
        divided(0).sync("fwd_post", op)


@pytest.mark.parametrize(
    "module", [nn.Linear(4, 6), nn.Embedding(4, 6), nn.Conv2d(4, 6, 1)], ids=str
)
@pytest.mark.parametrize("op", ["all_reduce", "all_reduce_twice", "reduce_scatter"])
def test_all_reduce_of_a_replicated_output_is_refused(module, op):
    sch = Schedule(nn.Sequential(module), Mesh(tp=2))
    with pytest.raises(ScheduleError, match="the sum is 2 times its output"):
        sch["0"].sync("fwd_post", op)
    with pytest.raises(ScheduleError, match="the sum is 2 times its output"):
        sch["0"].sync("both")
    assert sch["0"].sync("bwd_post", "all_reduce"), "a gradient may be a part"
    assert Schedule(nn.Sequential(module), Mesh())["0"].sync("fwd_post", op)


def test_row_parallel_layer_without_the_bias_that_it_had_returns_the_summed_product():
    layer, x = nn.Linear(8, 4), torch.randn(2, 8)
    assert sum_before_bias(layer, lambda y: 2 * y)
    layer.bias = None
    assert torch.equal(layer(x), 2 * nn.functional.linear(x, layer.weight))


def test_sync_that_shards_the_output_of_a_module_with_unsharded_bias_is_refused():
    with pytest.raises(
        ScheduleError, match="the bias is unsharded, but the collective shards the output"
    ):
        divided(1).sync("fwd_post", "reduce_scatter")
    assert divided(1).sync("fwd_post", "reduce_scatter", axis=0)
    assert divided(1).shard("bias", 0).sync("fwd_post", "reduce_scatter")


def two_ops(x):
    """All-reduce a row-parallel product, add its bias, then divide the result: in this order."""
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(4, 6))
    sch = Schedule(net, world())
    sch["0"].shard("weight", 1).sync("fwd_post", "all_reduce").sync("fwd_post", "RR->SR")
    return net(lay(x, "RS", 2, dist.get_rank())).detach()


def test_second_sync_on_a_module_runs_on_the_result_of_the_first(ranks):
    x = torch.randn(4, 4)
    torch.manual_seed(5)
    want = nn.Linear(4, 6)(x).detach()
    for r, y in enumerate(ranks.run(two_ops, 2, x)):
        torch.testing.assert_close(y, want.chunk(2)[r])
