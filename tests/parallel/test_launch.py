"""Local ranks: results, one failure stops all, no process is left."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from slapo_zoo.errors import MeshError, RankError, ScheduleError, SlapoError
from slapo_zoo.parallel.ranks import killed_rank, process_group
from slapo_zoo.parallel.ranks.killed_rank import peer_error, publish_error, rank_guard
from slapo_zoo.parallel.ranks.launch import run_local
from slapo_zoo.parallel.ranks.process_group import is_distributed_launch
from slapo_zoo.parallel.ranks.stop_signals import listening
from slapo_zoo.zoo import argument_values


def rank_sum(offset):
    value = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(value)
    return dist.get_rank(), value, os.getpid(), torch.get_num_threads()


def fail_on(rank, how):
    if dist.get_rank() == rank:
        how()
    dist.all_reduce(torch.ones(1))
    time.sleep(600)


def raise_value_error():
    raise ValueError("a bad number")


def raise_schedule_error():
    raise ScheduleError("h.0", "shard", "found 1, expected 2", "do this")


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


def ignore_sigterm_and_hang():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def give_up():
    sys.exit(3)


def listen_late():
    time.sleep(0.3)  # as a load takes time
    with listening() as stop:
        end = time.monotonic() + 20
        while not stop.number and time.monotonic() < end:
            time.sleep(0.01)
        return stop.number


def stop_when_started(count, before):
    while len({*multiprocessing.active_children()} - before) < count:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)


def unpicklable():
    return lambda: None


def write_pid_and_wait(folder):
    (folder / str(dist.get_rank())).write_text(str(os.getpid()))
    time.sleep(600)


BEFORE = set()


@pytest.fixture(autouse=True)
def before():
    """Return the processes of earlier tests' rank pools."""
    BEFORE.clear()
    BEFORE.update(multiprocessing.active_children())


def assert_nothing_is_left():
    """Fail where a new child process is alive, or a zombie."""
    assert not set(multiprocessing.active_children()) - BEFORE
    for path in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        for pid in path.read_text().split():
            assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_run_local_returns_results_in_rank_order():
    results = run_local(rank_sum, 3, (10,), threads=1)
    assert [(rank, value.item()) for rank, value, _, _ in results] == [(0, 33), (1, 33), (2, 33)]
    assert [threads for *_, threads in results] == [1, 1, 1]
    assert len({pid for _, _, pid, _ in results} | {os.getpid()}) == 4
    assert_nothing_is_left()


def test_spawned_ranks_return_the_same_results_as_forked_ranks():
    (result,) = run_local(rank_sum, 1, (5,), start="spawn", threads=2)
    assert (result[0], result[1].item(), result[3]) == (0, 5, 2)


@pytest.mark.parametrize("guilty", [0, 1, 2])
def test_run_local_stops_all_ranks_at_the_first_error(guilty):
    begin = time.monotonic()
    with pytest.raises(RankError, match=rf"rank {guilty}: fail_on: ValueError: a bad") as caught:
        run_local(fail_on, 3, (guilty, raise_value_error), threads=1)
    assert time.monotonic() - begin < 20
    assert "in raise_value_error" in caught.value.traceback_text
    assert isinstance(caught.value.__cause__, ValueError)
    assert_nothing_is_left()


def test_run_local_raises_the_slapo_error_of_a_rank_with_its_where_and_hint():
    with pytest.raises(RankError, match=r"ScheduleError: h\.0: shard: found 1, exp") as caught:
        run_local(fail_on, 2, (1, raise_schedule_error), threads=1)
    assert (caught.value.where, caught.value.hint) == ("rank 1", "do this")


@pytest.mark.parametrize(
    ("how", "problem"),
    [(kill_self, "killed by SIGKILL"), (give_up, "ended with exit code 3 and no result")],
)
def test_run_local_raises_and_leaves_no_process_when_a_rank_dies(how, problem):
    with pytest.raises(RankError, match=f"rank 0: fail_on: {problem}"):
        run_local(fail_on, 2, (0, how), threads=1)
    assert_nothing_is_left()


def test_run_local_timeout_names_and_ends_the_running_ranks():
    begin = time.monotonic()
    with pytest.raises(RankError, match=r"rank 0, 1: fail_on: still running after 0\.5 s"):
        run_local(fail_on, 2, (1, ignore_sigterm_and_hang), timeout=0.5, threads=1)
    assert time.monotonic() - begin < 15
    assert_nothing_is_left()


def test_run_local_with_unpicklable_result_raises():
    with pytest.raises(RankError, match="rank 0: unpicklable:"):
        run_local(unpicklable, 1, threads=1)


def test_run_local_with_0_ranks_raises():
    with pytest.raises(MeshError, match="found 0"):
        run_local(rank_sum, 0)


def test_ranks_of_run_local_exit_when_their_parent_process_dies(tmp_path):
    code = (
        f"from test_launch import *; run_local(write_pid_and_wait, 2, (Path({str(tmp_path)!r}),))"
    )
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(
            map(str, (Path(__file__).parent, Path(__file__).parents[1] / "support"))
        ),
        "OMP_NUM_THREADS": "1",
    }
    parent = subprocess.Popen([sys.executable, "-P", "-c", code], env=environment)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.1)
    pids = [int(path.read_text()) for path in tmp_path.iterdir()]
    parent.kill()
    parent.wait()
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_process_without_launcher_variables_is_not_treated_as_a_distributed_run(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert not is_distributed_launch()
    assert peer_error() is None
    publish_error(ValueError("nobody reads this"))
    with pytest.raises(ValueError, match="as it was"), rank_guard("work"):
        raise ValueError("as it was")


def test_slurm_variables_are_detected_as_a_distributed_launch(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"):
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert not is_distributed_launch()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert is_distributed_launch()


def guarded(guilty):
    """Raise on rank `guilty`, while the others wait for it in a collective."""
    try:
        with rank_guard("step"):
            if dist.get_rank() == guilty:
                raise_schedule_error()
            dist.all_reduce(torch.ones(1))
    except SlapoError as error:
        dist.destroy_process_group()
        return type(error).__name__, str(error), getattr(error, "traceback_text", "")
    return None


def test_peers_of_a_failed_rank_raise_the_error_of_that_rank(ranks):
    begin = time.monotonic()
    first, guilty, third = ranks.run(guarded, 3, 1)
    assert time.monotonic() - begin < 20
    assert guilty[0] == "ScheduleError"
    for name, text, traceback_text in (first, third):
        assert name == "RankError"
        assert text.startswith("rank 1: step: ScheduleError: h.0: shard: found 1, expected 2")
        assert "in raise_schedule_error" in traceback_text


def vanish():
    try:
        with patch.multiple(killed_rank, ERROR_WAIT_S=1.0, SILENT_S=1.0), rank_guard("step"):
            if dist.get_rank() == 1:
                dist.destroy_process_group()
            else:
                dist.all_reduce(torch.ones(1))
    except RankError as error:
        return str(error)
    return None


def test_train_step_raises_when_a_peer_rank_exits_without_error(ranks):
    text, nothing = ranks.run(vanish, 2)
    assert text.startswith("rank 0: step: lost contact with ")
    assert nothing is None


SCRIPT = """
import sys, torch, torch.distributed as dist
from slapo_zoo.parallel.ranks.killed_rank import rank_guard
from slapo_zoo.parallel.ranks.process_group import init_distributed
init_distributed()
with rank_guard("step"):
    if dist.get_rank() == 0:
        raise ValueError("a bad number")
    dist.all_reduce(torch.ones(1))
"""


def test_peers_of_a_failed_rank_under_torchrun_raise_the_error_of_that_rank(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", "--redirects=3", f"--log-dir={tmp_path}", "train.py"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=tmp_path, env=environment, timeout=60, check=False)
    assert result.returncode != 0
    errors = "".join(path.read_text() for path in tmp_path.glob("**/stderr.log"))
    assert "a bad number" in errors


@pytest.mark.parametrize(
    "shown, local, expected",
    [(("ab", "ab"), (0, 1), [0, 1]), (("a", "b"), (0, 1), [0, 0]), (("ab", "ab"), (None, None), [0, 1]),
     (("a", "a"), (0, 1), [None, None]), (("a", ""), (0, 0), [None, None])],
    ids=["torchrun", "each sees its own", "by hand", "one GPU for two", "a machine without"],
)  # fmt: skip
def test_each_rank_takes_a_gpu_of_its_own_or_none_does(monkeypatch, shown, local, expected):
    """`shown` lists the GPUs that rank 0 and rank 1 see, by name. A rank may join again, after it has left."""
    store, found = dist.HashStore(), []
    for rank in (0, 1):
        store.set(f"slapo_zoo/has_gpu/{rank}", "1")  # until the rank says it: the ranks run in turn
    for rank in (0, 1, 0, 1):
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        if local[rank] is not None:
            monkeypatch.setenv("LOCAL_RANK", str(local[rank]))
        named = [SimpleNamespace(uuid=name) for name in shown[rank]]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(named))  # noqa: B023
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(named))  # noqa: B023
        monkeypatch.setattr(torch.cuda, "get_device_properties", named.__getitem__)
        monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
        found.append(process_group._own_gpu(store, rank, 2))
    assert [one and one.index for one in found[2:]] == expected


@pytest.mark.parametrize(("bound", "expected"), [(None, [3]), (torch.device("cuda", 1), [1])])
def test_load_takes_the_gpu_of_local_rank_or_of_the_process_group(monkeypatch, bound, expected):
    """After `init_process_group("nccl")` the current GPU of every rank is number 0."""
    world, taken = SimpleNamespace(bound_device_id=bound), []
    group = SimpleNamespace(is_initialized=lambda: True, group=SimpleNamespace(WORLD=world))
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(argument_values, "dist", group)
    monkeypatch.setattr(argument_values, "is_for_gpus", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: taken.append(device.index))
    assert argument_values.pick_device("cuda").type == "cuda"
    assert taken == expected


@pytest.mark.parametrize("device, start", [(None, "spawn"), ("cuda", "spawn"), ("cpu", "fork")])
def test_local_ranks_that_may_use_a_gpu_are_spawned_not_forked(monkeypatch, device, start):
    """A fork of a process that has asked CUDA for its devices cannot use them."""

    def context(name):
        raise InterruptedError(name)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(multiprocessing, "get_context", context)
    with pytest.raises(InterruptedError, match=start):
        run_local(rank_sum, 2, threads=1, device=device)


def test_local_ranks_are_spawned_if_autograd_has_threads_in_this_process(monkeypatch):
    """A CUDA build of torch starts them for the ranks of `emulate`; a forked rank could run no backward."""
    named, done = threading.Event(), threading.Event()

    def work():
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_autograd_0")
        named.set()
        done.wait()

    def context(name):
        done.set()
        raise InterruptedError(name)

    threading.Thread(target=work).start()
    named.wait()
    monkeypatch.setattr(multiprocessing, "get_context", context)
    with pytest.raises(InterruptedError, match="spawn"):
        run_local(rank_sum, 2, threads=1, device="cpu")


def test_stop_signal_that_comes_before_the_local_ranks_listen_reaches_them():
    """A run whose model was still loading went on to its last step."""
    with listening():
        before = {*multiprocessing.active_children()}  # of earlier tests
        threading.Thread(target=stop_when_started, args=(2, before), daemon=True).start()
        assert run_local(listen_late, 2, threads=1) == [signal.SIGUSR1] * 2
