"""Trainee: all that a training loop gets, for a plain and for a scheduled model; the loops are in `loop_table` and `loops_*`."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from loop_families import FAMILIES, TEXT_SIX, Family
from parity import EPS, LEARNING_RATE, batch_of, cast

STEPS, ROWS, TOKENS, VOCAB = 2, 4, 8, 99
LAYOUTS = {
    "tp2": {"tp": 2}, "tp2-sp": {"tp": 2, "sequence_parallel": True}, "pp2": {"pp": 2}, "dp2": {"dp": 2},
    "tp2-pp2": {"tp": 2, "pp": 2}, "tp2-dp2": {"tp": 2, "dp": 2},
    "dp2-shard": {"dp": 2, "dp_shard": 2}, "dp2-shard-zero1": {"dp": 2, "dp_shard": 2, "zero_stage": 1},
}  # fmt: skip
CELL_LAYOUTS = {"one": {}} | {name: LAYOUTS[name] for name in ("tp2", "tp2-sp", "pp2", "dp2", "dp2-shard", "tp2-dp2")}  # fmt: skip
CALL_TRAIN_STEP = "call model.train_step(batch, loss_fn=...)"


@dataclass(frozen=True)
class Loop:
    """Training loop, and the layouts on which it is refused.

    Args:
        run: of a Trainee.
        refused: name of a mesh dim, or of a layout --> words of the message.
        families: names of those it is for.
        dropout: probability in every dropout of the model.
        around: within it the model is loaded and trained, e.g. a class is patched; all ranks share it.
        cls: the class to load, where it is another than the family's.
        unlike: layouts on which it says nothing.
        weights: whether what it leaves in the weights is compared under the checkpoint's names.
    """

    run: Callable[["Trainee"], None]
    refused: tuple[tuple[str, str], ...] = ()
    families: tuple[str, ...] = TEXT_SIX
    dropout: float = 0.0
    around: Callable[[], AbstractContextManager] = nullcontext
    cls: Callable[[Family], str] | None = None
    unlike: tuple[str, ...] = ()
    weights: bool = True

    def words(self, layout: dict[str, Any], name: str = "") -> str | None:
        """Return the text of the expected error on a mesh, or None where the loop has to train."""
        return next((words for dim, words in self.refused if layout.get(dim, 1) > 1 or dim == name), None)  # fmt: skip


LOOPS: dict[str, Loop] = {}
OF_LOOP = ("families", "dropout", "around", "cls", "unlike", "weights")


def loop(name: str, **options: Any) -> Callable[[Any], Any]:
    """Register a loop; `pp="words"`: under pp it is refused with these words."""
    kept = {key: options.pop(key) for key in OF_LOOP if key in options}
    refused = tuple((dim.replace("_sp", "-sp"), words) for dim, words in options.items())

    def register(run: Callable[[Trainee], None]) -> Callable[[Trainee], None]:
        LOOPS[name] = Loop(run, refused, **kept)
        return run

    return register


@dataclass
class Trainee:
    """Model, plain or scheduled, with its optimizer and recorded values.

    Args:
        dp: of the mesh; a plain model takes the mean over the parts of a batch, as dp ranks do.
        shown: what is compared beside losses and weights: name@dp rank --> values.
    """

    model: Any
    family: Family
    dp: int = 1
    losses: list[float] = field(default_factory=list)
    shown: dict[str, torch.Tensor] = field(default_factory=dict)
    optimizer: Any = None

    def __post_init__(self) -> None:
        self.mesh = getattr(self.model, "mesh", None)
        self.dtype = next(self.model.parameters()).dtype
        self.here = self.mesh.coord("dp") if self.scheduled else 0  # whose part it is
        self.new_optimizer()

    def new_optimizer(self) -> None:
        """Make AdamW over the trainable parameters; a stage without any passes all, since torch refuses an empty list."""
        every = list(self.model.parameters())
        wanted = [p for p in every if p.requires_grad] or every
        self.optimizer = torch.optim.AdamW(wanted, lr=LEARNING_RATE, eps=EPS, weight_decay=0.1)

    @property
    def scheduled(self) -> bool:
        """Return True where the model is of AutoScheduledModel."""
        return self.mesh is not None

    def batch(
        self, step: int, labels: bool = False, whole: bool = False
    ) -> dict[str, torch.Tensor]:
        """Return this rank's rows of a batch without padding (a plain model: all); every row has as many targets."""
        g = torch.Generator().manual_seed(100 + step)
        ids = torch.randint(3, VOCAB, (ROWS, TOKENS), generator=g)
        made = {"input_ids": ids}
        if self.family.cls.startswith("T5"):
            made["decoder_input_ids"] = ids.flip(1)
        if labels:
            made["labels"] = ids.roll(1, 1)
        return made if whole or not self.scheduled else self._part(made, self.here)

    def _part(self, batch: dict[str, Any], d: int) -> dict[str, Any]:
        rows = ROWS // (self.mesh.dp if self.scheduled else self.dp)
        cut = slice(d * rows, (d + 1) * rows)
        return {k: v[cut] if torch.is_tensor(v) else v for k, v in batch.items()}

    def padded(self, step: int, tokens: int | None = None) -> dict[str, torch.Tensor]:
        """Return all rows of a batch: padded text with ignored labels, or images."""
        batch = cast(batch_of(self.family.case, step), self.dtype)
        text = {k for k, v in batch.items() if torch.is_tensor(v) and v.shape[1:] == (12,)}
        short = text if tokens else ()
        return {k: v[:, :tokens] if k in short else v for k, v in batch.items()}

    def parts(self, step: int, tokens: int | None = None) -> Iterator[dict[str, torch.Tensor]]:
        """Return the slices of the padded batch that this process trains on: a rank its own, a plain model all."""
        whole = self.padded(step, tokens)
        for d in [self.here] if self.scheduled else range(self.dp):
            self.here = d
            yield self._part(whole, d)

    def show(self, name: str, x: torch.Tensor) -> None:
        """Record values of the current slice, which are compared between the runs."""
        ends = f"@{self.here}"
        count = sum(key.startswith(f"{name}#") and key.endswith(ends) for key in self.shown)
        whole = x.full_tensor() if hasattr(x, "full_tensor") else x
        self.shown[f"{name}#{count}{ends}"] = whole.detach().clone()

    def by_hand(self, step: int, loss_of: Callable[[dict], torch.Tensor], tokens=None) -> None:
        """Take one optimizer step by a hand-written loop; the gradient is the mean over the slices of the batch."""
        self.optimizer.zero_grad()
        for part in self.parts(step, tokens):
            loss = loss_of(part)
            (loss if self.scheduled else loss / self.dp).backward()
            self.show("loss", loss)
        self.optimizer.step()

    def by_loss_fn(
        self, step: int, loss_fn: Callable[[Any, dict], torch.Tensor], made=dict, **options: Any
    ) -> None:
        """Take the same step by `train_step` with the loop's loss function; `made` turns a slice into its batch."""
        self.optimizer.zero_grad()
        losses = []
        for part in self.parts(step):
            batch = made(part)
            if self.scheduled:
                losses.append(self.model.train_step(batch, loss_fn=loss_fn, **options))
                continue
            takes = inspect.signature(self.model.forward).parameters
            output = self.model(**{k: v for k, v in batch.items() if k in takes})
            losses.append(loss_fn(output, batch) / self.dp)
            losses[-1].backward()
        self.losses.append(float(sum(x.detach() for x in losses)))
        self.optimizer.step()

    def own(self, step: int, **options: Any) -> None:
        """Take one step on the model's own loss by `train_step`: the mean over all rows."""
        self.optimizer.zero_grad()
        if self.scheduled:
            loss = self.model.train_step(self._part(self.padded(step), self.here), **options)
        else:
            loss = self.model(**self.padded(step)).loss
            loss.backward()
        self.losses.append(float(loss.detach()))
        self.optimizer.step()

    @property
    def backbone(self) -> Any:
        """Return the model without its head; of two towers, or of encoder and decoder, one."""
        return self.model.get_submodule(self.family.backbone)

    def hidden(self, batch: dict[str, torch.Tensor], backbone: Any = None) -> torch.Tensor:
        """Return the last hidden states of a call of the backbone alone."""
        wanted = ("input_ids", "attention_mask", "pixel_values")
        inputs = {k: v for k, v in batch.items() if k in wanted}
        return (self.backbone if backbone is None else backbone)(**inputs).last_hidden_state

    def pooled(self, hidden: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean of the hidden states over real tokens."""
        mask = batch.get("attention_mask")
        if mask is None or mask.shape != hidden.shape[:2]:
            return hidden.mean(1)
        weight = mask[..., None].to(hidden.dtype)
        return (hidden * weight).sum(1) / weight.sum(1)

    def read(self, hidden: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return a loss on hidden states in which each row has its own target."""
        pooled = self.pooled(hidden, batch)
        self.show("pooled", pooled)
        target = torch.sin(torch.arange(pooled.numel(), dtype=pooled.dtype)).view_as(pooled)
        return (pooled - target).square().mean()

    def note(self, loss: torch.Tensor) -> None:
        """Record the mean over dp of a loss of this rank's rows."""
        total = loss.detach().double().clone()
        if self.scheduled and self.mesh.dp > 1:
            torch.distributed.all_reduce(total, group=self.mesh.group("dp"))
            total /= self.mesh.dp
        self.losses.append(float(total))

    def no_sync(self) -> Any:
        """Return the model's `no_sync` context, or an empty one where it has none."""
        return self.model.no_sync() if self.scheduled else nullcontext()

    def in_pairs(self) -> dict[str, int]:
        """Return options of a step whose micro-batches hold an even number of rows."""
        return {"micro_batches": ROWS // self.mesh.dp // 2} if self.scheduled else {}

    def train_step(self, batch: dict[str, Any], loss_fn: Any, **options: Any) -> torch.Tensor:
        """Call the model's `train_step`, or its equivalent for a plain model."""
        if self.scheduled:
            return self.model.train_step(batch, loss_fn=loss_fn, **options)
        of_model = {k: v for k, v in batch.items() if k.endswith(("input_ids", "labels"))}
        loss = loss_fn(self.model(**of_model), batch)
        loss.backward()
        return loss.detach()


__all__ = ["CALL_TRAIN_STEP", "CELL_LAYOUTS", "FAMILIES", "LAYOUTS", "LOOPS", "STEPS", "Loop", "Trainee", "loop"]  # fmt: skip
