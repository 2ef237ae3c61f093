"""The tuning loop: take a configuration from a strategy, measure it or look it up, store the result."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from slapo_zoo.tune.database import Database, Scope
from slapo_zoo.tune.grid import Grid
from slapo_zoo.tune.outcome import CRASH, OK, OUT_OF_MEMORY, SLOW, Outcome
from slapo_zoo.tune.space import Point
from slapo_zoo.tune.strategies import Strategy, best_of

Measure = Callable[[Point, int], Outcome]
OnTrial = Callable[["Trial", "Result"], None]
MOST_STARTS = 2  # a configuration that began this often without a result killed the tuner itself


@dataclass(frozen=True)
class Trial:
    """One measured configuration and its outcome.

    Args:
        number: index of the configuration in the grid's `points`.
        point: the configuration: option --> value.
        outcome: what the measurement found.
        was_known: whether the outcome came from the database.
    """

    number: int
    point: Point
    outcome: Outcome
    was_known: bool = False


@dataclass(frozen=True)
class Limits:
    """Limits of a search: how many configurations and steps, and when to give up.

    Args:
        evaluations: most configurations, including those found in the database, so that a resumed run stops at
            the same number.
        patience: number of configurations in a row without a new best after which the search stops; 0: never.
        quick_steps: steps of a first short measurement; 0 skips it.
        steps: steps of a full measurement.
        slack: a full measurement follows if the short one has at least this share (0 to 1) of the best short throughput.
    """

    evaluations: int = 50
    patience: int = 0
    quick_steps: int = 0
    steps: int = 10
    slack: float = 0.9


@dataclass
class Result:
    """All measured configurations of a search, and the fastest.

    Args:
        trials: the measurements, in order.
        pruned: reason --> number of configurations that were not measured for this reason.
    """

    trials: list[Trial] = field(default_factory=list)
    pruned: dict[str, int] = field(default_factory=dict)

    @property
    def best(self) -> Trial | None:
        """Return the fastest configuration that ran to its end, or None."""
        number = best_of({trial.number: trial.outcome for trial in self.trials})
        return next((trial for trial in self.trials if trial.number == number), None)


class Tuner:
    """Search loop that measures configurations of a grid, one after the other, and keeps the fastest.

    Args:
        grid: all configurations of the search.
        measure: function (configuration, number of steps) that returns the outcome.
        strategy: function (outcomes by configuration number, numbers not measured yet) that returns the number of the
            configuration to measure next, or None to end the search.
        database: store of outcomes; None keeps them in memory.
        scope: conditions under which stored outcomes may be reused.
        limits: when to stop.
        refused: number of a configuration --> why the planner excludes it; it is never measured.
        on_trial: called with (the Trial, the Result so far) after each measurement.
    """

    def __init__(
        self, grid: Grid, measure: Measure, strategy: Strategy, database: Database | None = None,
        scope: Scope | None = None, limits: Limits | None = None, refused: Mapping[int, str] | None = None,
        on_trial: OnTrial | None = None,
    ):  # fmt: skip
        self.grid, self.measure, self.strategy = grid, measure, strategy
        self.database = database if database is not None else Database()
        self.scope, self.limits = scope or Scope("", ""), limits or Limits()
        self.refused, self.on_trial = dict(refused or {}), on_trial
        self._quick = 0.0

    def run(self) -> Result:
        """Measure configurations until a limit is reached or the strategy returns None; return all measurements."""
        result, known = Result(), dict[int, Outcome]()
        left = [i for i in range(len(self.grid.points)) if i not in self.refused]
        if self.refused:
            result.pruned["the planner: it does not fit"] = len(self.refused)
        without_gain = 0
        while len(result.trials) < self.limits.evaluations:
            number = self.strategy(known, left)
            if number is None:
                break
            before = result.best
            trial = self._trial(number)
            result.trials.append(trial)
            known[number] = trial.outcome
            left.remove(number)
            if trial.outcome.kind == OUT_OF_MEMORY:
                more = self.grid.takes_more(number)
                cut = [i for i in left if more[i]]
                left = [i for i in left if not more[i]]
                name = "they take more memory than one that ran out"
                result.pruned[name] = result.pruned.get(name, 0) + len(cut)
            if self.on_trial is not None:
                self.on_trial(trial, result)
            without_gain = 0 if result.best is not before else without_gain + 1
            if self.limits.patience and without_gain >= self.limits.patience:
                break
        return result

    def _trial(self, number: int) -> Trial:
        point, limits = self.grid.points[number], self.limits
        if not limits.quick_steps:
            return self._measured(number, point, limits.steps)
        quick = self._measured(number, point, limits.quick_steps)
        if quick.outcome.kind != OK:
            return quick
        if quick.outcome.throughput < limits.slack * self._quick:
            why = f"{quick.outcome.throughput / self._quick:.2f} of the best after {limits.quick_steps} steps"
            return replace(quick, outcome=replace(quick.outcome, kind=SLOW, message=why))
        self._quick = max(self._quick, quick.outcome.throughput)
        return self._measured(number, point, limits.steps)

    def _measured(self, number: int, point: Point, steps: int) -> Trial:
        """Return the Trial of `point`, configuration `number`: the database's, if it has one over as many `steps`;
        otherwise `point` is measured now and its outcome is stored.
        """
        key = self.scope.key(point, steps)
        if key in self.database:
            return Trial(number, point, Outcome(**self.database[key]), was_known=True)
        begun = f"begun | {key}"
        starts = self.database.get(begun, 0)
        if starts >= MOST_STARTS:
            message = f"the tuner ended {starts} times while it was measured"
            outcome = Outcome(CRASH, message=message)
        else:
            self.database.commit(begun, starts + 1)
            outcome = self.measure(point, steps)
        self.database.commit(key, vars(outcome))
        return Trial(number, point, outcome)
