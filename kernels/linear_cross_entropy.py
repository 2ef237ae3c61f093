"""linear_cross_entropy: the loss of a language-model head without its logits, and two names of its sharded forms.

N rows, H hidden size, V classes. `vocab_parallel_cross_entropy` is the loss of logits whose columns several
ranks divide, `vocab_parallel_linear_cross_entropy` that of a head whose rows they divide.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from slapo_zoo.dispatch.kernel_registry import kernel
from slapo_zoo.kernels import cross_entropy
from slapo_zoo.kernels.lm_loss import lm_loss
from slapo_zoo.kernels.logits_on_demand import Head, LogitsOnDemand, may_defer

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
    """Compute the definition of the kernel (transformers, loss_utils.py: ForCausalLMLoss, ForMaskedLMLoss)."""
    logits = x if weight is None else x @ weight.T if bias is None else x @ weight.T + bias
    logits = logits.to(cross_entropy.wide_dtype(x))
    log_softmax = logits - torch.logsumexp(logits, -1, keepdim=True)
    counts = target != ignore_index
    picked = log_softmax.gather(1, target.masked_fill(~counts, 0)[:, None])[:, 0]
    loss = -(1 - label_smoothing) * picked - label_smoothing * log_softmax.mean(-1)
    loss = loss.masked_fill(~counts, 0.0)
    if reduction == "none":
        return loss
    return loss.sum() / (counts.sum() if num_items is None else num_items)


def _targets(N: int, V: int, device: Any) -> Tensor:
    target = torch.randint(V, (N,), device=device)
    target[1::3] = -100
    return target


def inputs(N: int, H: int, V: int, **like: Any) -> dict[str, Any]:
    """Return random arguments of one test shape; a third of the rows is ignored, chunks are small."""
    target = _targets(N, V, like.get("device"))
    x, weight, bias = torch.randn(N, H, **like), torch.randn(V, H, **like), torch.randn(V, **like)
    return {"x": x, "weight": weight / 4, "target": target, "bias": bias, "label_smoothing": 0.1,
            "num_items": torch.tensor(N + 7), "chunk_bytes": 64 * V * 4}  # fmt: skip


def inputs_of_logits(N: int, V: int, **like: Any) -> dict[str, Any]:
    """Return random arguments of one test shape without a weight; a third of the rows is ignored."""
    target = _targets(N, V, like.get("device"))
    return {"x": torch.randn(N, V, **like), "weight": None, "target": target, "label_smoothing": 0.1,
            "reduction": "none"}  # fmt: skip


def _forward(module: Any, input: Tensor) -> Tensor:
    """Run the Linear that makes the logits of a model: while it trains, they are made on demand."""
    if not may_defer(module, input):
        return type(module).forward(module, input)
    logits = lambda rows: type(module).forward(module, rows)  # noqa: E731
    return LogitsOnDemand.of(input, Head(module, logits, vocab_size=module.weight.shape[0]))


def _sites(model: Any) -> list[str]:
    """Return the path of the output embedding, where the model has a Linear for one."""
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
    """Compute F.cross_entropy(x weight' + bias, target) in fp32; arguments: see `lm_loss`.

    A TorchFunctionMode sees the call as it sees one of F.cross_entropy (slapo_zoo.parallel.losses.loss_means needs to).
    """
    tensors = (x, target) if weight is None else (x, weight, target)
    if has_torch_function_variadic(*tensors):
        return handle_torch_function(
            linear_cross_entropy, tensors, x, weight, target, *args, **options
        )
    return lm_loss(x, weight, target, *args, **options)
