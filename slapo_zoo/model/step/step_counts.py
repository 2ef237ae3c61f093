"""Counts that a training step reads from its batch (targets, padding): all at once, so that the host waits only once.

The counts of padding serve encoders: in `train_step` with the model's own loss their layers may run on real tokens only
(kernels/unpadded_encoder.py). Loss and gradients stay the same; outputs at padding, which nobody sees, differ from the
plain model's: docs/decisions/0012-padding-is-left-out-unseen.md.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from slapo_zoo.dispatch.kernel_registry import KNOWN, as_written, is_changed, package_of
from slapo_zoo.hf.attention import ATTRIBUTE, CACHES
from slapo_zoo.hf.attention_backends import NAME
from slapo_zoo.parallel.collectives import all_gather
from slapo_zoo.parallel.known import IGNORED, Known
from slapo_zoo.parallel.losses.heads import head_of
from slapo_zoo.parallel.losses.loss_means import targets_of
from slapo_zoo.parallel.mesh import Mesh

MASKS = ("attention_mask", "decoder_attention_mask")
WORTH_UNPADDING = 0.9  # share of real tokens up to which moving them is cheaper
SHOWS = ("output_hidden_states", "output_attentions", "is_decoder", "chunk_size_feed_forward")
GIVEN = (*CACHES, "encoder_hidden_states")
BY_TOKEN = (nn.Linear, nn.Dropout, nn.Identity, nn.LayerNorm, nn.ModuleDict, nn.Sequential, nn.Tanh, nn.ReLU, nn.GELU)  # fmt: skip


@dataclass(frozen=True)
class StepCounts:
    """Counts of one step: targets (labels that count in the loss), padding, packed rows, gradients that ranks lack.

    Args:
        totals: number of targets of each loss term, on all dp ranks together.
        first: index of this rank's first row among those of all dp ranks.
        padded: True if a mask hides a token; None without a mask.
        targets: number of labels other than -100 in each row of this rank; None where labels are not tokens.
        real: number of tokens other than padding in each row of this rank; None if padding cannot be skipped.
        packed: True if a row holds more than one sequence, by its position ids; None if unknown.
        missed: True if a parameter got no gradient on some dp rank in the last step.
    """

    totals: Sequence[float]
    first: int
    padded: bool | None = None
    targets: list[int] | None = None
    real: list[int] | None = None
    packed: bool | None = None
    missed: bool = False

    def rows(self, count: int) -> Tensor:
        """Return the indices [count] of this rank's rows among those of all dp ranks, on the CPU."""
        return torch.arange(self.first, self.first + count, device="cpu")

    def of_rows(self, start: int, rows: int, own_loss: bool = False, shown: bool = False) -> Known:
        """Return the counts of one micro-batch, this dp rank's rows `start` to `start + rows` of the step: `padded` (a
        mask hides a token somewhere in the step), `targets` (number of labels that count), `real` (numbers of tokens
        other than padding, one per row), `packed` (a row holds several sequences). With `own_loss` (the user's loss_fn)
        `targets` and `real` are None; with `shown` (the step returns logits) `real` is None, so that layers compute
        padding tokens too.
        """
        part = slice(start, start + rows)
        targets = None if self.targets is None or own_loss else sum(self.targets[part])
        real = None if self.real is None or own_loss or shown else tuple(self.real[part])
        return Known(self.padded, targets, real, self.packed)


def count_step(
    model: Any, tensors: Mapping[str, Tensor], counts: Sequence[float | Tensor], rows: int,
    whole: Mapping[str, Any],
) -> StepCounts:  # fmt: skip
    """Return the StepCounts of a step: numbers of targets (labels that count) over all dp and cp ranks and, for this
    rank's rows, targets, tokens other than padding, masks and packed rows. One collective, for which the host waits.
    `tensors` are the entries of the batch with a batch axis, `whole` the others, which may hold position ids. `counts`
    are this rank's numbers of targets, one per loss term; `rows` is its number of rows, which may differ between dp
    ranks. The counts are sent from the batch's device, since nccl needs them there.
    """
    mesh: Mesh = model.mesh
    device = next(iter(tensors.values())).device
    missed = float(model._slapo.calls.reducer.missed)
    masks = [tensors[name] for name in MASKS if name in tensors and tensors[name].ndim == 2]
    if mesh.size("loss") == 1 and not masks and not any(isinstance(n, Tensor) for n in counts):
        packed = None if _positions(tensors, whole) else False
        return StepCounts([float(n) for n in counts], 0, packed=packed)  # the host does not wait
    own = _of_rows(model, tensors, masks, whole)
    hidden = [own.pop("hidden", (0.0,))[0]] if mesh.size("cp") > 1 else []
    summed = [_number(n, device) for n in (*counts, *hidden, missed, rows)]
    each = all_gather(torch.stack(summed)[None], 0, mesh.group("loss"))
    mine = [x.to(torch.float64) for x in own.values()]
    flat = torch.cat([each.flatten(), *mine]).tolist()
    every, flat = flat[: each.numel()], flat[each.numel() :]
    width = len(summed)
    by_rank = [every[i : i + width] for i in range(0, len(every), width)]
    *totals, missing, _ = [sum(column) for column in zip(*by_rank, strict=True)]
    hides = [int(totals.pop()) for _ in hidden]
    found = {"hidden": hides} if masks and hides else {}
    rows_of = {
        mesh.coord("batch", rank): numbers[-1]
        for rank, numbers in zip(mesh.peers("loss"), by_rank, strict=True)
    }
    first = int(sum(n for coord, n in rows_of.items() if coord < mesh.coord("batch")))
    for name, x in own.items():
        found[name], flat = [int(n) for n in flat[: len(x)]], flat[len(x) :]
    others = _positions(tensors, whole) - {"position_ids"} or "packed" not in found
    packed = None if _positions(tensors, whole) and others else any(found.get("packed", ()))
    padded, targets, real = _read(found, tensors)
    if hidden:  # a rank counted its own tokens, not those of the whole row
        packed = None
    return StepCounts(totals, first, padded, targets, real, packed, missing > 0)


def _positions(*batch: Iterable[str]) -> set[str]:
    """Return the names in `batch` that are position ids, which may show that a row packs several sequences."""
    return {name for part in batch for name in part if name.endswith("position_ids")}


def _number(n: float | Tensor, device: torch.device) -> Tensor:
    if isinstance(n, Tensor):
        return n.to(device, torch.float64).reshape(())
    return torch.full((), n, dtype=torch.float64, device=device)


def _of_rows(
    model: Any, tensors: Mapping[str, Tensor], masks: Sequence[Tensor], whole: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return {kind of count: this rank's counts}. "targets" and "real" (tokens other than padding) are tensors [rows];
    "hidden" (a mask hides a token), "packed" (a row holds several sequences) and "ignored" (all labels at padding are
    -100) are bool tensors [1]. A kind that the batch cannot tell is left out. `tensors` are the entries of the batch
    with a batch axis, `masks` the padding masks among them, `whole` the others.
    """
    found, positions = {}, tensors.get("position_ids")
    if positions is not None and positions.ndim == 2:
        found["packed"] = (positions.diff(dim=1) != 1).any()[None]
    if masks:
        found["hidden"] = torch.stack([(mask == 0).any() for mask in masks]).any()[None]
    labels = tensors.get("labels")
    if labels is None or labels.ndim != 2 or labels.is_floating_point():
        return found
    name = model._slapo.head_name(model)
    found["targets"] = (targets_of(name, tensors)["labels"] != IGNORED).sum(1)
    if may_unpad(model, {**tensors, **whole}):
        real = tensors["attention_mask"].bool()
        found["real"] = real.sum(1)
        found["ignored"] = ((labels == IGNORED) | real).all()[None]
    return found


def _read(
    found: Mapping[str, list[int]], tensors: Mapping[str, Tensor]
) -> tuple[bool | None, list[int] | None, list[int] | None]:
    padded = bool(found["hidden"][0]) if "hidden" in found else None
    real = found.get("real")
    if real is not None:
        tokens = WORTH_UNPADDING * tensors["attention_mask"].numel()
        real = real if found["ignored"][0] and min(real) and sum(real) <= tokens else None
    return padded, found.get("targets"), real


def may_unpad(model: Any, batch: Mapping[str, Any]) -> bool:
    """Return whether the model's layers may skip padding tokens in a training forward of `batch`. True needs attention
    that skips padding, and a mask [B, S] with labels of this shape; False with cp, pp, sequence parallelism, recomputed
    or changed modules, or if hidden states are asked for. Of the batch's tensors only names and shapes are read.
    """
    state = model._slapo.schedule.state
    if model.mesh.size("cp") > 1:
        return False
    mask, labels = batch.get("attention_mask"), batch.get("labels")
    if not (state.unpads and model.training and isinstance(mask, Tensor) and mask.ndim == 2):
        return False
    head = head_of(model.unscheduled_class.__name__)
    if not head.ignores_padding or labels is None or labels.shape != mask.shape:
        return False
    shown = any(batch.get(name) or getattr(model.config, name, False) for name in SHOWS)
    given = any(batch.get(name) is not None for name in GIVEN)
    if shown or given or state.checkpointed or state.forward.tokens_divided or model.mesh.pp > 1:
        return False
    return _runs_as_loaded(model)


def _runs_as_loaded(model: Any) -> bool:
    """Return whether all modules are of torch, transformers, peft or this package, and those that were added since the
    load treat each token alone, e.g. nn.Linear. Hooks, wrappers, attention backends or another library's recomputation,
    if added since the load, make the result False.
    """
    modules = list(model.modules())
    if _has_any_global_hook() or any(map(_is_watched, modules)):
        return False
    loaded = {id(m) for m in model._slapo.schedule.state.modules.values()}
    classes = {type(m) for m in modules[1:]} | {model.unscheduled_class}
    new = {type(m) for m in modules if id(m) not in loaded}
    return all(cls in BY_TOKEN or package_of(cls) == "peft" for cls in new) and all(
        package_of(cls) in (*KNOWN, "peft") and as_written(cls) for cls in classes
    )


def _is_watched(module: Any) -> bool:
    """Return whether `module` needs padding: it is compiled, hooked, changed or has attention that cannot skip it."""
    own = vars(module)
    if own.get("gradient_checkpointing") or module._compiled_call_impl or is_changed(module):
        return True
    if ATTRIBUTE in module._modules:
        return not str(module.config._attn_implementation).startswith(NAME)
    return "is_causal" in own
