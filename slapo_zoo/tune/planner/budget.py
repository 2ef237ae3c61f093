"""The cheapest way to hold activations within a budget: what each block keeps, recomputes or offloads.

Exact for the planner's figures: of all mixtures of the blocks of a rank those remain that no other one
beats in bytes and in seconds, block after block; the fastest of them that fits is taken.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from slapo_zoo.errors import MeshError, SlapoError
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.tune.planner.hardware import HARDWARE, Hardware
from slapo_zoo.tune.planner.layout import Layout, places_of
from slapo_zoo.tune.planner.memory import Recompute
from slapo_zoo.tune.planner.runtime import precision_of
from slapo_zoo.tune.planner.search import Planner, in_flight
from slapo_zoo.weights.ledger import human
from slapo_zoo.zoo.options import BuildOptions

CHOICES = ("keep", "save_matmuls", "offload", "recompute", "sharded")


class Mixture(NamedTuple):
    """What some blocks take.

    Args:
        bytes: that they keep on the device.
        seconds: that it costs for a micro-batch.
        choices: (block, policy), linked: (the last one, those before it).
    """

    bytes: float
    seconds: float
    choices: Any = None


def policies_within(
    budget: int, asked: str, config: Any, auto_class: Any, mesh: Mesh, options: BuildOptions,
    dtype: torch.dtype, shape: tuple[int, int], micro_batches: int | None,
) -> tuple[str, ...]:  # fmt: skip
    """A policy for each block, so that what a rank keeps for its backwards fits.

    Args:
        budget: bytes of a rank.
        asked: the argument, as the error names it.
        config: of the model.
        auto_class: its head.
        mesh: its layout.
        options: of the model.
        dtype: of its parameters.
        shape: rows and tokens of a micro-batch.
        micro_batches: of a step.

    Raises:
        MeshError: nothing fits; the nearest that does is named.
    """
    rows, tokens = shape
    layout = Layout(
        mesh.tp, mesh.pp, mesh.dp, rows, micro_batches or max(1, 2 * mesh.pp * (mesh.pp > 1)),
        options.pipeline_order, options.stages_per_rank or 1, dp_shard=options.dp_shard,
        sequence_parallel=options.sequence_parallel, zero_stage=options.zero_stage,
    )  # fmt: skip
    layout = replace(layout, stages_per_rank=_per_rank(layout, options))
    precision = options.precision or precision_of(str(dtype))
    planner = Planner(config, hardware_of(options.device), tokens, precision, "eager", auto_class)
    chosen, least = choose(planner, layout, budget)
    if chosen is None:
        problem = f"the planner counts {human(least)} where every block keeps as little as it can"
        unit, name = (10**6, "MB") if least > 10**7 else (1000, "KB")
        hint = (
            f'the nearest that fits is activation_memory="{-(-least // unit)}{name}"; or fewer rows'
        )
        raise MeshError("from_pretrained", f"activation_memory={asked}", problem, hint)
    return chosen


def _per_rank(layout: Layout, options: BuildOptions) -> int:
    from slapo_zoo.pipeline.orders import StageMap

    return StageMap.make(layout.pipeline_order, layout.pp, options.stages_per_rank).per_rank


def hardware_of(device: torch.device | str) -> Hardware:
    """The profile of a device, or of the one that is most like it."""
    kind = torch.device(device)
    if kind.type != "cuda":
        return HARDWARE["cpu"]
    name = torch.cuda.get_device_name(kind).lower()
    return HARDWARE[next((key for key in ("h200", "h100", "a100", "v100") if key in name), "h100")]


def choose(planner: Planner, layout: Layout, budget: float) -> tuple[tuple[str, ...] | None, int]:
    """(a policy for each block of the model, or None; bytes of a rank at the least)."""
    profile, how = planner.profile(layout.tp, layout.sequence_parallel), planner.how(layout)
    uses, edges = profile.uses(layout.rows), planner.edges(layout.stages)
    names = [name for name in CHOICES if name != "offload" or planner.hardware.host]
    shares = 1 if layout.sequence_parallel else layout.tp
    names = names if shares > 1 else names[:-1]
    away = Recompute(each=dict.fromkeys(planner.family.blocks, "sharded"), shares=shares)
    away = away.elsewhere(
        profile.units, uses
    )  # as if of its own output: each block's is like its input
    found: dict[str, str] = {}
    least, fits = 0.0, True
    for rank in range(layout.pp):
        held = in_flight(layout.pipeline_order, layout.pp, layout.stages_per_rank,
                         layout.micro_batches, rank)  # fmt: skip
        options: dict[str, list[Mixture]] = {}
        fixed = 0.0
        for n, stage in zip(held, places_of(layout).stages_of(rank), strict=True):
            for i in range(edges[stage], edges[stage + 1]):
                unit, use = profile.units[i], uses[i]
                if not unit.is_block:
                    fixed += n * use.kept
                    continue
                each = [Mixture(n * max(Recompute(each={unit.name: name}).held(unit, use)
                                        - away[i] * (name == "sharded"), 0.0),
                                how.again(use, name) * (name != "keep"), name)
                        for name in names]  # fmt: skip
                before = options.get(unit.name)  # of a block that is called several times
                options[unit.name] = [_both(a, b) for a, b in zip(before, each, strict=True)] if before else each  # fmt: skip
        front = _unbeaten([*_front(options, False), *_front(options, True)])
        least = max(least, fixed + front[0].bytes)
        best = min((m for m in front if fixed + m.bytes <= budget), default=None, key=lambda m: m.seconds)  # fmt: skip
        fits = fits and best is not None
        _note(found, best)
    names = list(planner.family.blocks)
    return (tuple(found[name] for name in names) if fits else None), round(least + 0.5)


def _both(a: Mixture, b: Mixture) -> Mixture:
    return Mixture(a.bytes + b.bytes, a.seconds + b.seconds, a.choices)


def _front(options: dict[str, list[Mixture]], offloads: bool) -> list[Mixture]:
    """Mixtures that no other one beats, the smallest first.

    With any that is offloaded, two blocks are on their way at a time.
    """
    moving = 2 * max((each[0].bytes for each in options.values()), default=0.0)
    front = [Mixture(moving * offloads, 0.0)]
    for name, found in options.items():
        each = [one for one in found if offloads or one.choices != "offload"]
        sums = [Mixture(m.bytes + o.bytes, m.seconds + o.seconds, ((name, o.choices), m.choices))
                for m in front for o in each]  # fmt: skip
        front = _unbeaten(sums)
    return front


def _unbeaten(mixtures: Sequence[Mixture]) -> list[Mixture]:
    found: list[Mixture] = []
    for one in sorted(mixtures, key=lambda m: (m.bytes, m.seconds)):
        if not found or one.seconds < found[-1].seconds * (1 - 1e-9):
            found.append(one)
    return found


def _note(found: dict[str, str], best: Mixture | None) -> None:
    """Blocks that several ranks hold take what keeps least."""
    chain = best.choices if best else None
    while chain is not None:
        (name, policy), chain = chain
        found[name] = max(found.get(name, policy), policy, key=CHOICES.index)


def require_shape(value: Any) -> tuple[int, int]:
    """(rows, tokens) of a micro-batch.

    Raises:
        SlapoError: they are not two positive numbers.
    """
    if not (isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(n, int) and n > 0 for n in value)):  # fmt: skip
        problem = f"found {value!r}, expected (rows, tokens) of a micro-batch"
        hint = "a budget for activations depends on them: micro_batch_shape=(4, 1024)"
        raise SlapoError("from_pretrained", "micro_batch_shape", problem, hint)
    return value[0], value[1]
