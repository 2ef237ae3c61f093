"""Training loops as users write them, run on a plain model and on a scheduled one.

A loop is a function of a `Trainee` under `@loop(name)`; it trains STEPS steps and notes its losses.
`tp="words"`, `pp=` or `dp=` name the meshes on which it must end with these words instead.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch.nn import functional

from loops import CALL_TRAIN_STEP, STEPS, VOCAB, Trainee, loop
from parity import EPS, LEARNING_RATE


def _log_probabilities(logits, ids):
    return -logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).mean()


def _distillation(logits, ids):
    teacher = torch.sin(torch.arange(VOCAB, dtype=logits.dtype) + ids[..., None])
    return functional.kl_div(
        logits.float().log_softmax(-1), teacher.float().softmax(-1), reduction="batchmean"
    )


def _per_token(logits, ids):
    each = functional.cross_entropy(logits.reshape(-1, VOCAB), ids.reshape(-1), reduction="none")
    return (each.view(ids.shape) * torch.linspace(0, 1, ids.shape[1], dtype=each.dtype)).mean()


def _weighted_classes(logits, ids):
    weight = torch.linspace(1, 2, VOCAB, dtype=logits.dtype)
    each = functional.cross_entropy(logits.transpose(1, 2), ids, weight, reduction="none")
    return each.mean()


def _z_loss(logits, ids):
    stock = functional.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), ids[:, 1:].reshape(-1))
    return stock + 1e-2 * logits.logsumexp(-1).square().mean()


def _in_place(logits, ids):
    logits = logits * 1.0 if logits.is_leaf else logits
    logits.div_(1.5)
    return functional.cross_entropy(logits.view(-1, VOCAB), ids.view(-1))


OWN_LOSSES = {
    "log-probabilities": _log_probabilities, "distillation": _distillation, "per-token": _per_token,
    "weighted": _weighted_classes, "z-loss": _z_loss, "in-place": _in_place,
}  # fmt: skip


def _by_hand(loss_of):
    def run(t: Trainee) -> None:
        for step in range(STEPS):
            t.optimizer.zero_grad()
            batch = t.batch(step)
            loss = loss_of(t.model(**batch).logits, batch["input_ids"])
            loss.backward()
            t.note(loss)
            t.optimizer.step()

    return run


def _by_train_step(loss_of):
    def run(t: Trainee) -> None:
        for step in range(STEPS):
            t.optimizer.zero_grad()
            loss = t.train_step(t.batch(step), lambda out, b: loss_of(out.logits, b["input_ids"]))
            t.losses.append(float(loss))
            t.optimizer.step()

    return run


for _name, _loss in OWN_LOSSES.items():
    loop(f"hand {_name}", pp=CALL_TRAIN_STEP)(_by_hand(_loss))
    loop(f"loss_fn {_name}")(_by_train_step(_loss))


@loop("hand own", pp=CALL_TRAIN_STEP)
def the_models_own_loss(t: Trainee) -> None:
    for step in range(STEPS):
        t.optimizer.zero_grad()
        loss = t.model(**t.batch(step, labels=True)).loss
        loss.backward()
        t.note(loss)
        t.optimizer.step()


def _accumulated(t: Trainee, quiet: Any) -> None:
    for step in range(STEPS):
        t.optimizer.zero_grad(set_to_none=step == 0)
        for part in range(3):
            with quiet(t) if part < 2 else nullcontext():
                loss = t.model(**t.batch(step * 3 + part, labels=True)).loss / 3
                loss.backward()
        t.note(loss)
        t.optimizer.step()


@loop("accumulation", pp=CALL_TRAIN_STEP)
def accumulation(t: Trainee) -> None:
    _accumulated(t, lambda t: nullcontext())


@loop("accumulation no_sync", pp=CALL_TRAIN_STEP)
def accumulation_without_sums(t: Trainee) -> None:
    _accumulated(t, lambda t: t.no_sync())


@loop("autocast bf16", pp=CALL_TRAIN_STEP)
def autocast(t: Trainee) -> None:
    for step in range(STEPS):
        t.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=t.dtype == torch.float32):
            loss = t.model(**t.batch(step, labels=True)).loss
        loss.backward()
        t.note(loss)
        t.optimizer.step()


@loop("optimizer in hooks", pp="before the gradient is complete")
def optimizer_in_hooks(t: Trainee) -> None:
    optimizers = {
        p: torch.optim.AdamW([p], lr=LEARNING_RATE, eps=EPS) for p in t.model.parameters()
    }

    def step_at_once(p: torch.Tensor) -> None:
        optimizers[p].step()
        p.grad = None

    for p in optimizers:
        p.register_post_accumulate_grad_hook(step_at_once)
    for step in range(STEPS):
        if t.scheduled and t.mesh.pp > 1:
            loss = t.model.train_step(t.batch(step, labels=True))
        else:
            loss = t.model(**t.batch(step, labels=True)).loss
            loss.backward()
        t.note(loss)


@loop("evaluation between")
def evaluation_between(t: Trainee) -> None:
    for step in range(STEPS):
        t.model.eval()
        with torch.inference_mode():
            t.model(**t.batch(50 + step, labels=True))
        t.model.train()
        _one(t, step)


@loop("freezing")
def freezing(t: Trainee) -> None:
    for name, p in t.model.named_parameters():
        if any(
            word in name for word in ("wte", "shared", "word_embeddings", "embed_tokens", ".0.")
        ):
            p.requires_grad_(False)
    t.new_optimizer()
    for step in range(STEPS):
        _one(t, step)


@loop("clip_grad_norm_ of the model")
def clipping(t: Trainee) -> None:
    for step in range(STEPS):
        t.optimizer.zero_grad()
        loss = t.train_step(t.batch(step), _stock_loss)
        if t.scheduled:
            t.model.clip_grad_norm_(0.01)
        else:
            torch.nn.utils.clip_grad_norm_(t.model.parameters(), 0.01)
        t.losses.append(float(loss))
        t.optimizer.step()


OWN_PART = "call model.clip_grad_norm_(max_norm) instead of torch.nn.utils.clip_grad_norm_"


@loop("clip_grad_norm_ of torch", tp=OWN_PART, pp=OWN_PART, dp_shard=OWN_PART)
def clipping_by_torch(t: Trainee) -> None:
    for step in range(STEPS):
        t.optimizer.zero_grad()
        loss = t.train_step(t.batch(step), _stock_loss)
        torch.nn.utils.clip_grad_norm_(t.model.parameters(), 0.01)
        t.losses.append(float(loss))
        t.optimizer.step()


@loop("clip_grad_value_")
def clipping_of_values(t: Trainee) -> None:
    for step in range(STEPS):
        t.optimizer.zero_grad()
        loss = t.train_step(t.batch(step), _stock_loss)
        torch.nn.utils.clip_grad_value_(t.model.parameters(), 1e-3)
        t.losses.append(float(loss))
        t.optimizer.step()


@loop("GradScaler with an overflow")
def overflow(t: Trainee) -> None:
    from slapo_zoo import GradScaler

    options = {"init_scale": 256.0}
    theirs = torch.amp.GradScaler("cpu", **options)
    scaler = GradScaler(t.model, **options) if t.scheduled else theirs
    for step in range(STEPS):
        last = not t.scheduled or t.mesh.rank == t.mesh.world_size - 1
        _one_scaled(t, step, scaler, overflows=step == 0 and last)


TAKE_OURS = "use slapo_zoo.GradScaler(model)"


@loop("GradScaler of torch", tp=TAKE_OURS, pp=TAKE_OURS, dp_shard=TAKE_OURS)
def overflow_in_one_rank(t: Trainee) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(STEPS):
        _one_scaled(t, step, scaler)


def _one_scaled(t: Trainee, step: int, scaler: Any, overflows: bool = False) -> None:
    t.optimizer.zero_grad()
    if t.scheduled:
        loss = t.model.train_step(t.batch(step), loss_fn=_stock_loss, scaler=scaler)
    else:
        loss = _stock_loss(t.model(**t.batch(step)), t.batch(step))
        scaler.scale(loss).backward()
    if overflows:  # in one element that one rank holds
        next(p for p in t.model.parameters() if p.grad is not None).grad.view(-1)[0] = torch.inf
    t.losses.append(float(loss.detach()))
    scaler.step(t.optimizer)
    scaler.update()


@loop("gradient checkpointing", pp=CALL_TRAIN_STEP)
def recomputing(t: Trainee) -> None:
    t.model.gradient_checkpointing_enable()
    the_models_own_loss(t)


def _stock_loss(out: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    ids = batch["input_ids"]
    return functional.cross_entropy(out.logits.view(-1, VOCAB), ids.reshape(-1))


def _one(t: Trainee, step: int) -> None:
    t.optimizer.zero_grad()
    t.losses.append(float(t.train_step(t.batch(step), _stock_loss)))
    t.optimizer.step()
