"""Users' training loops x families x meshes on real ranks: plain `transformers`' results, or an expected error."""

import pytest

from loop_families import TEXT_SIX
from loop_runs import assert_cell, folder_of, scheduled
from loops import LAYOUTS, LOOPS

pytestmark = pytest.mark.filterwarnings("ignore:.gradient_checkpointing:FutureWarning")


NAMES = [
    name for name, loop in LOOPS.items() if loop.families == TEXT_SIX
]  # the rest: test_loop_outcomes.py


def check(ranks, name, family, layout, root):
    """Run one loop on one layout."""
    sizes, folder = LAYOUTS[layout], folder_of(family, root)
    nprocs = sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("dp", 1)
    found = ranks.run(scheduled, nprocs, name, family, folder, sizes)
    words = LOOPS[name].words(sizes)
    for each in found:
        assert isinstance(each, str) is (words is not None), each
        assert words is None or words in each
    if words is None:
        assert_cell(found[0], name, family, folder)


def diagonal():
    """Return every loop on one mesh (those with further values on two), so that every family occurs."""
    families, layouts, cells = TEXT_SIX, list(LAYOUTS), []
    for i, name in enumerate(NAMES):
        for j in range(1 if name.startswith(("hand", "loss_fn")) else 2):
            cells.append((name, families[(i + j) % 6], layouts[(i + i // 6 + 3 * j) % 6]))
    return cells


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    """Return the folder of the tiny checkpoints."""
    return tmp_path_factory.mktemp("loops")


@pytest.mark.one_in(2, 6)
@pytest.mark.parametrize(
    ("name", "family", "layout"), diagonal(), ids=lambda x: x.replace(" ", "-")
)
def test_user_training_loop_on_a_layout_has_the_gradients_of_plain_transformers(
    ranks, name, family, layout, root
):
    check(ranks, name, family, layout, root)


@pytest.mark.slow
@pytest.mark.parametrize("family", TEXT_SIX)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES, ids=lambda x: x.replace(" ", "-"))
def test_every_user_training_loop_on_every_layout_has_the_gradients_of_plain_transformers(
    ranks, name, family, layout, root
):
    check(ranks, name, family, layout, root)


MORE = {
    "copies of shards": {"dp": 4, "dp_shard": 2},
    "beside tp": {"tp": 2, "dp": 2, "dp_shard": 2, "sequence_parallel": True},
    "recomputed": {"dp": 2, "dp_shard": 2, "checkpoint_ratio": 1.0},
    "recomputed whole": {"dp": 2, "dp_shard": 2, "zero_stage": 2, "checkpoint_ratio": 1.0},
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name",
    ["hand log-probabilities", pytest.param("accumulation no_sync", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("layout", MORE, ids=lambda x: x.replace(" ", "-"))
def test_user_training_loops_with_dp_shard_have_the_gradients_of_plain_transformers(
    ranks, name, layout, root
):
    """`.grad` is this rank's rows of the gradient averaged over dp, with any other sharding beside."""
    sizes, folder = MORE[layout], folder_of("gpt2", root)
    found = ranks.run(scheduled, sizes.get("tp", 1) * sizes["dp"], name, "gpt2", folder, sizes)
    assert not any(isinstance(each, str) for each in found), found
    assert_cell(found[0], name, "gpt2", folder)
