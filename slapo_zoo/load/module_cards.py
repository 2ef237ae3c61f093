"""Schedule cards for your own modules: publish_card writes one, apply_card schedules another instance by it."""

import copy
import functools
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slapo_zoo.cards.publish import card_of_module, publish
from slapo_zoo.cards.resolve_card import module_steps
from slapo_zoo.language.schedule import Schedule
from slapo_zoo.load.build import create_schedule
from slapo_zoo.parallel.mesh import Mesh


def publish_card(sch: Schedule, place: str | Path, **options: Any) -> str:
    """Publish the schedule of your own module as a card; a collective call of all ranks.

    The card contains the directives and a digest of the module's tree and shapes, and no weights. For a
    model of the loader there is `model.push_schedule_to_hub`.

    Args:
        sch: schedule of `create_schedule`, with its directives applied.
        place: a folder (a `Path`, a text that begins with `.`, `/` or `~`, or an existing one), or
            org/name on the Hub, created if it does not exist.
        **options: token, private, tag, message, parent of a repository; a folder takes none.

    Returns:
        the argument for `apply_card`: the folder, or `org/name@sha`.

    Raises:
        CardError: a directive holds a live object or a primitive that cards do not allow.
    """
    return publish(sch.mesh, functools.partial(card_of_module, sch), place, **options)


def apply_card(
    module: nn.Module, card: str | Path, mesh: Mesh | None = None, seed: int = 0
) -> Schedule:
    """Schedule a module by a card of `publish_card`; a collective call of all ranks.

    No code of the card is executed. Its class and digest are compared with the module, and its
    directives are tried on a copy on meta, before the module is changed.

    Args:
        module: an instance of the class that the card was made for, of the same shapes.
        card: a folder, or `org/name@sha`.
        mesh: sizes of tp, pp and dp; None shards over all processes (tp).
        seed: seed of the random streams.

    Returns:
        the schedule; `slapo_zoo.build(sch)` returns the runnable model.

    Raises:
        CardError: the card is malformed, or for another class, other shapes or another mesh.
        ScheduleError: a directive does not fit this mesh, such as 3 ranks for an axis of 8.
    """
    sch = create_schedule(module, mesh=mesh, seed=seed)
    steps = module_steps(str(card), module, sch.mesh)
    Schedule(_without_memory(module), sch.mesh, seed).replay(steps)
    return sch.replay(steps)


def _without_memory(module: nn.Module) -> nn.Module:
    """Return a copy of a module with its parameters and buffers on meta."""
    tensors = [*module.parameters(), *module.buffers()]
    empty = {
        id(t): nn.Parameter(torch.empty_like(t, device="meta"), t.requires_grad)
        if isinstance(t, nn.Parameter)
        else torch.empty_like(t, device="meta")
        for t in tensors
    }
    return copy.deepcopy(module, empty)
