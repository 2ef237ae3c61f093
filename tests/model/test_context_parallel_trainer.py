"""ScheduledTrainer on tokens cut over cp equals the plain Trainer in one process."""

import pytest

from engine_runs import CASES
from parity import checkpoint
from trainer_runs import assert_same, divided, plain

SMOOTH = {"label_smoothing_factor": 0.1}
CUT = [  # layout, family, loss of the Trainer's own
    ((1, 1, 1), "gpt2", SMOOTH),
    pytest.param((1, 1, 1), "gpt2", {}, marks=pytest.mark.slow),
    pytest.param((1, 1, 2), "gpt2", {}, marks=pytest.mark.slow),
    pytest.param((1, 1, 2), "gpt2", SMOOTH, marks=pytest.mark.slow),
    pytest.param((2, 1, 1), "bert", SMOOTH, marks=pytest.mark.slow),
    # with accumulation the plain Trainer doubles the loss of T5 and of classes, which take no count of targets
    pytest.param((1, 1, 2), "classes", {"gradient_accumulation_steps": 1}, marks=pytest.mark.slow),
    pytest.param(
        (1, 1, 1), "classes", SMOOTH | {"gradient_accumulation_steps": 1}, marks=pytest.mark.slow
    ),
    pytest.param((1, 2, 1), "t5", {"gradient_accumulation_steps": 1}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("layout", "family", "own_loss"), CUT)
def test_scheduled_trainer_with_cp_has_the_losses_and_weights_of_the_plain_trainer(
    layout, family, own_loss, tmp_path, ranks
):
    """With cp=2: the ranks of a cp group read the same rows, and the rows of a step are counted once."""
    folder = checkpoint(CASES[family], tmp_path)
    dp = layout[2]
    shared = {"gradient_accumulation_steps": 2, "per_device_eval_batch_size": 1, **own_loss}
    expected = plain(folder, tmp_path, family, per_device_train_batch_size=4, **shared)
    mine = {"per_device_train_batch_size": 4 // dp, **shared}
    world = layout[0] * layout[1] * dp * 2
    arguments = folder, tmp_path, layout, mine, None, None, False, family, 2
    for found in ranks.run(divided, world, *arguments, timeout=300):
        assert_same((*found[:2], found[2] or expected[2], found[3]), expected)
