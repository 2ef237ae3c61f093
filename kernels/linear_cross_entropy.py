"""linear_cross_entropy: the loss of a language-model head without its logits.

N rows, H hidden size, V classes. Logits exist for a chunk of rows at a time; the gradients of x, weight
and bias are made in the same pass (three GEMMs, none twice); the backward has little left to do.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function_variadic

from slapo_zoo.dispatch import cpu_matmul as products
from slapo_zoo.dispatch.kernel_registry import in_triton, kernel, operator, runs_triton
from slapo_zoo.kernels import cross_entropy
from slapo_zoo.kernels.logits_on_demand import Head, LogitsOnDemand, may_defer
from slapo_zoo.parallel.local_tensors import require_indices

SHAPES = [(1, 16, 40), (21, 24, 131), (130, 16, 97), (0, 16, 40)]
ROWS = 1024  # of a gradient that are in fp32 at a time


def reference(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    num_items: Tensor | int | None = None,
    chunk_bytes: int | None = None,
) -> Tensor:
    """Compute the definition of the kernel (transformers, loss_utils.py: ForCausalLMLoss, ForMaskedLMLoss)."""
    logits = (x @ weight.T if bias is None else x @ weight.T + bias).to(cross_entropy.wide_dtype(x))
    log_softmax = logits - torch.logsumexp(logits, -1, keepdim=True)
    counts = target != ignore_index
    picked = log_softmax.gather(1, target.masked_fill(~counts, 0)[:, None])[:, 0]
    loss = -(1 - label_smoothing) * picked - label_smoothing * log_softmax.mean(-1)
    total = loss.masked_fill(~counts, 0.0).sum()
    return total / (counts.sum() if num_items is None else num_items)


def inputs(N: int, H: int, V: int, **like: Any) -> dict[str, Any]:
    """Random arguments of one test shape; a third of the rows is ignored, chunks are small."""
    target = torch.randint(V, (N,), device=like.get("device"))
    target[1::3] = -100
    x, weight, bias = torch.randn(N, H, **like), torch.randn(V, H, **like), torch.randn(V, **like)
    return {"x": x, "weight": weight / 4, "target": target, "bias": bias, "label_smoothing": 0.1,
            "num_items": torch.tensor(N + 7), "chunk_bytes": 64 * V * 4}  # fmt: skip


def _forward(module: Any, input: Tensor) -> Tensor:
    """The Linear that makes the logits of a model: while it trains, they are made on demand."""
    if not may_defer(module, input):
        return type(module).forward(module, input)
    logits = lambda rows: type(module).forward(module, rows)  # noqa: E731
    head = Head(module, logits, loss_of_head, vocab_size=module.weight.shape[0])
    return LogitsOnDemand.of(input, head)


def loss_of_head(
    head: Head, rows: Tensor, target: Tensor, ignore_index: int, smoothing: float, items: Any
) -> Tensor:
    """The loss of rows [N, H] whose head has its whole vocabulary here; see `Head.loss`."""
    options: Any = {"ignore_index": ignore_index, "label_smoothing": smoothing, "num_items": items}
    return linear_cross_entropy(rows, head.linear.weight, target, head.linear.bias, **options)


def _sites(model: Any) -> list[str]:
    """The output embedding, where the model has a Linear for one."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return [path for path, module in model.named_modules() if module is head]


@kernel(
    "linear_cross_entropy", reference, inputs, SHAPES, cpu="chunks of rows that count",
    serves={"Linear": _forward}, sites=_sites,
)  # fmt: skip
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    num_items: Tensor | int | None = None,
    chunk_bytes: int | None = None,
    reduction: str = "mean",
) -> Tensor:
    """F.cross_entropy(x weight' + bias, target) in fp32; NaN where no row counts, as there.

    A TorchFunctionMode sees the call as it sees one of F.cross_entropy (slapo_zoo.parallel.losses.loss_means needs to).

    Args:
        x: [N, H].
        weight: [V, H]; tied to the embedding or not.
        target: [N], class indices, or ignore_index.
        bias: [V].
        ignore_index: targets that do not count.
        label_smoothing: as in F.cross_entropy.
        num_items: what the sum is divided by; by default the number of targets that count.
        chunk_bytes: most bytes of logits at a time.
        reduction: "mean" or "sum"; `num_items` is used with "mean" only.
    """
    if has_torch_function_variadic(x, weight, target):
        options = {"bias": bias, "ignore_index": ignore_index, "label_smoothing": label_smoothing,
                   "num_items": num_items, "chunk_bytes": chunk_bytes, "reduction": reduction}  # fmt: skip
        tensors = (x, weight, target)
        return handle_torch_function(linear_cross_entropy, tensors, *tensors, **options)
    counts = target != ignore_index
    items = 1 if reduction == "sum" else num_items
    x, weight, bias = cross_entropy.matmul_dtype(x, weight, bias)
    if _torch_has_it(x, label_smoothing):
        # On a CPU torch 2.13 takes 7 times as long as materialised logits: a GPU only.
        options: Any = torch.nn.LinearCrossEntropyOptions()
        loss: Any = functional.linear_cross_entropy
        args = {"linear_bias": bias, "ignore_index": ignore_index, "reduction": "sum"}
        return _mean(loss(x, weight, target, options=options, **args), counts, items)
    V = weight.shape[0]
    require_indices(((target >= 0) & (target < V)) | ~counts, "labels", V)
    target = target.masked_fill(~counts, -1)
    tensors = [t for t in (x, weight, bias) if t is not None]
    graded = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    rows = cross_entropy.chunk_rows(x, V, chunk_bytes)
    wide = cross_entropy.wide_dtype(x)
    number = counts.sum() if items is None else torch.as_tensor(items, device=x.device)
    divisor = number.detach().clamp(min=1).to(wide) if items is None else number.detach().to(wide)
    loss = _mean_loss(x, weight, bias, target, divisor, label_smoothing, rows, graded)[0]
    return loss if items is not None else torch.where(number > 0, loss, torch.nan)


def _mean(total: Tensor, counts: Tensor, items: Tensor | int | None) -> Tensor:
    """total / items; where nothing counts NaN, with gradients of 0, as F.cross_entropy has it."""
    if items is not None:
        return total / items
    number = counts.sum()
    return torch.where(number > 0, total / number.clamp(min=1), torch.nan)


def _torch_has_it(x: Tensor, label_smoothing: float) -> bool:
    """Return whether torch's own chunked loss is there and was not measured to be the slower one."""
    has = hasattr(torch.nn, "LinearCrossEntropyOptions") and hasattr(
        functional, "linear_cross_entropy"
    )
    return x.is_cuda and has and not label_smoothing and not runs_triton("linear_cross_entropy", x)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, _weight, bias, _target, divisor, *_ = inputs
    ctx.has_bias = bias is not None
    ctx.divisor = None if _divides_first(x) else divisor
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])


def _gradients(ctx: Any, d_loss: Tensor, *_: Any) -> tuple:
    d = d_loss if ctx.divisor is None else d_loss / ctx.divisor
    dx, dw, db = (_times(t, d) for t in ctx.saved_tensors)
    return dx, dw, db if ctx.has_bias else None, *[None] * 5


def _divides_first(x: Tensor) -> bool:
    """Return whether gradients are divided by the count first: not in fp16, where small ones would vanish before the loss scale."""
    return x.dtype != torch.float16


def _times(t: Tensor, d: Tensor) -> Tensor:
    """t d, for a scalar d in fp32: rounded to bf16 it would make all gradients 0.2 % too large or small.

    `loss.backward()` has d = 1, and t needs no pass over it; on a GPU to ask would be to wait.
    """
    is_traced = torch.compiler.is_compiling() or type(d) is not Tensor
    if not is_traced and d.device.type == "cpu" and d.item() == 1.0:
        return t
    if t.dtype == d.dtype:
        return t * d
    if is_traced or not t.numel():
        return (t.to(d.dtype) * d).to(t.dtype)
    out = torch.empty_like(t)
    for part, piece in zip(out.split(ROWS), t.split(ROWS), strict=True):  # little memory in fp32
        part.copy_(piece.to(d.dtype).mul_(d))
    return out


def _fake(x, weight, bias, target, divisor, smoothing, rows, graded):
    (N, H), V = x.shape, weight.shape[0]  # not len(): it would fix the number of rows
    n = 1 if graded else 0
    db = x.new_empty(V * n if bias is not None else 0)
    total = x.new_empty((), dtype=cross_entropy.wide_dtype(x))
    return total, x.new_empty((N * n, H)), x.new_empty((V * n, H)), db


@operator("linear_cross_entropy", _fake, _setup, _gradients)
def _mean_loss(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    divisor: Tensor,
    smoothing: float,
    rows: int,
    graded: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sum of the losses over the divisor, and its gradients; target -1 where a row does not count."""
    wide = cross_entropy.wide_dtype(x)
    scale = 1.0 / divisor if _divides_first(x) else torch.ones_like(divisor)
    total = x.new_zeros((), dtype=wide)
    n = 1 if graded else 0
    dx = x.new_zeros((len(x) * n, x.shape[1]))
    dw = None
    db = x.new_zeros(len(weight) * n if bias is not None else 0, dtype=wide)
    at = None
    if x.device.type == "cpu":  # rows that do not count cost nothing; a GPU would be waited for
        at = (target >= 0).nonzero()[:, 0]
        at = None if len(at) == len(target) else at
    kept_x, kept_target = (x, target) if at is None else (x[at], target[at])
    kept_dx = dx if at is None or not graded else x.new_empty(kept_x.shape)
    chunk = cross_entropy.padded_columns(x, min(rows, len(kept_x)), len(weight))
    for i in range(0, len(kept_x), rows):
        part = slice(i, i + rows)
        logits = products.mm_into(chunk[: len(kept_x[part])], kept_x[part], weight.t())
        if bias is not None:
            logits += bias
        loss, logits = _loss_and_gradient_(logits, kept_target[part], smoothing, scale)
        total += loss
        if graded:
            products.mm_into(kept_dx[part], logits, weight)
            dw = plus_product(dw, logits.t(), kept_x[part], wide)
            if bias is not None:
                db += logits.sum(0, dtype=wide)
    if graded and at is not None:
        dx.index_copy_(0, at, kept_dx)
    dw = x.new_zeros((len(weight) * n, x.shape[1])) if dw is None else dw.to(x.dtype)
    return total / divisor, dx, dw, db.to(x.dtype)


def plus_product(total: Tensor | None, a: Tensor, b: Tensor, wide: torch.dtype) -> Tensor:
    """total + a b, summed over chunks in fp32; one product alone stays in the dtype of a."""
    if total is None:
        return products.mm(a, b)
    if wide == a.dtype:
        return products.add_mm_(total, a, b)
    return total.to(wide).add_(a @ b)


def _loss_and_gradient_(
    logits: Tensor, target: Tensor, smoothing: float, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """The sum of the losses, and the logits' gradient of `scale` times that sum in their place."""
    counts, V = target >= 0, logits.shape[1]
    if in_triton(logits):
        found = cross_entropy.statistics(logits, target)
        each = scale * counts
        d = torch.stack([each, each * (smoothing - 1.0), each * (-smoothing / V)])
        losses = cross_entropy.row_losses(found, counts, smoothing, V)
        return losses.sum(), cross_entropy.gradient_(logits, target, found[0], d)
    total = logits.new_zeros((), dtype=cross_entropy.wide_dtype(logits))
    for part in cross_entropy.row_blocks(logits):
        total += _rows_in_cache_(logits[part], target[part], counts[part], smoothing, scale)
    return total, logits


def _rows_in_cache_(
    logits: Tensor, target: Tensor, counts: Tensor, smoothing: float, scale: Tensor
) -> Tensor:
    """Compute `_loss_and_gradient_` for a few rows, on a CPU."""
    wide = logits.to(cross_entropy.wide_dtype(logits))
    at = target.clamp(min=0)[:, None]
    picked, total = wide.gather(1, at)[:, 0], wide.sum(1) if smoothing else wide[:, 0]
    highest = wide.amax(1)
    softmax = torch.softmax(wide, 1)
    log_sum = highest - softmax.amax(1).log_()  # one pass less than another log-sum-exp
    V = logits.shape[1]
    losses = cross_entropy.row_losses(torch.stack([log_sum, picked, total]), counts, smoothing, V)
    if smoothing:
        softmax.sub_(smoothing / V)
    softmax.scatter_add_(1, at, torch.full_like(picked, smoothing - 1.0)[:, None])
    if logits.device.type != "cpu":  # there such rows were left out
        softmax.mul_(counts[:, None])
    torch.mul(softmax, scale, out=logits)
    return losses.sum()
