"""torch's data parallelism around scheduled models: the run of one process, on every layout."""

import pytest

from engine_runs import CASES, assert_same_run, trained
from parity import checkpoint

LAYOUTS = {  # tp, pp, dp, data_parallel
    "tp2": (2, 1, 1, None),
    "dp2-ddp": (1, 1, 2, "ddp"),
    "dp2-fsdp2": (1, 1, 2, "fsdp2"),
    "tp2-dp2-ddp": (2, 1, 2, "ddp"),
    "tp2-dp2-fsdp2": (2, 1, 2, "fsdp2"),
    "tp2-pp2": (2, 2, 1, None),
    "pp2-dp2-ddp": (1, 2, 2, "ddp"),
    "pp2-dp2-fsdp2": (1, 2, 2, "fsdp2"),
}


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("engines")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", CASES)
def test_equals_one_process(family, layout, root, ranks):
    tp, pp, dp, data_parallel = LAYOUTS[layout]
    case, folder = CASES[family], checkpoint(CASES[family], root)
    options = {"data_parallel": data_parallel, "clip": 1.0}
    arguments = (case, folder, (tp, pp, dp), "torch", options, 2)
    results = ranks.run(trained, tp * pp * dp, *arguments)
    assert_same_run(results[0], case, folder)
