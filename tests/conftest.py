"""Fixtures for all tests: ranks in warm processes, and a seed."""

import gc
import json
import sys
import time
from collections import Counter

import pytest

FORKSERVER, BEGUN = pytest.StashKey(), pytest.StashKey()
LONG_S = 0.5  # of a test that made models: its garbage is not worth the scans of what it imported


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="write tests/golden/ anew")


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(items):
    """`one_in(n)`: of each n cases of a test one runs always, the first of the first n, the second of the next; the others are slow.

    `one_in(n, m)`: of the cases that `one_in(n)` keeps, one in m, chosen in the same way.
    """
    seen = Counter()
    for item in items:
        mark = item.get_closest_marker("one_in")
        shares = mark.args if mark and not item.get_closest_marker("slow") else ()
        for level, n in enumerate(shares):
            case = item.nodeid.split("[")[0], level
            turn, place = divmod(seen[case], n)
            seen[case] += 1
            if place != turn % n:  # a diagonal: not the same column of a grid each time
                item.add_marker(pytest.mark.slow)
                break


def pytest_configure(config):
    """Collect no garbage until all tests are imported; the first process of pytest-xdist announces its fork server."""
    gc.disable()
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        import shared_forkserver

        config.stash[FORKSERVER] = shared_forkserver.announce()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node, ids):
    """Start the fork server for a whole run; in a run of a few tests each process starts one when a test asks for ranks."""
    folder = node.config.stash.get(FORKSERVER, None)
    if folder is not None and len(ids) > 1000:
        import shared_forkserver

        shared_forkserver.start_for_all(folder)
        del node.config.stash[FORKSERVER]
        node.config.add_cleanup(folder.cleanup)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    item.stash[BEGUN] = time.monotonic()
    from releases import take_any_peft

    take_any_peft()


def pytest_collection_finish():
    """Let garbage collection skip all that is imported: after each `emulate` it would scan a million objects again."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """After a long test and after the last one of a file also skip the models of transformers that were imported since."""
    yield
    took = item.stash.get(BEGUN, 0.0)
    if nextitem is None or nextitem.path != item.path or time.monotonic() - took > LONG_S:
        gc.collect()
        gc.freeze()


def _count_outcomes(terminalreporter):
    """Print the counts of outcomes of tests/loops/test_loop_outcomes.py."""
    counts = {}
    for kind in ("passed", "failed", "xfailed", "xpassed"):
        for report in terminalreporter.stats.get(kind, []):
            ended = dict(report.user_properties).get("outcome")
            if ended:
                counts[ended] = counts.get(ended, 0) + 1
    if sum(counts.values()) >= 20:
        order = ("equal", "refused", "WRONG", "traceback", "hang")
        told = ", ".join(f"{counts.get(kind, 0)} {kind}" for kind in order)
        terminalreporter.section(f"{sum(counts.values())} cells of loops: {told}")


def pytest_terminal_summary(terminalreporter):
    """The grid that ran: cells passed of cells run, families by layouts."""
    _count_outcomes(terminalreporter)
    counts, refused = {}, 0
    for report in (
        r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, [])
    ):
        noted = dict(report.user_properties)
        if "cell" in noted:
            passed, run = counts.get(noted["cell"], (0, 0))
            counts[noted["cell"]] = passed + report.passed, run + 1
            refused += "refused" in noted
    if len(counts) < 20:
        return
    families, layouts = (dict.fromkeys(cell[i] for cell in counts) for i in (0, 1))
    line = terminalreporter.write_line
    terminalreporter.section("grid: cells passed / run")
    line(f"{'':16}" + "".join(f"{layout:>10}" for layout in layouts))
    for family in families:
        cells = [counts.get((family, layout)) for layout in layouts]
        line(f"{family:16}" + "".join(f"{f'{c[0]}/{c[1]}' if c else '-':>10}" for c in cells))
    passed, run = (sum(c[i] for c in counts.values()) for i in (0, 1))
    line(f"{passed} of {run} cells passed, {refused} of them by the refusal that is expected")


@pytest.fixture(scope="session")
def ranks():
    """`ranks.run(fn, nprocs, *args)` runs a module-level function on many ranks."""
    from ranks import RankPool

    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture
def threads(request, ranks):
    """`threads.run(fn, nprocs, *args)`: as `ranks`, on threads of this process, at half the cost; in a slow case, processes."""
    from ranks import ThreadRanks

    return ranks if request.node.get_closest_marker("slow") else ThreadRanks()


@pytest.fixture(scope="module")
def shared_dry_runs():
    """Planners of a file's tests share the dry runs of equal models and layouts, which take a second each."""
    from slapo_zoo.hf.configs import config_key
    from slapo_zoo.tune.planner.profiling import Family

    own, known = Family.profile, {}

    def profile(self, *args, **options):
        of_model = self.cls, config_key(self.config), config_key(self.small), self.is_small
        key = of_model, self.target_len, self.padding, args, tuple(sorted(options.items()))
        if key not in known:
            known[key] = own(self, *args, **options)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Family, "profile", profile)
        yield


@pytest.fixture
def verify_here(monkeypatch):
    """Verifications run in this process: a new one imports torch and transformers for longer than it verifies.

    tests/verify/test_cards.py has the process itself.
    """
    import transformers

    from slapo_zoo.verify import apart, card_check, child

    level = transformers.logging.get_verbosity()
    for module in (apart, card_check):
        monkeypatch.setattr(
            module, "verify_apart", lambda asked: child.answer(json.loads(json.dumps(asked)))
        )
    yield
    transformers.logging.set_verbosity(level)
    transformers.logging.enable_progress_bar()


@pytest.fixture
def forked_child(monkeypatch, tmp_path):
    """Verifications and derivations run in processes with warm imports, and their proofs are cached for this test alone."""
    from huggingface_hub import constants

    from forked_child import ForkedChild
    from slapo_zoo.model.load import auto_schedule
    from slapo_zoo.verify import apart

    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "proofs"))
    for module in (apart, auto_schedule):
        monkeypatch.setattr(module, "python_apart", ForkedChild)


@pytest.fixture(autouse=True)
def seed():
    """Every test starts from the same random state; a test that takes no torch pays nothing."""
    if "torch" not in sys.modules:
        return None
    from ranks import SEED, seed_all

    seed_all()
    return SEED


@pytest.fixture(scope="session")
def interpreter():
    """`interpreter.run(fn, *args)` runs a module-level function where Triton is interpreted."""
    from interpreter import Interpreter

    worker = Interpreter()
    yield worker
    worker.close()
