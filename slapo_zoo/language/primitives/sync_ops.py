"""Collectives that `sync` provides by name; each maps a tensor x, the directive and its module (a Site) to a new tensor."""

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from slapo_zoo.kernels.loss.lm_loss import lm_loss
from slapo_zoo.kernels.loss.logits_on_demand import LogitsOnDemand
from slapo_zoo.kernels.loss.vocab_logits import VocabLogits
from slapo_zoo.language.directive import Site
from slapo_zoo.language.primitives.sync import Sync, require_divisible, sync_op
from slapo_zoo.parallel import collectives

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)  # their columns are channels, on axis 1


@sync_op("all_reduce", "fwd_post", "bwd_post")
def _all_reduce(x: Tensor, sync: Sync, site: Site) -> Tensor:
    """All-reduce x, the module's output ("fwd_post"), or only the gradient of x, the module's input ("bwd_post").

    While tokens are sharded over the ranks, "fwd_post" reduce-scatters x along the tokens instead; "bwd_post" then
    all-gathers the tokens of x, and so reduce-scatters its gradient (arXiv:2205.05198, section 4.2.2).
    """
    group, axis = site.group(sync), sync.sequence_axis
    if axis is not None and site.state.forward.tokens_divided:
        if sync.mode == "bwd_post":
            return collectives.all_gather(x, axis, group)
        return collectives.reduce_scatter(x, axis, group)
    if sync.mode == "bwd_post":
        return collectives.reduce_backward(x, group)
    return collectives.reduce_forward(x, group)


@sync_op("all_reduce_twice", "fwd_post")
def _all_reduce_twice(x: Tensor, sync: Sync, site: Site) -> Tensor:
    """All-reduce the output x; in the backward all-reduce its gradient too, as each rank uses x for other columns or heads."""
    group = site.group(sync)
    return collectives.reduce_backward(collectives.reduce_forward(x, group), group)


@sync_op("divide_tokens", "fwd_pre", "fwd_post")
def _divide_tokens(x: Tensor, sync: Sync, site: Site) -> Tensor:
    """Return this rank's slice of x [B, S, ...] along S if the running forward shards tokens over tp; else return x."""
    if not site.state.forward.tokens_divided:
        return x
    return collectives.scatter(x, 1, site.group(sync))


@sync_op("join_tokens", "fwd_pre", "fwd_post")
def _join_tokens(x: Tensor, sync: Sync, site: Site) -> Tensor:
    """All-gather x [B, S/n, ...] along S if the running forward shards tokens over tp; else return x.

    All ranks compute the same from the result, so each has its complete gradient, of which the backward takes a slice.
    """
    if not site.state.forward.tokens_divided:
        return x
    return collectives.all_gather(x, 1, site.group(sync), sharded_gradient=False)


@sync_op("all_gather", "fwd_pre", "fwd_post")
def _all_gather(x: Tensor, sync: Sync, site: Site) -> Tensor:
    group = site.group(sync)
    is_part = sync.tensor_parallel_output_grad is not False
    return collectives.all_gather(x, sync.axis, group, sharded_gradient=is_part)


@sync_op("join_columns", "fwd_post")
def _join_columns(x: Tensor, sync: Sync, site: Site) -> Tensor:
    """All-gather the columns of x (column-parallel), without weight padding; the backward keeps this rank's slice."""
    placed = site.placed("weight")
    assert placed is not None  # noqa: S101 - check() saw it
    axis = 1 if isinstance(site.module, CONVOLUTIONS) and x.ndim > 2 else -1
    full = collectives.all_gather(x, axis, site.group(sync), sharded_gradient=False)
    return full.narrow(axis, 0, placed.shape[placed.placement.axis])


@sync_op("reduce_scatter", "fwd_post")
def _reduce_scatter(x: Tensor, sync: Sync, site: Site) -> Tensor:
    require_divisible(x, sync.axis, sync, site)
    return collectives.reduce_scatter(x, sync.axis, site.group(sync))


@sync_op("scatter", "fwd_pre", "fwd_post")
def _scatter(x: Tensor, sync: Sync, site: Site) -> Tensor:
    require_divisible(x, sync.axis, sync, site)
    return collectives.scatter(x, sync.axis, site.group(sync))


@sync_op("vocab_logits", "fwd_post")
def _vocab_logits(x: Tensor, sync: Sync, site: Site) -> Tensor:
    """Return this rank's logits [..., V/n] as a Tensor subclass: VocabLogits, or LogitsOnDemand if they are not computed yet.

    A loss of the result is computed with each rank's columns; any other function first gathers all columns. If the head
    has backward hooks, which autograd calls with gradients of plain tensors, the columns are gathered at once.
    """
    placed = site.placed("weight")
    assert placed is not None  # noqa: S101 - check() saw it
    group, size, tape = site.group(sync), placed.shape[0], site.state.forward.tape
    module = site.module
    hooked = module._backward_hooks or module._backward_pre_hooks or _has_any_global_hook()
    if isinstance(x, LogitsOnDemand):
        return x.divided(size, group).tensor() if hooked else x.divided(size, group)  # pyright: ignore[reportAttributeAccessIssue]
    if tape is not None:  # fake tensors cannot be VocabLogits: the loss is noted here
        rows = x.flatten(0, -2)
        target = torch.zeros(len(rows), dtype=torch.int64, device=x.device)
        loss = lm_loss(rows, None, target, reduction="none", vocab_size=size, group=group)
        tape.losses.append(loss)
    logits = VocabLogits.wrap(x, size, group)
    return logits.gathered() if hooked and isinstance(logits, VocabLogits) else logits
