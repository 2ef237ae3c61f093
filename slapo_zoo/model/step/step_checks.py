"""Checks of a batch and a model that `train_step` makes first, so that an error comes before ranks wait for others."""

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slapo_zoo.errors import MeshError, SlapoError
from slapo_zoo.hf.attention import CACHES
from slapo_zoo.model.gradients.gradient_reducer import is_taken
from slapo_zoo.model.step.runtime import Runtime
from slapo_zoo.parallel.losses.loss_means import LABELS
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.rank_plan import TIED
from slapo_zoo.pipeline.pipeline_runtime import FOR_LOSS

SAMPLED, SAME = 1024, 1e-9  # sampled elements of a tied weight; relative rounding of their norm


def no_rows(batch: Mapping[str, Any], mesh: Mesh) -> SlapoError:
    """Return the error for a batch without tensors, or with tensors without rows."""
    names = [name for name, value in batch.items() if isinstance(value, Tensor) and value.ndim]
    if not names:
        problem = f"found no tensor with rows among {list(batch)}"
        return SlapoError("train_step", "batch", problem, "pass input_ids and labels")
    problem = f"found 0 rows in {names} on dp rank {mesh.coord('dp')}, expected at least 1"
    hint = "leave out the short last batch (drop_last=True), or add a row whose labels are all -100"
    return SlapoError("train_step", "batch", problem, hint)


def require_head(cls: Any, batch: Mapping[str, Any]) -> None:
    """Raise SlapoError for labels in `batch` that the forward of the model class does not take."""
    if "labels" in batch and "labels" not in inspect.signature(cls.forward).parameters:
        problem = f"{cls.__name__} has no head: its forward takes no labels, so there is no loss"
        hint = 'name a class that has one when loading, e.g. auto_class="AutoModelForCausalLM"'
        raise SlapoError("train_step", "labels", problem, hint)


def require_labels(tensors: Mapping[str, Tensor], whole: Mapping[str, Any], mesh: Mesh) -> None:
    """Raise SlapoError for labels that are no tensor, such as DETR's list of boxes, or in a pipeline for none.

    `tensors` are the entries of the batch with a batch axis, `whole` the other entries.
    """
    if not isinstance(whole.get("labels"), Tensor | None):
        kind = type(whole["labels"]).__name__
        raise no_loss(f"found labels in a {kind}, expected a tensor of one or more per row")
    if mesh.pp > 1 and not (any(name in tensors for name in LABELS) or whole.get("return_loss")):
        raise no_loss(f"found no labels among {list(tensors)}")


def no_loss(problem: str) -> SlapoError:
    """Return the error for a batch from which the model computes no loss; `problem` is the reason."""
    return SlapoError("train_step", "batch", f"no loss: {problem}", "put labels into the batch")


def count_micro_batches(runtime: Runtime, mesh: Mesh, rows: int, asked: int | None) -> int:
    """Return the number of micro-batches: `asked` by the user; if None, `runtime.micro_batches`; if that is None too, 1
    without a pipeline, else a number that fits the pipeline's order. MeshError if `rows` is no multiple of the number.
    """
    count = runtime.micro_batches if asked is None else asked
    if count is None and runtime.table.batch_statistics and mesh.pp > 1:
        warnings.warn(
            "BatchNorm takes its statistics per micro-batch: one is used, as in one process, and the "
            f"{mesh.pp} stages take turns; pass micro_batches= to let them overlap",
            stacklevel=5,
        )
        count = 1
    if count is None:
        count = runtime.pipeline.places.usual_micro_batches(rows) if runtime.pipeline else 1
    legal = [i for i in range(1, rows + 1) if rows % i == 0]
    if count not in legal:
        problem = f"{rows} rows cannot be divided into {count} equal micro-batches"
        raise MeshError("train_step", "micro_batches", problem, f"pass one of {legal}")
    return count


def require_rows(tensors: dict[str, Tensor], whole: dict, rows: int, count: int) -> None:
    """Raise SlapoError if `count` > 1 and an entry of the batch cannot be split into `count` micro-batches.

    In `tensors`, axis 0 must be a multiple of `rows` (several images per row are allowed). The other entries,
    `whole`, must have no encoder outputs and no KV cache.
    """
    other = [f"{n.removeprefix(FOR_LOSS)} {list(x.shape)}" for n, x in tensors.items()
             if len(x) % rows or (x.ndim == 1 and len(x) != rows)]  # fmt: skip
    other += [n for n in ("encoder_outputs", *CACHES) if whole.get(n) is not None]
    if count > 1 and other:
        names = ", ".join(other)
        problem = f"{rows} rows are split into {count} micro-batches, but {names} cannot be"
        hint = "pass micro_batches=1; or give tensors one row per row of the batch, and no encoder outputs or KV cache"
        raise SlapoError("train_step", "batch", problem, hint)


def require_trained(trains: bool, adapters: Any = None) -> None:
    """Raise SlapoError if `trains` is False, i.e. if no parameter and no input of the step takes a gradient, or if one of
    `adapters` (name --> config of peft) is AdaLoRA, whose own forward adds a term to the loss.
    """
    if any(str(config.peft_type).endswith("ADALORA") for config in (adapters or {}).values()):
        hint = "use the loss of the PeftModel: model(**batch).loss.backward()"
        problem = "peft adds a term to the loss in its own forward, which train_step does not call"
        raise SlapoError("train_step", "AdaLoRA", problem, hint)
    if not trains:
        problem = "no parameter and no input requires a gradient"
        hint = "unfreeze a parameter; a soft prompt of your own goes into inputs_embeds (docs/your_own_loop.md)"
        raise SlapoError("train_step", "parameters", problem, hint)


def require_whole_step(mesh: Mesh, parameters: Mapping[str, nn.Parameter], count: int) -> None:
    """Raise SlapoError if pp > 1 or `count` > 1, and a parameter has a post-accumulate-grad hook of the user.

    Such a hook, which may take the gradient, would run after each micro-batch, on an incomplete gradient. `parameters`
    maps names to parameters, `count` is the number of micro-batches.
    """
    if mesh.pp * count > 1 and any(is_taken(p) for p in parameters.values()):
        found = f"pp={mesh.pp}, {count} micro-batches"
        problem = f"{found}: the hook would run before the gradient is complete"
        hint = "remove the hook and step the optimizer after train_step, or use pp=1 and micro_batches=1"
        raise SlapoError("train_step", "a hook that takes gradients", problem, hint)


def agree_on_frozen_ties(runtime: Runtime, device: torch.device) -> None:
    """Freeze a tied weight on all stages that hold it if one has frozen it (`requires_grad` False); MeshError if the
    norms of a sample of its values differ between these stages by more than rounding.

    The ranks of these stages all-reduce three numbers per weight, on `device`.
    """
    if runtime.schedule.mesh.pp == 1:
        return
    named = dict(runtime.schedule.model.named_parameters())
    for one, names in runtime.plan.sums_of(named, TIED).items():
        held = [_tie_state(named[name]).to(device) for name in names]
        found = torch.stack(held)
        dist.all_reduce(found, dist.ReduceOp.MIN, group=runtime.group(one))
        for name, (trained, least, most) in zip(names, found.tolist(), strict=True):
            if least + most < -SAME * least:
                problem = f"this tied weight has different values on different stages: norms {least:.6g} and {-most:.6g}"
                hint = "change and step the weight equally on all ranks; load the last checkpoint again"
                raise MeshError("train_step", name, problem, hint)
            if not trained:
                named[name].requires_grad_(False).grad = None


def _tie_state(p: nn.Parameter) -> Tensor:
    """Return [1 if the tied weight p is trained, else 0; L1 norm of a sample of p; minus that norm].

    After a MIN all-reduce over the stages these are: trained on all, least norm, minus the largest norm.
    """
    sample = p.detach().reshape(-1)
    size = sample[:: max(1, len(sample) // SAMPLED)].double().abs().sum()
    return torch.stack([torch.full_like(size, p.requires_grad), size, -size])
