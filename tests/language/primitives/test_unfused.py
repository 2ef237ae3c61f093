"""The unfused primitive: it changes only the module's own flag, and only on several ranks."""

import pytest
from torch import nn

from slapo_zoo import Mesh, Schedule
from slapo_zoo.errors import ScheduleError


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Dropout(0.5)

    def forward(self):
        return self.training, self.inner.training


@pytest.mark.parametrize(("tp", "flag"), [(1, True), (2, False)])
def test_unfused_directive_clears_the_training_flag_only_during_the_forward_of_its_module(tp, flag):
    sch = Schedule(nn.Sequential(Mixer()), Mesh(tp=tp))
    sch["0"].unfused()
    mixer = sch["0"].mod.train()
    assert mixer() == (flag, True)
    assert mixer.training


def test_unfused_directive_refuses_a_dropout_module():
    with pytest.raises(ScheduleError, match="the module applies a dropout itself"):
        Schedule(nn.Sequential(nn.Dropout(0.1)))["0"].unfused()
