"""Loss means that stay exact when a batch is divided into micro-batches and over dp ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from slapo_zoo.errors import MeshError
from slapo_zoo.parallel.heads import head_of

# In the order in which the heads of `transformers` compute their terms.
LABELS = (
    "mc_labels", "labels", "next_sentence_label", "sentence_order_label", "start_positions",
    "end_positions", "bool_masked_pos",
)  # fmt: skip
MEANS = (functional.cross_entropy, functional.mse_loss, functional.binary_cross_entropy_with_logits)


def count_targets(class_name: str, batch: Mapping[str, Any]) -> list[Tensor]:
    """How many targets each loss term of a head averages over, in the order of its terms.

    Each is a tensor beside its labels: to read them together costs one wait for the device.

    Args:
        class_name: of the head, which tells whether it shifts its labels.
        batch: the keyword arguments of its forward.
    """
    counts = []
    for name in LABELS:
        target = batch.get(name)
        if target is None:
            continue
        target = shifted(class_name, target) if name == "labels" else target
        mask = batch.get("attention_mask") if head_of(class_name).over_real_tokens else None
        counts.append(_count(name, target, batch) if mask is None else (mask == 1).sum())
    return counts


def shifted(class_name: str, labels: Tensor) -> Tensor:
    """The labels that a head compares with: one that predicts the next token leaves out the first."""
    return labels[..., 1:] if head_of(class_name).shifts else labels


def _count(name: str, target: Tensor, batch: Mapping[str, Any]) -> Tensor:
    if target.is_floating_point():
        return torch.full((), target.numel(), device=target.device)
    if name.endswith("_positions"):  # positions beyond the sequence are ignored
        tokens = batch.get("input_ids")
        tokens = batch["inputs_embeds"] if tokens is None else tokens
        return (target < tokens.shape[1]).sum()
    return (target != -100).sum()


class GlobalMeans(TorchFunctionMode):
    """Within it, the k-th mean loss divides by the global count of its targets.

    rewrite:  loss_k(x, y, reduction="mean")  -->  loss_k(x, y, reduction="sum") / counts[k]

    Args:
        counts: number of targets of each term in the whole batch, over all micro-batches and dp.
    """

    def __init__(self, counts: Sequence[float]):
        super().__init__()
        self.counts, self.found = iter(counts), 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in MEANS or kwargs.get("reduction", "mean") != "mean":
            return func(*args, **kwargs)
        self.found += 1
        count = next(self.counts, torch.nan)
        if func is functional.cross_entropy and args and hasattr(args[0], "cross_entropy_over"):
            return args[0].cross_entropy_over(count, *args[1:], **kwargs)
        return func(*args, **{**kwargs, "reduction": "sum"}) / count

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        """A forward that ended without one of these means would sum losses of parts unscaled."""
        super().__exit__(exc_type, exc_val, exc_tb)
        if exc_type is None and not self.found:
            names = ", ".join(function.__name__ for function in MEANS)
            problem = f"its loss is no mean over targets that can be sharded ({names})"
            hint = "pass micro_batches=1 and use dp=1: tp (and pp) divide no loss"
            raise MeshError("train_step", "the model's head", problem, hint)
