"""Loops on weights: frozen, tied, copied, penalised, hooked, adapted; optimizers that read all of them."""

import copy
from typing import Any

import torch
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from loop_families import MASKED, ONE_STACK, PAIRS, TEXT
from loops import CALL_TRAIN_STEP, Trainee, loop

STEPS = 2
TIED = (*MASKED, "gpt2", "opt", *PAIRS)
WITH_OWN_LOSS = (*ONE_STACK, *PAIRS)


def _own(t: Trainee, steps: int = STEPS, **options: Any) -> None:
    for step in range(steps):
        t.own(step, **options)


def _frozen(t: Trainee, module: Any) -> None:
    for p in module.parameters():
        p.requires_grad_(False)
    t.new_optimizer()
    _own(t, 3)


PARTS = {
    "get_encoder": (PAIRS, lambda m: m.get_encoder()), "get_decoder": (PAIRS, lambda m: m.get_decoder()),
    "get_input_embeddings": ((*TEXT, *PAIRS), lambda m: m.get_input_embeddings()),
    "get_output_embeddings": ((*TEXT, *PAIRS), lambda m: m.get_output_embeddings()),
    "lm_head": (("roberta", "gpt2", "opt", "llama", "qwen3", "esm", *PAIRS), lambda m: m.lm_head),
    "base_model": (tuple(f for f in ONE_STACK if f not in ("gpt2", "opt")), lambda m: m.base_model),
}  # fmt: skip
for _name, (_families, _part) in PARTS.items():
    loop(f"freeze {_name}", families=_families)(lambda t, part=_part: _frozen(t, part(t.model)))


@loop("freeze the first layers", families=tuple(f for f in ONE_STACK if f != "albert"))
def lower_layers(t: Trainee) -> None:
    _frozen(t, t.model.get_submodule(t.family.layers)[:2])


@loop("freeze, then train again", families=TIED)
def thawed(t: Trainee) -> None:
    table = t.model.get_input_embeddings()
    table.requires_grad_(False)
    t.new_optimizer()
    _own(t)
    table.requires_grad_(True)
    t.new_optimizer()
    _own(t)


@loop("a hook on the tied weight", families=TIED)
def tied_hook(t: Trainee) -> None:
    t.model.get_input_embeddings().weight.register_hook(lambda g: g / 2)
    _own(t)


@loop("a hook on the head's weight", families=TIED)
def head_hook(t: Trainee) -> None:
    t.model.get_output_embeddings().weight.register_hook(lambda g: g / 2)
    _own(t)


@loop("hooks that scale gradients", families=WITH_OWN_LOSS)
def scaled(t: Trainee) -> None:
    for p in t.model.parameters():
        if p.requires_grad:
            p.register_hook(lambda g: g * 0.3)
    _own(t)


@loop(
    "hooks that clamp gradients",
    families=WITH_OWN_LOSS,
    unlike=("pp2", "dp2", "dp2-shard", "tp2-dp2"),
)
def clamped(t: Trainee) -> None:
    """Clamp gradients by a hook; over dp or pp the all-reduce comes after the hook, as with torch's DDP."""
    for p in t.model.parameters():
        if p.requires_grad:
            p.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
    _own(t)


@loop("a hook that keeps old rows", families=(*TEXT, *PAIRS))
def new_rows(t: Trainee) -> None:
    """Train the rows of new tokens only."""
    weight = t.model.get_input_embeddings().weight
    mask = (torch.arange(99) >= 60).to(t.dtype)[:, None]
    weight.register_hook(lambda g: g * mask)
    _own(t)


def _penalty(t: Trainee, before: list[torch.Tensor]) -> torch.Tensor:
    """Return the L2-SP penalty: half of the squared distance to (nearly) the initial weights."""
    pairs = zip((p for p in t.model.parameters() if p.requires_grad), before, strict=True)
    return 0.05 * sum((p - b).square().sum() for p, b in pairs)


def _began(t: Trainee) -> list[torch.Tensor]:
    return [p.detach() * 0.7 for p in t.model.parameters() if p.requires_grad]


@loop("a penalty by hand", families=ONE_STACK, pp=CALL_TRAIN_STEP)
def penalty_by_hand(t: Trainee) -> None:
    before = _began(t)
    for step in range(STEPS):
        t.optimizer.zero_grad()
        for part in t.parts(step):
            loss = t.model(**part).loss + _penalty(t, before)
            (loss if t.scheduled else loss / t.dp).backward()
        t.optimizer.step()


@loop("a penalty in loss_fn", families=TEXT, pp="a term in the weight")
def penalty_in_loss(t: Trainee) -> None:
    before = _began(t)

    def loss_fn(out: Any, part: dict) -> torch.Tensor:
        log, labels = out.logits.log_softmax(-1), part["labels"]
        each = log.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * (labels != -100)
        return -each.mean() + _penalty(t, before)

    for step in range(STEPS):
        t.by_loss_fn(step, loss_fn)
    t.losses.clear()  # a rank sees the penalty of its own part


@loop("EMA by deepcopy", families=(*ONE_STACK, *PAIRS))
def averaged(t: Trainee) -> None:
    average = copy.deepcopy(t.model).eval().requires_grad_(False)
    for step in range(3):
        t.own(step)
        with torch.no_grad():
            for a, p in zip(average.parameters(), t.model.parameters(), strict=True):
                a.lerp_(p, 0.5)
            _evaluate(t, average, step)


def _evaluate(t: Trainee, model: Any, step: int) -> None:
    for part in t.parts(step + 20):
        out = model(**part)
        t.show("evaluation", out.loss)
        mask = part.get("attention_mask")
        t.show(
            "logits",
            out.logits * mask[..., None]
            if mask is not None and out.logits.shape[:2] == mask.shape
            else out.logits,
        )


@loop("AveragedModel", families=(*ONE_STACK, *PAIRS))
def averaged_model(t: Trainee) -> None:
    average = AveragedModel(t.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for step in range(3):
        t.own(step)
        average.update_parameters(t.model)
        average.module.eval()
        with torch.no_grad():
            _evaluate(t, average.module, step)


@loop("a copy is independent", families=(*ONE_STACK, *PAIRS, "clip"))
def independent(t: Trainee) -> None:
    """Train a deepcopy: the original does not change, and no tensor is shared."""
    other = copy.deepcopy(t.model)
    held = [*t.model.parameters(), *t.model.buffers()]
    mine = {x.data_ptr() for x in held if x.numel()}
    shared = sum(x.data_ptr() in mine for x in [*other.parameters(), *other.buffers()] if x.numel())
    t.show("shared tensors", torch.tensor(float(shared)))
    with torch.no_grad():
        for x in (*other.parameters(), *other.buffers()):
            if x.is_floating_point():
                x.zero_()


@loop("a copy as teacher", families=ONE_STACK)
def taught(t: Trainee) -> None:
    teacher = copy.deepcopy(t.model).eval().requires_grad_(False)
    with torch.no_grad():
        for p in teacher.parameters():
            p.mul_(0.9)

    def loss_fn(out: Any, part: dict) -> torch.Tensor:
        log, want = (x.log_softmax(-1) for x in (out.logits, part["taught"]))
        each = functional.kl_div(log, want, reduction="none", log_target=True).sum(-1)
        mask = part.get("attention_mask")
        return each.mean() if mask is None else ((each * mask).sum(1) / mask.sum(1)).mean()

    def made(part: dict) -> dict:
        inputs = {k: v for k, v in part.items() if k != "labels"}
        with torch.no_grad():
            return {**inputs, "taught": teacher(**inputs).logits}

    for step in range(STEPS):
        t.by_loss_fn(step, loss_fn, made)


WARNED = "LBFGS"


@loop(
    "LBFGS",
    families=("bert", "gpt2", "llama", "vit", "roberta"),
    tp=WARNED,
    pp=WARNED,
    dp_shard=WARNED,
)
def second_order(t: Trainee) -> None:
    wanted = [p for p in t.model.parameters() if p.requires_grad]
    t.optimizer = torch.optim.LBFGS(wanted, lr=0.1, max_iter=2)

    def closure() -> torch.Tensor:
        t.optimizer.zero_grad()
        if t.scheduled:
            return t.model.train_step(t._part(t.padded(0), t.here))
        loss = t.model(**t.padded(0)).loss
        loss.backward()
        return loss

    for _ in range(STEPS):
        t.losses.append(float(t.optimizer.step(closure)))


INTO_GRAD = "autograd.grad"


@loop("autograd.grad into .grad", families=(*TEXT, "vit"), pp=CALL_TRAIN_STEP, dp=INTO_GRAD)
def by_autograd(t: Trainee) -> None:
    """Take gradients by `torch.autograd.grad`, as PCGrad and MAML do."""
    wanted = [p for p in t.model.parameters() if p.requires_grad]
    for step in range(3):
        for part in t.parts(step):
            loss = t.model(**part).loss / (1 if t.scheduled else t.dp)
            grads = torch.autograd.grad(loss, wanted, allow_unused=True)
            for p, g in zip(wanted, grads, strict=True):
                p.grad = g if p.grad is None or g is None else p.grad + g
        t.optimizer.step()
        t.optimizer.zero_grad()


APART = "step"


@loop("a dp rank skips its step", families=(*TEXT, "vit"), pp=CALL_TRAIN_STEP, dp=APART)
def skipped(t: Trainee) -> None:
    """Skip a step on one dp rank, as users do when a loss is not finite."""
    for step in range(3):
        t.optimizer.zero_grad()
        for part in t.parts(step):
            loss = t.model(**part).loss / (1 if t.scheduled else t.dp)
            loss.backward()
        if t.scheduled and t.mesh.dp > 1 and step == 1 and t.here == 1:
            continue
        t.optimizer.step()


@loop("one rank reads logits", families=ONE_STACK, pp=CALL_TRAIN_STEP, tp="did not read the logits")
def read_on_one(t: Trainee) -> None:
    """Read a metric on rank 0 alone."""
    for step in range(STEPS):

        def loss_of(part: dict, _step: int = step) -> torch.Tensor:
            out = t.model(**part)
            if not t.scheduled or t.mesh.rank == 0:
                float(out.logits.detach().float().mean())
            return out.loss

        t.by_hand(step, loss_of)


@loop("one rank reads logits in eval", families=ONE_STACK)
def read_in_eval(t: Trainee) -> None:
    t.model.eval()
    with torch.no_grad():
        for part in t.parts(0):
            out = t.model(**part)
            if not t.scheduled or t.mesh.rank == 0:
                float(out.logits.float().mean())
            t.show("loss", out.loss)


@loop(
    "one rank evaluates",
    families=ONE_STACK,
    tp="did not call the model",
    pp="did not call the model",
    dp_shard="did not call the model",
)
def evaluated_on_one(t: Trainee) -> None:
    """Compute a validation loss on rank 0 alone, between two steps."""
    for step in range(2):
        t.own(step)
        if not t.scheduled or t.mesh.rank == 0:
            t.model.eval()
            with torch.no_grad():
                for part in t.parts(step):
                    float(t.model(**part).loss)
            t.model.train()


@loop("weights of classes", families=("gpt2", "opt", "llama", "qwen3", "modernbert", "vit"))
def weighted_classes(t: Trainee) -> None:
    """Train with a `loss_function` that has its own denominator, over micro-batches."""
    t.model.loss_function = _weighted(t.family.cls)
    _own(t, **({"micro_batches": 2} if t.scheduled else {}))


@loop(
    "weights of classes by hand",
    families=("gpt2", "opt", "llama", "qwen3", "modernbert", "vit"),
    pp=CALL_TRAIN_STEP,
)
def weighted_by_hand(t: Trainee) -> None:
    t.model.loss_function = _weighted(t.family.cls)
    for step in range(STEPS):
        t.by_hand(step, lambda part: t.model(**part).loss)


def _weighted(cls: str) -> Any:
    def loss_function(*args: Any, **given: Any) -> torch.Tensor:
        names = ("labels", "logits") if "Image" in cls else ("logits", "labels")
        both = {**dict(zip(names, args, strict=False)), **given}
        logits, labels = both["logits"], both["labels"]
        if "Causal" in cls or "LMHead" in cls:
            logits, labels = logits[:, :-1], labels[:, 1:]
        weight = torch.linspace(0.2, 3, logits.shape[-1], dtype=logits.dtype)
        flat = logits.reshape(-1, logits.shape[-1])
        return functional.cross_entropy(flat, labels.flatten(), weight=weight)

    return loss_function
