"""A changed order of one sum is found by the digest of the first step that it touches, and traced to its operation."""

import functools
from contextlib import nullcontext
from operator import add
from unittest.mock import patch

import pytest
import torch
from torch.nn import functional

from parity import Case, batch_of, checkpoint
from slapo_zoo import AutoScheduledModel
from slapo_zoo.kernels.loss import cross_entropy
from slapo_zoo.language import gradients
from slapo_zoo.language.primitives import bias_after_sum
from slapo_zoo.model.load.exact_trace import ExactTrace
from slapo_zoo.model.step import train_step
from slapo_zoo.parallel import collectives

GPT2 = Case("GPT2LMHeadModel", ("tokens",), dropout=0.1, rows=8)
SUMMED, JOIN, ACCUMULATE = collectives.summed, cross_entropy.join, train_step._accumulate
STATISTICS = cross_entropy.statistics


def another_tree(x, group):
    return functools.reduce(add, list(collectives.gather_along(x[None], 0, group).flip(0)))


def in_double_precision(x, group):
    return SUMMED(x.double(), group).to(x.dtype)


def scattered_after_another_tree(x, axis, group):
    return collectives.slice_along(another_tree(x, group), axis, group)


def product_in_two_pieces(module, x):
    half = x.shape[-1] // 2
    w = module.weight
    return torch.matmul(x[..., :half], w[:half]) + torch.matmul(x[..., half:], w[half:])


def joined_in_another_order(parts):
    return JOIN(parts.flip(0))


def layer_norm_of_two_moments(x, shape, weight=None, bias=None, eps=1e-5):
    mean, square = x.mean(-1, keepdim=True), (x * x).mean(-1, keepdim=True)
    return (x - mean) * torch.rsqrt(square - mean * mean + eps) * weight + bias


def squares_in_half_precision(grads, device):
    return sum(grad.bfloat16().square().sum() / copies for grad, copies in grads).double()


def last_micro_batch_first(engine, run, tensors, others, count):
    turned = {name: torch.cat(x.tensor_split(count)[::-1]) for name, x in tensors.items()}
    return ACCUMULATE(engine, run, turned, others, count)


def clipped_by_a_product(parameters, max_norm, norm):
    for p in parameters:
        p.grad.mul_(max_norm).div_(norm + 1e-6)


# name --> (object, attribute, what replaces it) or options of the loader, and what the trace names
MUTANTS = {
    "another tree": ((collectives, "summed", another_tree), "c10d::"),
    "sum in double precision": ((collectives, "summed", in_double_precision), "aten::"),
    "another tree to token shards": (
        (collectives, "reduce_scatter_along", scattered_after_another_tree), "c10d::",
    ),
    "product in two pieces": (
        (bias_after_sum.WITHOUT_BIAS, "Conv1D", (product_in_two_pieces, 0)), "attn.c_proj",
    ),
    "statistics of the loss in another order": (
        (cross_entropy, "join", joined_in_another_order), "aten::flip",
    ),
    "layer norm of two moments": (
        (functional, "layer_norm", layer_norm_of_two_moments), "ln_1",
    ),
    "norm in half precision": ((gradients, "_square", squares_in_half_precision), "aten::"),
    "micro-batches in another order": (
        (train_step, "_accumulate", last_micro_batch_first), "aten::",
    ),
    "clipping by a product": ((torch.nn.utils, "clip_grads_with_norm_", clipped_by_a_product), "aten::mul_"),
    "fused gelu": ({"activation_function": "gelu_pytorch_tanh"}, "mlp.act"),
    "fused AdamW": ({"fused": True}, "weights"),
}  # fmt: skip


def patched(change):
    if isinstance(change, dict):
        return nullcontext()
    where, name, new = change
    return patch.dict(where, {name: new}) if isinstance(where, dict) else patch.object(*change)


def train(folder, mutant, sharded=False, tp=4):
    """Digests of two steps and their record, with a mutant or None; `sharded`: tokens are sharded."""
    change = MUTANTS[mutant][0] if mutant else {}
    options = dict(change) if isinstance(change, dict) else {}
    fused = options.pop("fused", False)
    with patched(change):
        return steps(folder, fused, tp, {"sequence_parallel": sharded, **options})


def steps(folder, fused, tp, options):
    model = AutoScheduledModel.from_pretrained(
        folder, exact={"tp": tp}, seed=3, kernels="reference", **options
    )
    try:
        model.train()
        optimizer, digests = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused), []
        with model.tracing() as trace:
            for step in range(2):
                model.train_step(batch_of(GPT2, step), micro_batches=4)
                model.clip_grad_norm_(0.1)
                optimizer.step()
                optimizer.zero_grad()
                digests.append(model.step_digest())
        return digests, trace.rows
    finally:
        model.close()


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return checkpoint(GPT2, tmp_path_factory.mktemp("mutants"))


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_bit_exact_mode_digest_detects_a_changed_sum_in_the_first_step_and_names_the_sum(
    mutant, folder, ranks
):
    sharded = "token shards" in mutant
    ((digests, rows),) = ranks.run(train, 1, folder, mutant, sharded)
    ((truth, of_truth),) = ranks.run(train, 1, folder, None, sharded)
    assert digests[0] != truth[0]
    found = ExactTrace(rows).first_difference(ExactTrace(of_truth))
    assert MUTANTS[mutant][1] in found, found


def test_two_identical_bit_exact_mode_runs_have_equal_digests_and_records(folder, ranks):
    (one,), (other,) = (ranks.run(train, 1, folder, None, False, 2) for _ in range(2))
    assert one[0] == other[0]
    assert ExactTrace(one[1]).first_difference(ExactTrace(other[1])) == ""
    assert len(one[1]) == 2
    assert all(len(rows) > 500 for rows in one[1].values())
