"""Each collective and its backward, compared with the full computation in one process.

Every rank r holds x_r and weighs its own output with u_r; the truth sums all of it in one graph.
"""

import pytest
import torch
import torch.distributed as dist

from slapo_zoo.parallel import collectives


def inputs(n, shape=(2, 6, 3)):
    g = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=g, dtype=torch.float64) for _ in range(n)]


def upstream(n, shape):
    g = torch.Generator().manual_seed(6)
    return [torch.randn(shape, generator=g, dtype=torch.float64) for _ in range(n)]


def part(x, axis, n, r):
    return x.chunk(n, axis)[r]


# name -> (our function of (x, axis, group), the truth: all x, axis, r -> y of rank r)
OURS = {
    "reduce_forward": lambda x, axis, group: collectives.reduce_forward(x, group),
    "reduce_backward": lambda x, axis, group: collectives.reduce_backward(x, group),
    "all_gather": lambda x, axis, group: collectives.all_gather(x, axis, group),
    "all_gather_replicated": lambda x, axis, group: collectives.all_gather(x, axis, group, False),
    "reduce_scatter": lambda x, axis, group: collectives.reduce_scatter(x, axis, group),
    "scatter": lambda x, axis, group: collectives.scatter(x, axis, group),
}
AXES = {"reduce_forward": (0,), "reduce_backward": (0,)}


def work(name, axis, x_n, u_n, contiguous):
    """Return y and dx of this rank."""
    x = x_n[dist.get_rank()].clone()
    if not contiguous:
        x = x.transpose(0, 2).contiguous().transpose(0, 2)
    x = x.requires_grad_()
    before = x.detach().clone()
    y = OURS[name](x, axis, dist.group.WORLD)
    copies = name not in ("reduce_backward", "scatter")  # a model may add to these in place
    assert not (copies and y._is_view())
    y.backward(u_n[dist.get_rank()])
    assert torch.equal(x.detach(), before)  # the input is not written to
    return y.detach(), x.grad


def truth(name, axis, x_n, u_n):
    """Return (y, dx) of every rank from one graph over all of them.

    reduce_forward: y is one value that all ranks hold, so dy is the same on all (u of rank 0).
    reduce_backward, scatter: x is one value that all ranks hold (x of rank 0), so dx is a sum.
    """
    n = len(x_n)
    leaves = [x.clone().requires_grad_() for x in x_n]
    if name == "reduce_forward":
        y = [sum(leaves)]
    elif name == "reduce_backward":
        leaves = leaves[:1]
        y = [leaves[0] * 1 for _ in range(n)]
    elif name == "all_gather":
        y = [torch.cat(leaves, axis) for _ in range(n)]
    elif name == "all_gather_replicated":
        y = [torch.cat(leaves, axis)]
    elif name == "reduce_scatter":
        y = [part(sum(leaves), axis, n, r) for r in range(n)]
    else:
        leaves = leaves[:1]
        y = [part(leaves[0], axis, n, r) for r in range(n)]
    sum((yi * u).sum() for yi, u in zip(y, u_n, strict=False)).backward()
    grads = [leaf.grad for leaf in leaves]
    return [yi.detach() for yi in y] * (n // len(y)), grads * (n // len(grads))


def cases():
    return [(name, axis) for name in OURS for axis in AXES.get(name, (0, 1, -1, 2))]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize(("name", "axis"), cases())
@pytest.mark.parametrize("n", [2, 3])
def test_collectives_have_the_outputs_and_gradients_of_their_one_process_equivalent(
    n, name, axis, contiguous, ranks
):
    shape = (n * 2, 6, n)
    x_n = inputs(n, shape)
    if name in ("reduce_backward", "scatter"):  # the same on all ranks
        x_n = x_n[:1] * n
    widths = {
        "all_gather": n,
        "all_gather_replicated": n,
        "reduce_scatter": 1 / n,
        "scatter": 1 / n,
    }
    out = list(shape)
    out[axis] = round(out[axis] * widths.get(name, 1))
    u_n = upstream(n, out)
    if name in ("reduce_forward", "all_gather_replicated"):  # dy is the same on all ranks
        u_n = u_n[:1] * n
    y_n, dx_n = truth(name, axis, x_n, u_n)
    for r, (y, dx) in enumerate(ranks.run(work, n, name, axis, x_n, u_n, contiguous)):
        torch.testing.assert_close(y, y_n[r])
        torch.testing.assert_close(dx, dx_n[r])


def same_bits():
    """Return the all-reduced tensor of ranks with different values."""
    g = torch.Generator().manual_seed(dist.get_rank())
    return collectives.summed(torch.randn(1000, generator=g), dist.group.WORLD)


def test_all_reduce_gives_bit_equal_results_on_all_ranks(ranks):
    first, *others = ranks.run(same_bits, 4)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("name", OURS)
def test_collectives_without_a_process_group_return_their_input(name):
    x = torch.randn(4, 2, requires_grad=True)
    assert OURS[name](x, 0, None) is x
