"""Tables of a comparison; a library whose losses differ from the plain model's gets no speed."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from compare.contest import Team
from compare.peers import CONTENDERS
from compare.shapes import Work

LOSS_CLOSE, NORM_CLOSE = 1e-4, 1e-3  # relative tolerances; the losses of all steps count
MIB = 2**20


def summarize(teams: Sequence[Team], work: Work, refused: dict[str, str]) -> dict[str, Any]:
    """Return {"green", "parity", "speed"}: whether ours computed the plain model's losses, and two tables.

    `speed` has the contenders whose losses are the plain model's; it is empty unless `green`.

    Args:
        teams: finished teams: ours first, then plain `transformers`.
        work: checkpoint, batch and ranks of all of them.
        refused: contender --> why it cannot train the family.
    """
    ours, plain = teams[0], teams[1]
    parity = [_parity(team, plain) for team in teams]
    verdicts = {row["contender"]: row["verdict"] for row in parity}
    parity += [{"contender": name, "verdict": why} for name, why in refused.items()]
    green = all(
        verdicts[CONTENDERS[n].name] == "same" for n in verdicts if n.startswith("slapo_zoo")
    )
    timed = [team for team in teams if verdicts[team.name] == "same"] if green else []
    return {"green": green, "parity": parity, "speed": [_speed(team, ours, work) for team in timed]}


def _parity(team: Team, plain: Team) -> dict[str, Any]:
    if team.failure:
        return {"contender": team.name, "verdict": f"did not train: {team.failure}"}
    pairs = zip(team.losses, plain.losses, strict=True)
    losses = max(_apart(loss, expected) for loss, expected in pairs)
    norms = _apart(team.start["norm"], plain.start["norm"])
    same = losses <= LOSS_CLOSE and norms <= NORM_CLOSE
    return {
        "contender": team.name, "verdict": "same" if same else "DIFFERENT: no speed is told",
        "first loss": team.losses[0], "gradient norm": team.start["norm"],
        "losses apart": losses, "norms apart": norms,
    }  # fmt: skip


def _apart(found: float, expected: float) -> float:
    distance = abs(found - expected) / abs(expected)
    return distance if math.isfinite(distance) else math.inf


def _speed(team: Team, ours: Team, work: Work) -> dict[str, Any]:
    """Return the table row of a contender: milliseconds are percentiles over the rounds, ratios to `ours` are
    medians.
    """
    p20, p50, p80 = (percentile(team.seconds, share) for share in (0.2, 0.5, 0.8))
    rounds = [a / b for a, b in zip(team.seconds, ours.seconds, strict=True)]
    return {
        "contender": team.name, "ranks": work.tp if CONTENDERS[team.name].divides else 1,
        "p20 ms": p20 * 1e3, "p50 ms": p50 * 1e3, "p80 ms": p80 * 1e3,
        "time / ours": round(statistics.median(rounds), 3),
        "tokens/s": work.batch_size * work.seq_len / p50,
        "parameters MiB": team.start["parameter bytes"] / MIB,
        "ours / its bytes": round(ours.start["parameter bytes"] / team.start["parameter bytes"], 3),
        "peak MiB": team.start["peak bytes"] / MIB,
        "load s": team.start["load s"], "first gradients s": team.start["first gradients s"],
        "ours / its first": round(
            ours.start["first gradients s"] / team.start["first gradients s"], 3
        ),
        "read MiB": team.start["read"] and team.start["read"] / MIB,
        "save s": team.start["save s"], "plan lines": team.start["plan lines"],
    }  # fmt: skip


def percentile(values: Sequence[float], share: float) -> float:
    """Return the percentile `share` (0 to 1) of the values, by linear interpolation between neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def markdown(title: str, rows: Sequence[dict[str, Any]]) -> str:
    """Return rows as a Markdown table under a title; "" without rows."""
    if not rows:
        return ""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [[str(name) for name in columns], ["--"] * len(columns)]
    lines += [[cell(row.get(name)) for name in columns] for row in rows]
    return f"### {title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def cell(value: Any) -> str:
    """Format a value for a table; None becomes "-"."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")
