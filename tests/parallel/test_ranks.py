"""The rank pool that the other tests use."""

import ctypes
import os
import signal
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh

import slapo_zoo
from slapo_zoo.errors import RankError, ScheduleError


class Box:
    """Argument of a class that only this test module defines."""

    def __init__(self, value):
        self.value = value


def all_reduce(box):
    value = torch.tensor([float(dist.get_rank() + box.value)])
    dist.all_reduce(value)
    return dist.get_rank(), dist.get_world_size(), value.item(), os.getpid()


def draw():
    return torch.rand(3), os.environ["RANK"], torch.get_num_threads()


def mesh(sizes):
    device_mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b"))
    value = torch.ones(1)
    dist.all_reduce(value, group=device_mesh.get_group("a"))
    return value.item()


def places():
    """Return where the packages under test come from."""
    return slapo_zoo.__file__, transformers.__file__, torch.__file__


def fail_on(rank, how):
    if dist.get_rank() == rank:
        how()
    dist.barrier()


def raise_schedule_error():
    raise ScheduleError("h.0", "shard", "found 1, expected 2", "do this")


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


def read_nothing():
    ctypes.string_at(0)


def hang():
    time.sleep(600)


def warn():
    warnings.warn("old name", FutureWarning, stacklevel=1)


def state(pid):
    """Return the state letter of a process; X if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def assert_works(ranks, nprocs=2):
    assert [result[0] for result in ranks.run(all_reduce, nprocs, Box(0))] == list(range(nprocs))


def test_ranks_have_the_packages_of_the_test_also_those_on_its_pythonpath(ranks):
    assert ranks.run(places, 1) == [places()]


def test_rank_pool_returns_results_in_rank_order(ranks):
    results = ranks.run(all_reduce, 3, Box(10))
    assert [result[:3] for result in results] == [(0, 3, 33.0), (1, 3, 33.0), (2, 3, 33.0)]
    assert [result[3] for result in results] == ranks.pids[:3]


def test_rank_pool_runs_later_jobs_in_the_same_worker_processes(ranks):
    ranks.run(all_reduce, 2, Box(0))
    before, begin = ranks.pids, time.perf_counter()
    for _ in range(20):
        ranks.run(all_reduce, 2, Box(0))
    assert ranks.pids == before
    assert (time.perf_counter() - begin) / 20 < 0.5


def test_rank_pool_starts_every_rank_with_equal_seed_and_one_thread(ranks):
    (first, rank, threads), (second, other, _) = ranks.run(draw, 2)
    assert torch.equal(first, second)
    assert (rank, other, threads) == ("0", "1", 1)


def test_rank_pool_jobs_of_different_sizes_get_process_groups_of_their_own_size(ranks):
    assert ranks.run(mesh, 2, (2, 1)) == [2.0] * 2
    assert ranks.run(mesh, 4, (2, 2)) == [2.0] * 4
    assert ranks.run(mesh, 3, (3, 1)) == [3.0] * 3
    assert ranks.run(mesh, 1, (1, 1)) == [1.0]


def test_rank_pool_raises_the_original_exception(ranks):
    with pytest.raises(ScheduleError, match="expected 2") as caught:
        ranks.run(fail_on, 3, 1, raise_schedule_error)
    assert caught.value.hint == "do this"
    assert "raise_schedule_error" in "".join(caught.value.__notes__)
    assert_works(ranks, 3)


def test_warnings_in_rank_pool_workers_obey_the_warning_filters_of_the_caller(ranks):
    with pytest.raises(FutureWarning, match="old name"):
        ranks.run(warn, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ranks.run(warn, 1)


def test_rank_pool_raises_an_error_that_names_a_killed_rank(ranks):
    ranks.run(all_reduce, 3, Box(0))
    pids = ranks.pids
    with pytest.raises(RankError, match=r"rank 2: fail_on: killed by SIGKILL"):
        ranks.run(fail_on, 3, 2, kill_self)
    assert {state(pid) for pid in pids[:3]} <= {"X"}
    assert_works(ranks, 3)


def test_rank_pool_shows_the_stack_of_a_rank_ended_by_a_segmentation_fault(ranks):
    with pytest.raises(RankError, match=r"rank 1: fail_on: killed by SIGSEGV") as caught:
        ranks.run(fail_on, 2, 1, read_nothing)
    said = "".join(caught.value.__notes__)
    assert "Segmentation fault" in said
    assert "in read_nothing" in said
    assert_works(ranks)


def test_rank_pool_stops_a_hanging_job_and_shows_its_stack(ranks):
    assert_works(ranks)
    begin = time.monotonic()
    with pytest.raises(RankError, match="still running after 1") as caught:
        ranks.run(fail_on, 2, 1, hang, timeout=1)
    assert time.monotonic() - begin < 10
    assert "in hang" in "".join(caught.value.__notes__)
    assert_works(ranks)


def test_rank_pool_raises_for_an_unpicklable_function_and_keeps_its_workers(ranks):
    assert_works(ranks)
    before = ranks.pids
    with pytest.raises((AttributeError, TypeError), match="local object"):
        ranks.run(lambda: None, 2)
    assert ranks.pids == before


def test_rank_pool_close_ends_all_workers():
    from ranks import RankPool

    pool = RankPool()
    assert_works(pool)
    pids = pool.pids
    pool.close()
    assert {state(pid) for pid in pids} == {"X"}
