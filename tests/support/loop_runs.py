"""Run of a loop in plain `transformers` and on a mesh, and the comparison of the two."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
import transformers

import loop_table  # noqa: F401 - registers the loops
import loops_beside  # noqa: F401 - registers more
import loops_of_adapters  # noqa: F401
import loops_of_changes  # noqa: F401
import loops_of_dropout  # noqa: F401
import loops_of_modules  # noqa: F401
import loops_of_parts  # noqa: F401
import loops_of_weights  # noqa: F401
from loops import FAMILIES, LOOPS, Trainee
from parity import FLOOR, saved_names, tiny_config


@dataclass
class Trained:
    """Result of a run of a loop.

    Args:
        shown: name@dp rank --> what the loop showed.
        weights: whole, under their HuggingFace names; {} on all ranks but the first; grads alike.
        copies: parameters that this rank shares with others, name --> what ranks share it, and its values.
    """

    losses: list[float]
    weights: dict[str, torch.Tensor]
    shown: dict[str, torch.Tensor] = field(default_factory=dict)
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    copies: dict[str, tuple[tuple, torch.Tensor]] = field(default_factory=dict)


@cache
def plain(name: str, family: str, folder: Any, dtype: torch.dtype, dp: int = 1) -> Trained:
    """Run the loop in plain `transformers`, in one process, on full batches."""
    model = copy.deepcopy(_plain_model(class_of(name, family), folder, dtype))
    with LOOPS[name].around():
        trainee = Trainee(model, FAMILIES[family], dp)
        LOOPS[name].run(trainee)
    named = [(n.replace("_checkpoint_wrapped_module.", ""), p) for n, p in saved_names(model)]
    weights = {n: p.detach().clone() for n, p in named}
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named}
    return Trained(trainee.losses, weights, trainee.shown, grads)


@cache
def _plain_model(cls: str, folder: Any, dtype: torch.dtype) -> Any:
    """Return the plain model of a checkpoint, loaded once and then copied, which takes a tenth of the time."""
    from slapo_zoo.hf.models import freeze_as_made

    model = getattr(transformers, cls).from_pretrained(folder, dtype=dtype, **_changes(cls))
    return freeze_as_made(model).train()


def class_of(name: str, family: str) -> str:
    cls = LOOPS[name].cls
    return FAMILIES[family].cls if cls is None else cls(FAMILIES[family])


def _changes(cls: str) -> dict[str, str]:
    return {"experts_implementation": "eager"} if "Mixtral" in cls else {}


def loaded(name: str, family: str, folder: Any, layout: dict[str, Any]) -> Trainee:
    """Load the scheduled model of a loop and layout on this rank."""
    from slapo_zoo import AutoScheduledModel

    auto_class = class_of(name, family)
    changes = {**layout, **_changes(auto_class)}
    model = AutoScheduledModel.from_pretrained(folder, auto_class=auto_class, **changes)
    return Trainee(model.train(), FAMILIES[family])


def trained(name: str, family: str, folder: Any, layout: dict[str, Any]) -> Trained:
    """Run the loop on this rank of a mesh."""
    trainee = loaded(name, family, folder, layout)
    LOOPS[name].run(trainee)
    model = trainee.model
    if not LOOPS[name].weights:
        return Trained(trainee.losses, {}, trainee.shown)
    weights = model.consolidated_state_dict()
    grads = model.consolidated_state_dict(grads=True)
    return Trained(trainee.losses, weights, trainee.shown, grads, _copies(model, layout))


def scheduled(name: str, family: str, folder: Any, layout: dict[str, Any]) -> Any:
    """Run the loop on this rank of a mesh; return a Trained, or the text of the SlapoError that ended it."""
    from slapo_zoo import SlapoError

    try:
        found = trained(name, family, folder, layout)
    except SlapoError as error:
        return str(error)
    return replace(found, copies={})  # other ranks are other processes


def _copies(model: Any, layout: dict[str, Any]) -> dict[str, tuple[tuple, torch.Tensor]]:
    """Return parameters that several ranks hold, also by a tie over stages, with the coordinates of each shard."""
    mesh, placed = model.mesh, model.schedule.state.placed
    part = mesh.coord("dp") if "dp_shard" in layout else 0
    named = zip(model.named_parameters(), saved_names(model), strict=True)
    return {
        saved: ((mesh.coord("tp") if name in placed else -1, part), p.detach().clone())
        for (name, p), (saved, _) in named
    }


@cache
def folder_of(family: str, root: Any, dropout: float = 0.0, cls: str | None = None) -> Any:
    """Return the folder of a tiny checkpoint of a family."""
    case = replace(FAMILIES[family].case, dropout=dropout, cls=cls or FAMILIES[family].cls)
    config, made = tiny_config(case)
    torch.manual_seed(0)
    model = made(config)
    with torch.no_grad():
        for p in model.parameters():  # biases and norms of 0 and 1 would hide mistakes
            p.add_(torch.randn_like(p) * 0.05)
    folder = root / f"{family}-{case.cls}-{dropout}"
    model.save_pretrained(folder)
    return folder


def folder_for(name: str, family: str, root: Any) -> Any:
    """Return the folder of the checkpoint that a loop starts from."""
    return folder_of(family, root, LOOPS[name].dropout, class_of(name, family))


@cache
def weights_before(cls: str, folder: Any) -> dict[str, torch.Tensor]:
    """Return the weights of the checkpoint, under the names of `Trained.weights`."""
    model = _plain_model(cls, folder, torch.float32)
    return {n: p.detach() for n, p in saved_names(model)}


@dataclass(frozen=True)
class Tolerance:
    """Tolerance of a value against fp64: `times` plain fp32's own error, plus fractions of the largest value.

    Args:
        tensor: of the tensor's own largest value.
        all: of the largest of all tensors of its kind.
        floor: whatever their sizes.
    """

    times: float
    tensor: float = 0.0
    all: float = 0.0
    floor: float = 0.0


STRICT, MEASURED = Tolerance(2, floor=FLOOR), Tolerance(5, 1e-4, 1e-5, 1e-7)


def assert_cell(found: Trained, name: str, family: str, folder: Any) -> None:
    """Fail where losses or weights are more than twice as far from fp64 as plain fp32."""
    truth, own = (plain(name, family, folder, dtype) for dtype in (torch.float64, torch.float32))
    worst = max(abs(a - b) for a, b in zip(own.losses, truth.losses, strict=True))
    for step, (loss, want) in enumerate(zip(found.losses, truth.losses, strict=True)):
        allowed = 2 * worst + FLOOR * abs(want)
        assert abs(loss - want) <= allowed, f"loss {step}: {loss} of {want}, allowed {allowed:.1e}"
    errors = {n: _far(own.weights[n], w) for n, w in truth.weights.items()}
    own_worst = replace(STRICT, floor=2 * max(errors.values()) + FLOOR, times=0)
    for said in _differences(found.weights, truth.weights, own.weights, own_worst):
        raise AssertionError(said)


def first_difference(found: Trained, truth: Trained, own: Trained, before: Any) -> str | None:
    """Return the first difference between a rank's run and plain `transformers`, in words."""
    kinds = [
        (
            "loss",
            *(
                {str(i): torch.tensor(x) for i, x in enumerate(r.losses)}
                for r in (found, truth, own)
            ),
        )
    ]
    kinds += [
        (
            "shown",
            found.shown,
            {k: v for k, v in truth.shown.items() if k in found.shown or _mine(k, found)},
            own.shown,
        )
    ]
    if found.weights:
        moved = (
            {n: w.double() - before[n].double() for n, w in r.weights.items() if n in before}
            for r in (found, truth, own)
        )
        kinds += [("gradient", found.grads, truth.grads, own.grads), ("change of", *moved)]
    for kind, *three in kinds:
        for said in _differences(*three, MEASURED):
            return f"{kind} {said}"
    return None


def _mine(key: str, found: Trained) -> bool:
    """Return True where a value of the plain run belongs to the dp rank of this rank."""
    return key.split("@")[1] in {k.split("@")[1] for k in found.shown}


def _differences(found: dict, truth: dict, own: dict, allow: Tolerance) -> Iterator[str]:
    largest = max((float(x.double().abs().max()) for x in truth.values() if x.numel()), default=0.0)
    for key, want in truth.items():
        if key not in found:
            yield f"{key}: it is not there"
            continue
        if found[key].shape != want.shape:
            yield f"{key}: found {tuple(found[key].shape)}, expected {tuple(want.shape)}"
            continue
        if not want.numel() or (want.isnan().all() and found[key].isnan().all()):
            continue
        error, size = _far(found[key], want), float(want.double().abs().max())
        allowed = allow.times * _far(own[key], want) + allow.tensor * size
        allowed += allow.all * largest + allow.floor
        if not error <= allowed:
            yield f"{key}: error {error:.2e} of {size:.2e}, allowed {allowed:.2e}"


def first_drift(ranks: list[Trained]) -> str | None:
    """Return the first parameter whose replicas differ between ranks, in words."""
    seen: dict[tuple, torch.Tensor] = {}
    for found in ranks:
        for name, (place, p) in found.copies.items():
            kept = seen.setdefault((name, *place), p)
            if kept.shape == p.shape and (far := _far(kept, p.double())) > 1e-6:
                return f"copies of {name} differ by {far:.2e}"
    return None


def _far(found: torch.Tensor, want: torch.Tensor) -> float:
    return float((found.double() - want.double()).abs().max()) if want.numel() else 0.0
