"""Timeline of a pipeline step: simulated from an order and costs, or recorded in a real step.

An order is a list of actions per rank. Simulated and recorded timelines are lists of spans, whose bubble and
gaps are computed in the same way.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = "F", "B", "I", "W"
NAMES = {
    FORWARD: "forward",
    BACKWARD: "backward",
    BACKWARD_INPUT: "backward of inputs",
    BACKWARD_WEIGHT: "backward of weights",
}


class Action(NamedTuple):
    """Computation that a rank does at a time: (stage, kind, micro-batch), as text "2F0". The kinds are F (forward), B
    (backward), and the two parts of a backward, I (gradients of inputs) and W (gradients of weights).
    """

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


class Span(NamedTuple):
    """Time span of one action (a forward or backward) on a rank, with its begin and end in seconds."""

    rank: int
    action: Action
    begin: float
    end: float


class Gap(NamedTuple):
    """Interval (seconds) in which `rank` computes nothing. A wait is split in two: `kind` "idle" until another rank has
    computed the result that is waited for, then "communication" until the result arrives.
    """

    rank: int
    kind: str
    begin: float
    end: float


class Stuck(Exception):  # noqa: N818 - a finding; who asked makes the error of it
    """Error of an order that deadlocks; `positions` maps each unfinished rank to the index of its next action."""

    def __init__(self, positions: dict[int, int]):
        super().__init__(f"deadlock: no rank can run its next action, {{rank: index}} {positions}")
        self.positions = positions


def needs(action: Action, num_stages: int) -> list[tuple[Action, ...]]:
    """Return the actions that must run before an action, as tuples of alternatives: of each tuple one must have run."""
    stage, kind, micro_batch = action
    if kind == FORWARD:
        return [(Action(stage - 1, FORWARD, micro_batch),)] if stage else []
    if kind == BACKWARD_WEIGHT:
        return [(Action(stage, BACKWARD_INPUT, micro_batch),)]
    own: list[tuple[Action, ...]] = [(Action(stage, FORWARD, micro_batch),)]
    if stage + 1 == num_stages:
        return own
    later = (Action(stage + 1, kind, micro_batch) for kind in (BACKWARD, BACKWARD_INPUT))
    return [*own, tuple(later)]


def simulate(
    order: Sequence[Sequence[Action]], cost: Callable[[Action], float], transfer: float = 0.0
) -> list[Span]:
    """Return the spans of an order: each action begins when its rank is free and its inputs have arrived.

    Args:
        order: actions of each rank, in order.
        cost: seconds of an action.
        transfer: seconds to send a result to another rank.

    Raises:
        Stuck: an action waits for one that comes later on the same rank, or never.
    """
    num_stages = 1 + max(action.stage for actions in order for action in actions)
    done: dict[Action, tuple[float, int]] = {}
    position, clock, spans = [0] * len(order), [0.0] * len(order), []
    while True:
        before = len(spans)
        for rank, actions in enumerate(order):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                ready = [
                    min((done[a] for a in either if a in done), default=None)
                    for either in needs(action, num_stages)
                ]
                if None in ready:
                    break
                arrivals = [at + transfer * (home != rank) for at, home in filter(None, ready)]
                begin = max(clock[rank], *arrivals, 0.0)
                clock[rank] = begin + cost(action)
                done[action] = clock[rank], rank
                spans.append(Span(rank, action, begin, clock[rank]))
                position[rank] += 1
        left = {r: i for r, i in enumerate(position) if i < len(order[r])}
        if not left:
            return spans
        if len(spans) == before:
            raise Stuck(left)


def makespan(spans: Sequence[Span]) -> float:
    """Return the seconds from the first begin to the last end of `spans`, the timed actions of all ranks in a step."""
    return max(span.end for span in spans) - min(span.begin for span in spans)


def busy(spans: Sequence[Span]) -> dict[int, float]:
    """Return {rank: seconds in which the rank computes} of a step; `spans` are the step's timed actions."""
    total: dict[int, float] = {}
    for span in spans:
        total[span.rank] = total.get(span.rank, 0.0) + span.end - span.begin
    return total


def bubble(spans: Sequence[Span]) -> float:
    """Return the share (0 to 1) of all ranks' time without computation; `spans` are the timed actions of a step."""
    each = busy(spans)
    whole = len(each) * makespan(spans)
    return 1.0 - sum(each.values()) / whole if whole else 0.0


def gaps(spans: Sequence[Span]) -> list[Gap]:
    """Return the gaps between the actions of each rank, from the first action of all ranks to the last.

    Waiting for an input counts as idle until the other rank has computed it, then as communication. Recorded
    times are compared without aligning the clocks of different machines.
    """
    begin, end = min(s.begin for s in spans), max(s.end for s in spans)
    num_stages = 1 + max(span.action.stage for span in spans)
    made = {span.action: span for span in spans}
    found: list[Gap] = []

    def wait(rank: int, since: float, until: float, arrived: float) -> None:
        edge = min(max(arrived, since), until)
        found.extend(
            Gap(rank, kind, a, b)
            for kind, a, b in (("idle", since, edge), ("communication", edge, until))
            if b > a
        )

    for rank in sorted({span.rank for span in spans}):
        clock = begin
        for span in sorted((s for s in spans if s.rank == rank), key=lambda s: s.begin):
            sources = [made[a].end for either in needs(span.action, num_stages) for a in either
                       if a in made and made[a].rank != rank]  # fmt: skip
            wait(rank, clock, span.begin, max(sources, default=span.begin))
            clock = max(clock, span.end)
        wait(rank, clock, end, end)
    return found
