"""Kernel linear_cross_entropy: the loss of an LM head without all logits in memory, also for a sharded vocabulary.

N rows, H hidden size, V classes. If ranks shard the classes, `vocab_parallel_cross_entropy` takes a rank's columns of
the logits, and `vocab_parallel_linear_cross_entropy` hidden states and a rank's rows of the head's weight.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from slapo_zoo.dispatch.kernel_registry import kernel
from slapo_zoo.kernels.loss import cross_entropy
from slapo_zoo.kernels.loss.lm_loss import lm_loss
from slapo_zoo.kernels.loss.logits_on_demand import Head, LogitsOnDemand, may_defer

SHAPES = [(1, 16, 40), (21, 24, 131), (130, 16, 97), (0, 16, 40)]
OF_LOGITS = [(1, 40), (21, 131), (64, 1025), (0, 40)]


def reference(
    x: Tensor,
    weight: Tensor | None,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    num_items: Tensor | int | None = None,
    chunk_bytes: int | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Compute the cross-entropy of logits x W^T + bias [N, V] and classes `target` [N] in torch operations
    (loss_utils.py: ForCausalLMLoss). x is [N, H], or the logits if `weight` is None. Return [N] if `reduction` is
    "none", the sum if "sum", else the sum divided by `num_items` (None: number of targets but `ignore_index`).
    `chunk_bytes` is unused.
    """
    logits = x if weight is None else x @ weight.T if bias is None else x @ weight.T + bias
    logits = logits.to(cross_entropy.wide_dtype(x))
    log_softmax = logits - torch.logsumexp(logits, -1, keepdim=True)
    counts = target != ignore_index
    picked = log_softmax.gather(1, target.masked_fill(~counts, 0)[:, None])[:, 0]
    loss = -(1 - label_smoothing) * picked - label_smoothing * log_softmax.mean(-1)
    loss = loss.masked_fill(~counts, 0.0)
    if reduction != "mean":
        return loss if reduction == "none" else loss.sum()
    return loss.sum() / (counts.sum() if num_items is None else num_items)


def _targets(N: int, V: int, device: Any) -> Tensor:
    target = torch.randint(V, (N,), device=device)
    target[1::3] = -100
    return target


def inputs(N: int, H: int, V: int, **like: Any) -> dict[str, Any]:
    """Return random arguments for x [N, H], weight [V, H]; a third of the rows is ignored. `like` holds dtype and device."""
    target = _targets(N, V, like.get("device"))
    x, weight, bias = torch.randn(N, H, **like), torch.randn(V, H, **like), torch.randn(V, **like)
    return {"x": x, "weight": weight / 4, "target": target, "bias": bias, "label_smoothing": 0.1,
            "num_items": torch.tensor(N + 7, device=x.device), "chunk_bytes": 64 * V * 4}  # fmt: skip


def inputs_of_logits(N: int, V: int, **like: Any) -> dict[str, Any]:
    """Return random arguments for logits [N, V], a third of whose rows is ignored, no weight; `like` has dtype, device."""
    target = _targets(N, V, like.get("device"))
    return {"x": torch.randn(N, V, **like), "weight": None, "target": target, "label_smoothing": 0.1,
            "reduction": "none"}  # fmt: skip


def _forward(module: Any, input: Tensor) -> Tensor:
    """Run the LM head `module`; return logits: in training LogitsOnDemand, a tensor computed when values are read."""
    if not may_defer(module, input):
        return type(module).forward(module, input)
    logits = lambda rows: type(module).forward(module, rows)  # noqa: E731
    return LogitsOnDemand.of(input, Head(module, logits, vocab_size=module.weight.shape[0]))


def _sites(model: Any) -> list[str]:
    """Return the paths of the modules that this kernel may replace: the output embedding if it is a Linear."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return [path for path, module in model.named_modules() if module is head]


@kernel(
    "vocab_parallel_cross_entropy", reference, inputs_of_logits, OF_LOGITS, cpu="one collective"
)
@kernel(
    "vocab_parallel_linear_cross_entropy",
    reference,
    inputs,
    SHAPES,
    cpu="chunks, a collective each",
)
@kernel(
    "linear_cross_entropy", reference, inputs, SHAPES, cpu="chunks of rows that count",
    serves={"Linear": _forward}, sites=_sites,
)  # fmt: skip
def linear_cross_entropy(
    x: Tensor, weight: Tensor | None, target: Tensor, *args: Any, **options: Any
) -> Tensor:
    """Return F.cross_entropy(x W^T + bias, target) in fp32, a scalar, for x [N, H], or for logits x [N, V] if `weight`
    [V, H] is None. `args` and `options` are those of `lm_loss.lm_loss` after `target`: bias, ignore_index,
    label_smoothing, num_items (divisor), chunk_bytes, reduction, and for sharded classes vocab_size, group, summed.

    A TorchFunctionMode can intercept this call, as it can F.cross_entropy: `loss_means.GlobalMeans` does so to divide
    by the number of targets in the whole batch.
    """
    tensors = (x, target) if weight is None else (x, weight, target)
    if has_torch_function_variadic(*tensors):
        return handle_torch_function(
            linear_cross_entropy, tensors, x, weight, target, *args, **options
        )
    return lm_loss(x, weight, target, *args, **options)
