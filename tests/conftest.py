"""Fixtures for all tests: ranks in warm processes, and a seed."""

import sys

import pytest


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="write tests/golden/ anew")


@pytest.fixture(scope="session")
def ranks():
    """`ranks.run(fn, nprocs, *args)` runs a module-level function on many ranks."""
    from ranks import RankPool

    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def seed():
    """Every test starts from the same random state; a test that takes no torch pays nothing."""
    if "torch" not in sys.modules:
        return None
    from ranks import SEED, seed_all

    seed_all()
    return SEED
