"""Loops that draw: two views, samples, recomputation. What is shown is what a plain model does alike: that
two calls differ, that a repetition does not, that two ways to one gradient agree.
"""

import functools
from collections.abc import Callable

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from loop_families import DROPPING
from loops import CALL_TRAIN_STEP, Trainee, loop
from loops_of_changes import recomputed
from loops_of_parts import PART

DROP = {"families": DROPPING, "dropout": 0.3, "weights": False}
ENCODERS = tuple(f for f in DROPPING if f not in ("t5", "bart"))


def _differ(t: Trainee, name: str, a: torch.Tensor, b: torch.Tensor) -> None:
    t.show(f"{name} differ", ((a - b).abs().max() > 1e-4).float())


def _same(t: Trainee, name: str, a: torch.Tensor, b: torch.Tensor) -> None:
    far = (a - b).norm() / b.norm()
    t.show(f"{name} are the same", (far < 1e-3).float())


def _view(t: Trainee, part: dict) -> torch.Tensor:
    return t.pooled(t.hidden(part), part)


@loop("SimCSE", **PART, **DROP)
def two_views(t: Trainee) -> None:
    """Call the backbone twice on the same rows, as SimCSE does: the second result is the positive of the first."""
    for step in range(2):
        t.optimizer.zero_grad()
        for part in t.parts(step):
            a, b = (functional.normalize(_view(t, part), dim=-1) for _ in range(2))
            _differ(t, "views", a, b)
            functional.cross_entropy(a @ b.T / 0.05, torch.arange(len(a))).backward()
        t.optimizer.step()


@loop("views of unlike rows", **PART, **DROP)
def rows_differ(t: Trainee) -> None:
    """Check that equal rows of one batch have different dropout masks."""
    for part in t.parts(0):
        rows = {k: v[:1].expand(2, *v.shape[1:]) for k, v in part.items() if torch.is_tensor(v)}
        a, b = _view(t, rows)
        _differ(t, "rows", a, b)


@loop("MC dropout", **PART, **DROP)
def samples(t: Trainee) -> None:
    """Evaluate with the dropout modules in training mode."""
    t.model.eval()
    for m in t.model.modules():
        if "Dropout" in type(m).__name__:
            m.train()
    with torch.no_grad():
        for part in t.parts(0):
            a, b, c = (_view(t, part) for _ in range(3))
            _differ(t, "samples", a, b)
            _differ(t, "samples", b, c)


@loop(
    "R-Drop",
    families=ENCODERS,
    dropout=0.3,
    weights=False,
    pp=CALL_TRAIN_STEP,
)
def twice_whole(t: Trainee) -> None:
    for step in range(2):
        t.optimizer.zero_grad()
        for part in t.parts(step):
            a, b = t.model(**part), t.model(**part)
            _differ(t, "logits", a.logits, b.logits)
            loss = (a.loss + b.loss) / 2 + (a.logits - b.logits).square().mean()
            loss.backward()
        t.optimizer.step()


@loop("evaluation does not draw", families=ENCODERS, dropout=0.3, weights=False, **PART)
def without_draws(t: Trainee) -> None:
    t.model.eval()
    with torch.no_grad():
        for part in t.parts(0):
            for _ in range(2):
                t.show("pooled", _view(t, part))


def _gradient(t: Trainee, loss_of: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return all gradients of one backward as one vector."""
    for p in t.model.parameters():
        p.grad = None
    loss_of().backward()
    return torch.cat([p.grad.flatten() for p in t.model.parameters() if p.grad is not None])


def _twice(t: Trainee, name: str, one: Callable, other: Callable) -> None:
    """Compare two ways to compute a gradient, from the same state of torch's generator."""
    t.model.config.use_cache = False
    for part in t.parts(0):
        found = []
        for way in (one, other):
            torch.manual_seed(11)
            found.append(_gradient(t, functools.partial(way, part)))
        _same(t, name, *found)
        t.show("it draws", (found[0].abs().max() > 0).float())
    t.model.zero_grad()


def _loss(t: Trainee, hidden: torch.Tensor, part: dict) -> torch.Tensor:
    pooled = t.pooled(hidden, part)
    return (pooled - torch.sin(torch.arange(pooled.numel()).view_as(pooled))).square().mean()


@loop("manual_seed", **PART, **DROP)
def seeded(t: Trainee) -> None:
    def way(part: dict) -> torch.Tensor:
        return _loss(t, t.hidden(part), part)

    _twice(t, "runs of one seed", way, way)


@loop("fork_rng", **PART, **DROP)
def forked(t: Trainee) -> None:
    """Draw dropout inside `fork_rng`, which leaves the state after it unchanged."""
    for part in t.parts(0):
        torch.manual_seed(5)
        with torch.random.fork_rng():
            a = _view(t, part)
        _same(t, "forks", a.detach(), _view(t, part).detach())


def _checkpointed(t: Trainee, reentrant: bool) -> None:
    def direct(part: dict) -> torch.Tensor:
        return _loss(t, t.hidden(part), part)

    def again(part: dict) -> torch.Tensor:
        asks = torch.ones((), requires_grad=True)  # a reentrant one needs an input that asks

        def run(asked: torch.Tensor) -> torch.Tensor:
            return t.hidden(part) * asked

        return _loss(t, checkpoint(run, asks, use_reentrant=reentrant), part)

    _twice(t, "gradients", direct, again)


@loop("checkpoint around the backbone", **PART, **DROP)
def checkpointed(t: Trainee) -> None:
    _checkpointed(t, False)


@loop("reentrant checkpoint around the backbone", **PART, **DROP)
def checkpointed_reentrant(t: Trainee) -> None:
    _checkpointed(t, True)


@loop(
    "checkpoint around the model",
    families=ENCODERS,
    dropout=0.3,
    weights=False,
    pp=CALL_TRAIN_STEP,
)
def whole_checkpointed(t: Trainee) -> None:
    def direct(part: dict) -> torch.Tensor:
        return t.model(**part).logits.square().mean()

    def again(part: dict) -> torch.Tensor:
        return checkpoint(lambda: t.model(**part).logits, use_reentrant=False).square().mean()

    _twice(t, "gradients", direct, again)


def _layers_checkpointed(t: Trainee, reentrant: bool) -> None:
    """Recompute each block by a patched forward, as recipes do."""

    def run(part: dict) -> torch.Tensor:
        return _loss(t, t.hidden(part), part)

    def patched(part: dict) -> torch.Tensor:
        for layer in t.model.get_submodule(t.family.layers):
            layer.forward = recomputed(layer.forward, reentrant)
        return run(part)

    _twice(t, "gradients", run, patched)


@loop("checkpoint around each block", **PART, **DROP)
def blocks_checkpointed(t: Trainee) -> None:
    _layers_checkpointed(t, False)


@loop(
    "reentrant checkpoint around each block",
    families=("bert", "roberta", "electra", "distilbert", "vit", "gpt2"),
    dropout=0.3,
    weights=False,
    **PART,
)
def blocks_checkpointed_reentrant(t: Trainee) -> None:
    _layers_checkpointed(t, True)


@loop("checkpoint_wrapper and dropout", families=ENCODERS, dropout=0.3, weights=False, **PART)
def blocks_wrapped(t: Trainee) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def run(part: dict) -> torch.Tensor:
        return _loss(t, t.hidden(part), part)

    def wrapped(part: dict) -> torch.Tensor:
        layers = t.model.get_submodule(t.family.layers)
        for i, layer in enumerate(layers):
            layers[i] = checkpoint_wrapper(layer)
        return run(part)

    _twice(t, "gradients", run, wrapped)


@loop(
    "HF's switch and dropout",
    families=tuple(f for f in ENCODERS if f != "albert"),
    dropout=0.3,
    weights=False,
    **PART,
)
def switched(t: Trainee) -> None:
    def run(part: dict) -> torch.Tensor:
        return _loss(t, t.hidden(part), part)

    def recomputed(part: dict) -> torch.Tensor:
        t.model.gradient_checkpointing_enable({"use_reentrant": False})
        return run(part)

    _twice(t, "gradients", run, recomputed)


@loop("GradCache", **PART, **DROP)
def cached(t: Trainee) -> None:
    """Train as GradCache does: representations without a graph, their gradient, and a forward with the same dropout."""

    def contrast(a: torch.Tensor) -> torch.Tensor:
        b = functional.normalize(a, dim=-1)
        return functional.cross_entropy(b @ b.detach().roll(1, 0).T * 5, torch.arange(len(b)))

    def direct(part: dict) -> torch.Tensor:
        return contrast(torch.cat([_view(t, x) for x in _halves(part)]))

    def by_cache(part: dict) -> torch.Tensor:
        states, held = [], []
        with torch.no_grad():
            for x in _halves(part):
                states.append(torch.get_rng_state())
                held.append(_view(t, x))
        leaf = torch.cat(held).requires_grad_()
        contrast(leaf).backward()
        parts = zip(_halves(part), states, leaf.grad.split([len(h) for h in held]), strict=True)
        total = torch.zeros((), dtype=t.dtype)
        for x, state, grad in parts:
            with torch.random.fork_rng():
                torch.set_rng_state(state)
                total = total + (_view(t, x) * grad).sum()
        return total

    _twice(t, "gradients", direct, by_cache)


def _halves(part: dict) -> list[dict]:
    rows = len(next(iter(part.values())))
    sides = (slice(0, rows // 2), slice(rows // 2, rows))
    return [{k: v[side] for k, v in part.items() if torch.is_tensor(v)} for side in sides]
