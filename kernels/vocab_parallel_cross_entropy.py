"""vocab_parallel_cross_entropy: the loss of logits whose vocabulary is sharded over ranks.

One collective of 12 bytes per row and rank; the logits are read once for the loss and once for the
gradient, and nothing else of their size is kept. N rows, V classes.
"""

from typing import Any

import torch
from torch import Tensor

from slapo_zoo.dispatch.kernel_registry import kernel
from slapo_zoo.kernels import cross_entropy
from slapo_zoo.parallel import collectives
from slapo_zoo.parallel.local_tensors import require_indices
from slapo_zoo.parallel.placement import Placement

SHAPES = [(1, 40), (21, 131), (64, 1025), (0, 40)]


def reference(
    logits: Tensor,
    target: Tensor,
    vocab_size: int,
    group: Any = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The definition, on gathered logits: cross-entropy per row, 0 where the target is ignored."""
    wide = logits[:, :vocab_size].to(cross_entropy.wide_dtype(logits))
    log_softmax = wide - torch.logsumexp(wide, -1, keepdim=True)
    counts = target != ignore_index
    picked = log_softmax.gather(1, target.masked_fill(~counts, 0)[:, None])[:, 0]
    loss = -(1 - label_smoothing) * picked - label_smoothing * log_softmax.mean(-1)
    return loss.masked_fill(~counts, 0.0)


def inputs(N: int, V: int, **like: Any) -> dict[str, Any]:
    """Random arguments of one test shape; a third of the rows is ignored."""
    target = torch.randint(V, (N,), device=like.get("device"))
    target[1::3] = -100
    logits = torch.randn(N, V, **like) * 3
    return {"logits": logits, "target": target, "vocab_size": V, "label_smoothing": 0.1}


@kernel("vocab_parallel_cross_entropy", reference, inputs, SHAPES, cpu="one collective")
def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    vocab_size: int,
    group: Any = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross-entropy per row [N] in fp32, 0 where the target is ignored.

    Args:
        logits: [N, ceil(V / n)], this rank's columns; the last rank's may be padding.
        target: [N], class indices in 0..V-1, or ignore_index.
        vocab_size: V.
        group: the ranks that hold the columns; None for one.
        ignore_index: targets that do not count.
        label_smoothing: as in F.cross_entropy, over V classes.

    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3 (the parallel loss).
    """
    local, counts, width = local_targets(target, vocab_size, group, ignore_index)
    whole = join(cross_entropy.statistics(logits[:, :width], local), group)
    return cross_entropy.row_losses(whole, counts, label_smoothing, vocab_size)


def local_targets(
    target: Tensor, vocab_size: int, group: Any, ignore_index: int
) -> tuple[Tensor, Tensor, int]:
    """Targets as columns of this rank or -1, which rows count, and how many columns are real."""
    n, r = collectives.group_size(group), collectives.group_rank(group)
    runs = Placement(0, pad=True).runs(vocab_size, n, r)
    start, stop = runs[0] if runs else (0, 0)
    counts = target != ignore_index
    require_indices(((target >= 0) & (target < vocab_size)) | ~counts, "labels", vocab_size)
    ours = (target >= start) & (target < stop) & counts
    return torch.where(ours, target - start, -1), counts, stop - start


def join(statistics: Tensor, group: Any) -> Tensor:
    """Statistics of this rank's columns [3, N] --> of all [3, N]; the one collective.

    Every rank computes the same loss from them, so its own part of the gradient is the whole of it.
    """
    if group is None:
        return statistics
    return cross_entropy.join(collectives.all_gather(statistics[None], 0, group, False))
