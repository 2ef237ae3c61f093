"""The tuner: evaluations until the optimum, results kept after a kill, and kinds of failures."""

import csv
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

import surfaces
from slapo_zoo.errors import SlapoError
from slapo_zoo.tune import tuning_report as show
from slapo_zoo.tune.database import Database, Scope
from slapo_zoo.tune.grid import Grid
from slapo_zoo.tune.outcome import CRASH, OK, OUT_OF_MEMORY, SLOW, TIMEOUT, WRONG, run_trial
from slapo_zoo.tune.strategies import STRATEGIES, find_strategy
from slapo_zoo.tune.tuner import Limits, Tuner
from surfaces import BATCHES, CLIFFS, SURFACES, space

MOST, SOON, NEAR = 17, 10, 0.97


def tune(surface, start=0, evaluations=MOST, search="model", grid=None, **more):
    grid = grid or Grid(space().all_points())
    strategy = find_strategy(search)(grid, start=start)
    return Tuner(grid, surface, strategy, limits=Limits(evaluations), **more).run()


def truth(surface, grid):
    return max(surface(point).throughput for point in grid.points)


def starts(every):
    grid = Grid(space().all_points())
    return range(0, len(grid.points), every)


def assert_found(surface, start, grid=None):
    grid = grid or Grid(space().all_points())
    best, trials = truth(surface, grid), tune(surface, start, grid=grid).trials
    assert len(trials) <= MOST
    assert max(t.outcome.throughput for t in trials) == pytest.approx(best, rel=1e-12)
    assert max(t.outcome.throughput for t in trials[:SOON]) >= NEAR * best


@pytest.mark.parametrize("name", SURFACES)
@pytest.mark.parametrize("start", [0, 45, 90])
def test_tuner_finds_the_fastest_configuration_in_few_evaluations(name, start):
    assert_found(SURFACES[name], start)


@pytest.mark.slow
@pytest.mark.parametrize("name", SURFACES)
def test_tuner_finds_the_fastest_configuration_in_few_evaluations_with_every_seed(name):
    for start in starts(1):
        assert_found(SURFACES[name], start)


@pytest.mark.slow
@pytest.mark.parametrize("name", SURFACES)
def test_tuner_finds_the_fastest_configuration_in_few_evaluations_for_every_batch_range(name):
    """Search ranges of batch sizes with any upper end, each from its largest batch with full recomputation."""
    for end in range(4, len(BATCHES) + 1):
        grid = Grid(space(BATCHES[:end]).all_points())
        assert_found(SURFACES[name], len(grid.points) - 1, grid)


def assert_found_in_silence(name, batches, every):
    """Fail unless a search finds the optimum of a surface that reports only throughput and out-of-memory."""
    grid, surface = Grid(space(batches).all_points()), CLIFFS[name]
    best = truth(surface, grid)
    for start in range(0, len(grid.points), every):
        trials = tune(surface, start, grid=grid).trials
        assert max(t.outcome.throughput for t in trials) == best, (start, best)
        if name == "the original's":
            assert max(t.outcome.throughput for t in trials[:SOON]) >= NEAR * best, start


@pytest.mark.parametrize("name", CLIFFS)
def test_tuner_finds_the_fastest_configuration_without_measured_memory_peaks(name):
    assert_found_in_silence(name, BATCHES, 18)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLIFFS)
def test_tuner_finds_the_fastest_configuration_without_memory_peaks_with_every_seed(name):
    for end in range(4, len(BATCHES)):
        assert_found_in_silence(name, BATCHES[:end], 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLIFFS)
def test_tuner_finds_the_fastest_of_all_batch_sizes_with_every_seed(name):
    assert_found_in_silence(name, BATCHES, 1)


@pytest.mark.parametrize("search", STRATEGIES)
def test_every_tuner_strategy_terminates_and_measures_no_configuration_twice(search):
    found = tune(SURFACES["half"], 20, 91, search)
    numbers = [trial.number for trial in found.trials]
    assert len(set(numbers)) == len(numbers)
    assert found.best.outcome.throughput >= 0.9 * truth(
        SURFACES["half"], Grid(space().all_points())
    )
    if search in ("exhaustive", "random"):
        assert len(numbers) + sum(found.pruned.values()) == 91


def test_tuner_skips_configurations_larger_than_one_that_ran_out_of_memory():
    grid = Grid(space().all_points())
    found = tune(SURFACES["little"], 0, 91, "exhaustive", grid)
    failed = [t for t in found.trials if t.outcome.kind == OUT_OF_MEMORY]
    assert len(failed) < sum(SURFACES["little"](p).kind == OUT_OF_MEMORY for p in grid.points)
    assert found.best.outcome.throughput == truth(SURFACES["little"], grid)


def test_tuner_skips_configurations_refused_by_the_planner_and_stops_after_patience_runs_out():
    grid = Grid(space().all_points())
    refused = {i: "needs more" for i, p in enumerate(grid.points) if SURFACES["half"](p).kind != OK}
    found = tune(SURFACES["half"], 0, 91, "exhaustive", grid, refused=refused)
    assert all(trial.outcome.kind == OK for trial in found.trials)
    strategy = find_strategy("random")(grid)
    short = Tuner(grid, SURFACES["half"], strategy, limits=Limits(91, patience=5)).run()
    assert len(short.trials) < 60


def test_tuner_stops_slow_configurations_after_a_few_steps():
    asked = []

    def measure(point, steps):
        asked.append((point["batch_size"], steps))
        return SURFACES["flat"](point, steps)

    grid = Grid(space((96, 192)).all_points())
    limits = Limits(91, quick_steps=2, steps=20, slack=0.99)
    found = Tuner(grid, measure, find_strategy("exhaustive")(grid), limits=limits).run()
    slow = [trial for trial in found.trials if trial.outcome.kind == SLOW]
    assert slow
    assert len([s for _, s in asked if s == 20]) == len(
        [t for t in found.trials if t.outcome.kind == OK]
    )
    assert found.best.outcome.throughput == truth(SURFACES["flat"], grid)


def test_tuner_does_not_measure_a_configuration_with_a_stored_result(tmp_path):
    path, scope = tmp_path / "db.jsonl", Scope("cpu", "gpt2")
    first = tune(SURFACES["half"], database=Database(path), scope=scope)
    again = tune(lambda *_: pytest.fail("measured"), database=Database(path).load(), scope=scope)
    assert [t.point for t in again.trials] == [t.point for t in first.trials]
    assert all(trial.was_known for trial in again.trials)
    other = tune(SURFACES["half"], database=Database(path).load(), scope=Scope("cuda", "gpt2"))
    assert not any(trial.was_known for trial in other.trials)


def test_tuner_skips_a_configuration_that_killed_the_tuner_twice(tmp_path):
    class Dead(BaseException):
        pass

    def measure(point, steps):
        if point["batch_size"] == 104:
            raise Dead
        return SURFACES["half"](point, steps)

    path, ends = tmp_path / "db.jsonl", 0
    for _ in range(6):
        try:
            found = tune(
                measure, 0, 9, "exhaustive", database=Database(path).load(), scope=Scope("", "")
            )
            break
        except Dead:
            ends += 1
    bad = [trial for trial in found.trials if trial.outcome.kind == CRASH]
    assert ends == 2 * len(bad)
    assert "ended 2 times" in bad[0].outcome.message


TUNER = """
import sys, time, pathlib
sys.path.insert(0, sys.argv[2])
import surfaces
from surfaces import SURFACES, space
from slapo_zoo.tune.database import Database, Scope
from slapo_zoo.tune.grid import Grid
from slapo_zoo.tune.strategies import find_strategy
from slapo_zoo.tune.tuner import Limits, Tuner
folder = pathlib.Path(sys.argv[1])
def measure(point, steps):
    time.sleep(0.004)
    outcome = SURFACES["half"](point, steps)
    with (folder / "measured").open("a") as file:
        file.write(f"{point}\\n")
    return outcome
grid = Grid(space().all_points())
db = Database(folder / "db.jsonl").load()
Tuner(grid, measure, find_strategy("random")(grid), db, Scope("", ""), Limits(91)).run()
print(len(db), db.damaged)
"""


def test_tuner_killed_at_random_loses_no_finished_measurement(tmp_path):
    """Start the tuner repeatedly and kill it at random; only the running measurement is repeated."""
    generator, kills = random.Random(5), 0
    command = [sys.executable, "-c", TUNER, str(tmp_path), os.path.dirname(surfaces.__file__)]
    for _ in range(12):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        log, limit = tmp_path / "measured", generator.randrange(3, 12)
        before = len(log.read_text().splitlines()) if log.exists() else 0
        while process.poll() is None:
            now = len(log.read_text().splitlines()) if log.exists() else 0
            if now >= before + limit:
                time.sleep(generator.random() * 0.004)
                process.send_signal(signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.001)
        _out, _ = process.communicate()
        if process.returncode == 0:
            break
    assert process.returncode == 0
    assert kills >= 3
    measured = (tmp_path / "measured").read_text().splitlines()
    assert len(measured) - len(set(measured)) <= kills  # only what was in flight
    records = [
        json.loads(line)
        for line in (tmp_path / "db.jsonl").read_bytes().splitlines()
        if line.strip()
    ]
    finished = [r["key"] for r in records if not r["key"].startswith("begun")]
    assert len(set(finished)) == len(finished)


PROGRAMS = {
    OK: "import json, os; open(os.environ['SLAPO_ZOO_RESULT'], 'w').write('{\"kind\": \"ok\", \"throughput\": 2.0}')",
    WRONG: "import json, os; open(os.environ['SLAPO_ZOO_RESULT'], 'w').write('{\"kind\": \"wrong\"}')",
    OUT_OF_MEMORY: "raise MemoryError('no more')",
    CRASH: "raise KeyError('out of luck')",
    TIMEOUT: "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); time.sleep(60)",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "segfault": "import os; os.kill(os.getpid(), 11)",
}


@pytest.mark.parametrize("kind", PROGRAMS)
def test_tuner_distinguishes_out_of_memory_crash_timeout_and_wrong_loss_of_a_worker(kind):
    outcome = run_trial(
        [sys.executable, "-S", "-c", PROGRAMS[kind]], 1.0 if kind == TIMEOUT else 30.0
    )
    expected = {"killed": OUT_OF_MEMORY, "segfault": CRASH}.get(kind, kind)
    assert outcome.kind == expected
    assert outcome.message or kind in (OK, WRONG)
    if kind == "segfault":
        assert "SIGSEGV" in outcome.message


def test_tuner_writes_its_trials_as_csv_and_draws_two_plots(tmp_path):
    grid = Grid(space().all_points())
    found = tune(SURFACES[next(iter(SURFACES))], grid=grid)
    assert f"{found.best.outcome.throughput:.4g}" in show.line_of(found.best)
    show.write_csv(found, tmp_path / "trials.csv")
    show.draw_trace(found, tmp_path / "trace.png")
    assert show.draw_surface(found, grid, tmp_path / "surface.png")
    rows = list(csv.DictReader((tmp_path / "trials.csv").read_text().splitlines()))
    assert len(rows) == len(found.trials) > 1
    assert all((tmp_path / name).stat().st_size > 1000 for name in ("trace.png", "surface.png"))
    assert str(rows[0]["batch_size"]) == str(found.trials[0].point["batch_size"])


def test_unknown_tuner_strategy_raises():
    with pytest.raises(SlapoError, match="no such strategy"):
        find_strategy("magic")
