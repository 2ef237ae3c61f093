"""Choose for each block whether its activations are kept, recomputed or offloaded: fastest within a memory limit.

A mixture has one choice per block. Block after block, a mixture is dropped if another mixture takes fewer bytes and
seconds; of those left at the end the fastest that fits is taken. If more than MOST (400) are left at a block, the
interval from their fewest to their most bytes is divided into 400, and the fastest mixture of each part is kept.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from slapo_zoo.tune.planner.layout import Layout, in_flight, places_of
from slapo_zoo.tune.planner.profile import Recompute

TRIES, MOST = 4, 400
CHOICES = ("keep", "save_matmuls", "offload", "recompute", "sharded")


class Mixture(NamedTuple):
    """Choice for some blocks whether each keeps, recomputes or offloads its activations; the memory and time it takes.

    Args:
        bytes: activations kept on the device.
        seconds: extra time per micro-batch.
        choices: linked list ((block, policy), list of the blocks before), None at its end; in an option of a single
            block, as `_front` gets them, the policy ("keep", "recompute", ...) alone.
    """

    bytes: float
    seconds: float
    choices: Any = None


def choose(
    planner: Any, layout: Layout, budget: float | Sequence[float]
) -> tuple[tuple[str, ...] | None, int]:
    """Choose for each block whether activations are kept, recomputed or offloaded: the fastest way within the budget.

    Return (one policy per block, or None if nothing fits; the smallest budget in bytes per rank that would fit).

    Args:
        planner: the `Planner` of the model.
        layout: mesh, micro-batches and pipeline order; the recomputation settings of the layout are ignored.
        budget: bytes of activations per rank: one number, or one for each rank.
    """
    budgets = budget if isinstance(budget, Sequence) else [budget] * layout.pp
    profile, how = planner.profile_of(layout), planner.how(layout)
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
                before = options.get(unit.name)  # an earlier call of the same block
                options[unit.name] = [_both(a, b) for a, b in zip(before, each, strict=True)] if before else each  # fmt: skip
        front = _unbeaten([*_front(options, False), *_front(options, True)])
        least = max(least, fixed + front[0].bytes)
        best = min((m for m in front if fixed + m.bytes <= budgets[rank]), default=None, key=lambda m: m.seconds)  # fmt: skip
        fits = fits and best is not None
        _note(found, best)
    names = list(planner.family.blocks)
    return (tuple(found[name] for name in names) if fits else None), round(least + 0.5)


def _both(a: Mixture, b: Mixture) -> Mixture:
    return Mixture(a.bytes + b.bytes, a.seconds + b.seconds, a.choices)


def _front(options: dict[str, list[Mixture]], offloads: bool) -> list[Mixture]:
    """Return the mixtures of one option per block that no other beats in both bytes and seconds, fewest bytes first.

    Args:
        options: block --> a `Mixture` of this block alone for each policy that the block may have.
        offloads: whether "offload" is allowed; all mixtures then also have the bytes of a buffer of two blocks.
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
    if len(found) <= MOST:
        return found
    step = (found[-1].bytes - found[0].bytes) / MOST
    kept = {int((one.bytes - found[0].bytes) / step): one for one in found}  # fastest of each range
    return [found[0], *kept.values()]


def _note(found: dict[str, str], best: Mixture | None) -> None:
    """Add the policies of `best`, the mixture chosen for one pipeline rank (None adds none), to `found`, block -->
    policy. A shared block, called on several ranks, gets that of its policies that keeps least (is last in CHOICES).
    """
    chain = best.choices if best else None
    while chain is not None:
        (name, policy), chain = chain
        found[name] = max(found.get(name, policy), policy, key=CHOICES.index)


def mixed(planner: Any, layout: Layout, limit: float, seconds: float = float("inf")) -> Any:
    """Return the forecast (`Forecasted`) of `layout` with a policy ("keep", "recompute", "offload", ...) of its own for
    each block, the fastest choice that fits into `limit` bytes per rank; `planner` is a `Planner`. Return None if nothing
    fits, all blocks get one policy (the wide search forecasts such layouts), or the step takes `seconds` or longer.
    """
    ranks = planner.ranks(layout)
    room = [limit - rank.total + rank.activations for rank in ranks]
    for _ in range(TRIES):
        policies, _least = choose(planner, layout, room)
        if policies is None or len(set(policies)) == 1:
            return None
        found = planner.forecast(replace(layout, checkpoint_ratio=1.0, checkpoint_policy=policies))
        if found.step.seconds >= seconds:
            return None
        if found.memory <= limit:
            return found
        # short-lived memory grew too: plan again with less room
        room = [had - max(r.total - limit, 0.0) for had, r in zip(room, found.ranks, strict=True)]
    return None
