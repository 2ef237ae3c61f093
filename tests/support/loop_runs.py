"""A loop of `loop_table` in plain `transformers` and on a mesh, and the comparison of the two."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers

import loop_table  # noqa: F401 - registers the loops
import loops_beside  # noqa: F401 - registers more
from loops import FAMILIES, LOOPS, Trainee
from parity import FLOOR, Case, tiny_config


@dataclass
class Trained:
    """What a run of a loop left."""

    losses: list[float]
    weights: dict[str, torch.Tensor]


@cache
def plain(name: str, family: str, folder: Any, dtype: torch.dtype) -> Trained:
    """The same loop in plain `transformers`, in one process, on whole batches."""
    case = FAMILIES[family]
    model = (
        getattr(transformers, case.cls)
        .from_pretrained(folder, dtype=dtype, **_changes(case))
        .train()
    )
    trainee = Trainee(model, case)
    LOOPS[name].run(trainee)
    return Trained(trainee.losses, trainee.weights())


def _changes(case: Case) -> dict[str, str]:
    return {"experts_implementation": "eager"} if "Mixtral" in case.cls else {}


def scheduled(name: str, family: str, folder: Any, layout: dict[str, Any]) -> Any:
    """The loop on this rank of a mesh: a Trained, or the words of the SlapoError that ended it."""
    from slapo_zoo import AutoScheduledModel, SlapoError

    case = FAMILIES[family]
    model = AutoScheduledModel.from_pretrained(folder, **layout, **_changes(case)).train()
    trainee = Trainee(model, case)
    try:
        LOOPS[name].run(trainee)
    except SlapoError as error:
        return str(error)
    return Trained(trainee.losses, trainee.weights())


@cache
def folder_of(family: str, root: Any) -> Any:
    """A tiny checkpoint of a family."""
    config, cls = tiny_config(FAMILIES[family])
    torch.manual_seed(0)
    model = cls(config)
    with torch.no_grad():
        for p in model.parameters():  # biases and norms of 0 and 1 would hide mistakes
            p.add_(torch.randn_like(p) * 0.05)
    model.save_pretrained(root / family)
    return root / family


def assert_cell(found: Trained, name: str, family: str, folder: Any) -> None:
    """Losses and weights at most twice as far from the fp64 truth as plain fp32 is."""
    truth, own = (plain(name, family, folder, dtype) for dtype in (torch.float64, torch.float32))
    worst = max(abs(a - b) for a, b in zip(own.losses, truth.losses, strict=True))
    for step, (loss, want) in enumerate(zip(found.losses, truth.losses, strict=True)):
        allowed = 2 * worst + FLOOR * abs(want)
        assert abs(loss - want) <= allowed, f"loss {step}: {loss} of {want}, allowed {allowed:.1e}"
    assert truth.weights.keys() <= found.weights.keys()
    errors = {n: _far(own.weights[n], w) for n, w in truth.weights.items()}
    allowed = 2 * max(errors.values()) + FLOOR
    for key, want in truth.weights.items():
        error = _far(found.weights[key], want)
        assert error <= allowed, f"{key}: error {error:.2e}, allowed {allowed:.2e}"


def _far(found: torch.Tensor, want: torch.Tensor) -> float:
    return float((found.double() - want).abs().max())
