"""Kernel sparse_mlm_head_loss: the loss of a masked-language model, computed from the masked rows only.

About 15 % of the rows are masked, while `transformers` runs the head on all. B batch rows, S tokens, H hidden size,
V classes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from slapo_zoo.dispatch.kernel_registry import kernel, served_class
from slapo_zoo.kernels.linear_cross_entropy import linear_cross_entropy
from slapo_zoo.kernels.loss.logits_on_demand import Head, LogitsOnDemand, may_defer

SHAPES = [(1, 5, 16, 40), (3, 7, 24, 131), (2, 33, 16, 97)]


def reference(
    hidden: Tensor,
    labels: Tensor,
    transform: Callable[[Tensor], Tensor],
    weight: Tensor,
    bias: Tensor | None = None,
    num_items: Tensor | int | None = None,
) -> Tensor:
    """Compute the masked-language-model loss (BertForMaskedLM), a scalar, in torch operations: with logits for all
    tokens of `hidden` [B, S, H]. `transform` is the head before its decoder of `weight` [V, H'] and `bias`; `labels`
    [B, S] are -100 where not masked. The summed loss is divided by `num_items` (None: number of masked tokens).
    """
    h = transform(hidden)
    logits = h @ weight.T if bias is None else h @ weight.T + bias
    wide = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    if num_items is None:
        return functional.cross_entropy(wide, labels.flatten())
    return functional.cross_entropy(wide, labels.flatten(), reduction="sum") / num_items


def inputs(B: int, S: int, H: int, V: int, **like: Any) -> dict[str, Any]:
    """Return random arguments for B rows of S tokens, a third of them masked, and weight [V, H]; `like` has dtype, device."""
    labels = torch.randint(V, (B, S), device=like.get("device"))
    labels.flatten()[1::3] = -100
    labels.flatten()[2::3] = -100
    hidden, weight = torch.randn(B, S, H, **like), torch.randn(V, H, **like) / 4
    return {"hidden": hidden, "labels": labels, "transform": torch.tanh, "weight": weight,
            "bias": torch.randn(V, **like)}  # fmt: skip


def _bert(head: Any) -> Callable[[Tensor], Tensor]:
    return head.transform


def _roberta(head: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: head.layer_norm(functional.gelu(head.dense(x)))


def _albert(head: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: head.LayerNorm(head.activation(head.dense(x)))


HEADS = {"BertLMPredictionHead": _bert, "RobertaLMHead": _roberta, "AlbertMLMHead": _albert}


def _forward(head: Any, hidden: Tensor, **kwargs: Any) -> Tensor:
    """Run an MLM head on hidden states; return logits, in training LogitsOnDemand, which are computed when read."""
    transform = HEADS[served_class(head, HEADS).__name__](head)
    if not may_defer(head, hidden):
        return type(head).forward(head, hidden, **kwargs)
    with torch.no_grad():  # the hooks of the decoder say how the vocabulary is sharded
        empty = head.decoder(hidden.new_empty((0, head.decoder.weight.shape[1])))
    group = getattr(empty, "group", None)
    found = Head(
        head.decoder, lambda rows: head.decoder(transform(rows)), transform, empty.shape[-1], group,
        root=head,
    )  # fmt: skip
    return LogitsOnDemand.of(hidden, found)


@kernel(
    "sparse_mlm_head_loss", reference, inputs, SHAPES, cpu="masked rows only",
    serves=dict.fromkeys(HEADS, _forward), passes=("decoder",),
)  # fmt: skip
def sparse_mlm_head_loss(
    hidden: Tensor,
    labels: Tensor,
    transform: Callable[[Tensor], Tensor],
    weight: Tensor,
    bias: Tensor | None = None,
    num_items: Tensor | int | None = None,
) -> Tensor:
    """Compute the mean loss over masked tokens; loss and gradients are, up to rounding, those of the head on all rows.

    Args:
        hidden: last hidden states [B, S, H].
        labels: [B, S], -100 where not masked.
        transform: maps [N, H] to [N, H'], row by row: the head before its decoder.
        weight: [V, H'].
        bias: [V], or None.
        num_items: divisor of the sum; None for the number of masked tokens.
    """
    rows, targets = hidden.flatten(0, -2), labels.flatten()
    if (
        not torch.compiler.is_compiling()
    ):  # a graph has fixed shapes; on a CPU its chunks leave out ignored rows
        at = (targets != -100).nonzero()[:, 0]
        rows, targets = rows.index_select(0, at), targets[at]
    return linear_cross_entropy(transform(rows), weight, targets, bias, num_items=num_items)
