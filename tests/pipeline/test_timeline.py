"""Simulated pipeline orders: bubbles equal the papers' formulas, and work and idle time fill the step."""

import pytest

from in_flight import most_in_flight
from slapo_zoo.pipeline.orders import ORDERS, StageMap
from slapo_zoo.pipeline.timeline import (
    Action,
    Span,
    Stuck,
    bubble,
    busy,
    gaps,
    makespan,
    simulate,
)

SECONDS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def cost(action):
    return SECONDS[action.kind]


FORMULAS = {  # bubble of p ranks, m micro-batches, v stages per rank
    "1f1b": lambda p, m, v: (p - 1) / (m + p - 1),  # arXiv:2104.04473, section 2.2
    "gpipe": lambda p, m, v: (p - 1) / (m + p - 1),  # arXiv:1811.06965
    "interleaved_1f1b": lambda p, m, v: (p - 1) / (v * m + p - 1),  # arXiv:2104.04473
    "looped_bfs": lambda p, m, v: (p - 1) / (v * m + p - 1),  # arXiv:2211.05953
    "interleaved_zero_bubble": lambda p, m, v: (p - 1) / (3 * v * m + p - 1),
    "zbv": lambda p, m, v: (p - 1) / (6 * m + p - 1),  # arXiv:2401.10241: only the way in is left
    "dualpipev": lambda p, m, v: (p - 1) / (6 * m + p - 1),
}


@pytest.mark.parametrize("micro_batches", [8, 16])
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("name", ORDERS)
def test_simulated_pipeline_bubbles_equal_the_published_formulas(name, pp, micro_batches):
    places = StageMap.make(name, pp, None)
    order = places.actions(micro_batches)
    found = bubble(simulate(order, cost))
    assert found == pytest.approx(FORMULAS[name](pp, micro_batches, places.per_rank))
    assert sorted(str(a) for actions in order for a in actions if a.kind == "F") == sorted(
        f"{s}F{i}" for s in range(places.num_stages) for i in range(micro_batches)
    )


def test_simulated_bubble_of_interleaved_1f1b_with_three_stages_per_rank_equals_the_formula():
    places = StageMap.make("interleaved_1f1b", 2, 3)
    assert bubble(simulate(places.actions(8), cost)) == pytest.approx(1 / (3 * 8 + 1))


def test_micro_batches_in_flight_on_four_stages_are_4_3_2_1_with_1f1b_and_8_with_gpipe():
    """1F1B holds as many micro-batches as there are later stages; GPipe holds all."""
    flights = {name: [most_in_flight(a) for a in StageMap.make(name, 4, None).actions(8)]
               for name in ("1f1b", "gpipe", "zbv")}  # fmt: skip
    assert flights == {"1f1b": [4, 3, 2, 1], "gpipe": [8] * 4, "zbv": [8] * 4}
    forward_and_back = [Action(0, "F", 0), Action(1, "F", 0), Action(1, "B", 0), Action(0, "B", 0)]
    assert most_in_flight(forward_and_back, lambda stage: [3.0, 5.0][stage]) == 8.0


def test_simulated_pipeline_order_that_deadlocks_raises_stuck_error():
    order = [[Action(0, "F", 0), Action(0, "B", 0)], [Action(1, "B", 0), Action(1, "F", 0)]]
    with pytest.raises(Stuck) as caught:
        simulate(order, cost)
    assert caught.value.positions == {0: 1, 1: 0}


def test_simulated_busy_and_waiting_time_of_every_rank_add_up_to_the_step_time():
    """Every rank's time is work, communication or idle; a transfer shows as communication."""
    spans = simulate(StageMap.make("1f1b", 2, None).actions(2), cost, transfer=0.25)
    found = gaps(spans)
    for rank in (0, 1):
        waited = sum(gap.end - gap.begin for gap in found if gap.rank == rank)
        assert waited + busy(spans)[rank] == pytest.approx(makespan(spans))
    first = [gap for gap in found if gap.rank == 1][:2]
    assert [(g.kind, g.begin, g.end) for g in first] == [
        ("idle", 0.0, 1.0),
        ("communication", 1.0, 1.25),
    ]


def test_simulated_timeline_lists_the_idle_gaps_of_two_ranks_that_compute_in_turn():
    spans = [Span(0, Action(0, "F", 0), 0.0, 1.0), Span(1, Action(1, "F", 0), 1.0, 2.0)]
    assert [(g.rank, g.kind) for g in gaps(spans)] == [(0, "idle"), (1, "idle")]
