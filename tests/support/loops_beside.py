"""Loops with something beside the model: an average of its weights, a frozen copy, a Trainer."""

import copy
import tempfile
import warnings
from typing import Any

import torch
import transformers
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from loops import CALL_TRAIN_STEP, STEPS, Trainee, loop
from parity import EPS, LEARNING_RATE


@loop("EMA")
def averaged(t: Trainee) -> None:
    """Average the weights during training; record the loss of the averaged weights."""
    average = AveragedModel(t.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for step in range(STEPS):
        t.optimizer.zero_grad()
        loss = t.train_step(t.batch(step), _token_loss)
        t.optimizer.step()
        average.update_parameters(t.model)
        t.losses.append(float(loss))
        average.module.eval()
        with torch.no_grad():
            t.note(average.module(**t.batch(step, labels=True)).loss)


def _token_loss(out: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(out.logits.flatten(0, 1), batch["input_ids"].flatten())


def _of_rows(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each row, in pairs of a chosen and a rejected one."""
    each = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    return each.sum(-1).view(-1, 2)


def _preference(logits: torch.Tensor, before: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    now, then = (_of_rows(x, ids) for x in (logits, before))
    margin = (now - then)[:, 0] - (now - then)[:, 1]
    return -functional.logsigmoid(0.1 * margin).mean()


def _frozen(t: Trainee) -> Any:
    reference = copy.deepcopy(t.model).eval().requires_grad_(False)
    with torch.no_grad():  # so that the first margins are not 0
        for p in reference.parameters():
            p.mul_(0.9)
    return reference


@loop("DPO by hand", pp=CALL_TRAIN_STEP)
def preferences(t: Trainee) -> None:
    reference = _frozen(t)
    for step in range(STEPS):
        t.optimizer.zero_grad()
        batch = t.batch(step)
        with torch.no_grad():
            before = reference(**batch).logits
        loss = _preference(t.model(**batch).logits, before, batch["input_ids"])
        loss.backward()
        t.note(loss)
        t.optimizer.step()


def _given(out: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return _preference(out.logits, batch["before"], batch["input_ids"])


@loop("DPO by train_step")
def preferences_by_train_step(t: Trainee) -> None:
    reference = _frozen(t)
    for step in range(STEPS):
        t.optimizer.zero_grad()
        with torch.no_grad():
            before = reference(**t.batch(step)).logits

        batch = {**t.batch(step), "before": before}  # divided into micro-batches with the rest
        t.losses.append(float(t.train_step(batch, _given, **t.in_pairs())))
        t.optimizer.step()


class _Thrice:
    """Mixin of a Trainer whose `compute_loss` is three times a token loss, as users override it."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        output = model(**inputs)
        loss = 3 * _token_loss(output, inputs)
        return (loss, output) if return_outputs else loss


@loop("Trainer with compute_loss", pp="pp=1")
def overridden(t: Trainee) -> None:
    from accelerate.state import AcceleratorState

    from slapo_zoo import ScheduledTrainer

    AcceleratorState._reset_state(True)  # state of an earlier run of this process
    base = ScheduledTrainer if t.scheduled else transformers.Trainer
    batches = [t.batch(step, whole=True) for step in range(STEPS)]
    rows = [{k: v[i] for k, v in b.items()} for b in batches for i in range(len(b["input_ids"]))]
    with tempfile.TemporaryDirectory() as out, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = transformers.TrainingArguments(
            output_dir=out, use_cpu=True, max_steps=STEPS, learning_rate=LEARNING_RATE, adam_epsilon=EPS,
            weight_decay=0.1, max_grad_norm=0.0, logging_steps=1, report_to=[], save_strategy="no",
            disable_tqdm=True, lr_scheduler_type="constant", dataloader_pin_memory=False,
            per_device_train_batch_size=len(t.batch(0)["input_ids"]),
        )  # fmt: skip
        cls = type("Mine", (_Thrice, base), {"_get_train_sampler": _in_order})
        trainer = cls(model=t.model, args=args, train_dataset=rows)
        trainer.train()
    t.losses += [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _in_order(self: Any, dataset: Any = None) -> Any:
    return torch.utils.data.SequentialSampler(dataset or self.train_dataset)
