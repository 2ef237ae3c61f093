"""The expert_parallel primitive: its errors. tests/zoo/test_experts.py and tests/zoo/test_zoo.py compare results."""

import pytest
import torch
from torch import nn

from slapo_zoo import Mesh, Schedule
from slapo_zoo.errors import ScheduleError


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_experts = 5
        self.up = nn.Parameter(torch.zeros(5, 3, 2))


def schedule(rank=0):
    return Schedule(nn.Sequential(Experts()), Mesh(tp=2, rank=rank))


@pytest.mark.parametrize(("rank", "local"), [(0, 3), (1, 2)])
def test_expert_parallel_sets_num_experts_to_the_number_of_local_experts(rank, local):
    sch = schedule(rank)
    sch["0"].shard("up", 0, uneven=True).expert_parallel()
    assert sch["0"].mod.num_experts == local == len(sch["0"].mod.up)


def test_expert_parallel_on_unsharded_parameters_is_refused():
    with pytest.raises(ScheduleError, match="up is not sharded to 3 of 5 experts on axis 0"):
        schedule()["0"].expert_parallel()


def test_expert_parallel_with_a_name_that_is_no_integer_attribute_is_refused():
    with pytest.raises(ScheduleError, match="expected an integer attribute 'experts'"):
        schedule()["0"].expert_parallel("experts")


def test_expert_parallel_forward_on_meta_tensors_returns_the_full_output_shape():
    sch = Schedule(nn.Sequential(Experts()), Mesh(tp=2, dry_run=True))
    sch["0"].shard("up", 0, uneven=True).expert_parallel()
    with torch.device("meta"):
        x, index, weight = torch.ones(4, 2), torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
    assert sch["0"].mod(x, index, weight).shape == (4, 2)
