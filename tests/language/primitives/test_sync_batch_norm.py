"""The sync_batch_norm primitive on one rank; tests/zoo/test_wideresnet.py tests several."""

import pytest
import torch
from torch import nn

from slapo_zoo import Schedule
from slapo_zoo.errors import ScheduleError


def test_sync_batch_norm_on_one_rank_is_bit_equal_to_batch_norm():
    plain, mine = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    Schedule(nn.Sequential(mine))["0"].sync_batch_norm()
    for training in (True, True, False):
        x = torch.randn(2, 3, 4, 4)
        assert torch.equal(mine.train(training)(x), plain.train(training)(x))
    assert all(torch.equal(a, b) for a, b in zip(mine.buffers(), plain.buffers(), strict=True))


def test_step_with_recomputation_updates_batch_norm_statistics_only_once():
    norm = nn.BatchNorm2d(3)
    sch = Schedule(nn.Sequential(nn.Sequential(norm)))
    sch["0.0"].sync_batch_norm()
    sch["0"].checkpoint()
    sch.model(torch.randn(2, 3, 4, 4, requires_grad=True)).sum().backward()
    assert int(norm.num_batches_tracked) == 1


@pytest.mark.parametrize(
    ("module", "problem"),
    [(nn.Linear(3, 3), "found Linear"), (nn.BatchNorm2d(3, momentum=None), "momentum is None")],
)
def test_sync_batch_norm_refuses_layers_other_than_batch_norm(module, problem):
    with pytest.raises(ScheduleError, match=problem):
        Schedule(nn.Sequential(module))["0"].sync_batch_norm()
