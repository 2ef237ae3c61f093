"""Slow ranks are waited for, stopped ones are named, and errors reach all ranks under any launcher."""

import gc
import multiprocessing
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from slapo_zoo.errors import MeshError, RankError, WeightsError
from slapo_zoo.parallel import compat
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.ranks import heartbeat, killed_rank, patience, process_group
from slapo_zoo.parallel.ranks.agreement import together
from slapo_zoo.parallel.ranks.killed_rank import rank_guard
from slapo_zoo.parallel.ranks.process_group import init_distributed, shutdown_distributed
from slapo_zoo.parallel.ranks.store import local_store
from slapo_zoo.weights import save as saving
from slapo_zoo.weights.save import save_folder


def mesh_of(size):
    return Mesh(dp=size, rank=dist.get_rank())


def entry(rank, size, port, fn, args, pipe):
    """Run a rank as srun starts it: rank 0 holds the store, no launcher watches."""
    gc.freeze()  # groups of the parent are not ours to free
    torch.set_num_threads(1)
    for name in list(os.environ):
        if "ELASTIC" in name:
            del os.environ[name]
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    begin = time.monotonic()
    try:
        pipe.send((fn(rank, *args), time.monotonic() - begin))
    except Exception as error:
        pipe.send((f"{type(error).__name__}: {error}", time.monotonic() - begin))


def as_by_srun(fn, size, *args, timeout=120):
    """Run ranks as srun starts them; return the result or error and the seconds of each, None for one that died."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    pipes, started = [], []
    for rank in range(size):
        ours, theirs = context.Pipe(duplex=False)
        arguments = (rank, size, port, fn, args, theirs)
        started.append(context.Process(target=entry, args=arguments, daemon=True))
        started[-1].start()
        theirs.close()
        pipes.append(ours)
    found = []
    for pipe in pipes:
        try:
            found.append(pipe.recv() if pipe.poll(timeout) else "hangs")
        except EOFError:
            found.append(None)
        finally:
            pipe.close()
    for process in started:
        process.kill()
        process.join()
    return found


def ring_with_a_failure(rank, guilty):
    """Let each rank wait only for its neighbour, so that not all notice the end of one."""
    killed_rank.LINGER_S = 2.0  # of this process: ranks 2 and 3 wait until rank 0 has ended
    init_distributed(device="cpu")
    heartbeat.current()
    with rank_guard("train_step"):
        dist.barrier()
        if rank == guilty:
            raise ValueError("the disk of this node is on fire")
        x = torch.zeros(1)
        dist.recv(x, {0: guilty, 2: 0, 3: 2}[rank])
    return "went on"


def test_error_of_one_rank_is_raised_on_every_rank_without_a_launcher():
    found = as_by_srun(ring_with_a_failure, 4, 1)
    for rank, (text, seconds) in enumerate(found):
        assert "the disk of this node is on fire" in text, found
        assert seconds < 60
        if rank != 1:
            assert text.startswith("RankError: rank 1: train_step: ValueError")


def stalled(rank, place, seconds):
    """Delay rank 0 beyond the collective timeout, at one place of the program."""
    process_group.TIMEOUT_S = 2.0
    if place == "start" and rank == 0:
        time.sleep(seconds)
    init_distributed(device="cpu")
    mesh = mesh_of(2)

    def work():
        if place == "first" and rank == 0:
            time.sleep(seconds)
        return rank

    with rank_guard("load"):
        if place == "before" and rank == 0:
            time.sleep(seconds)
        found = together(mesh, "load", work)
    dist.barrier()
    shutdown_distributed()
    return found


@pytest.mark.one_in(3)
@pytest.mark.parametrize("place", ["start", "before", "first"])
def test_gather_of_objects_waits_longer_than_the_collective_timeout(place):
    found = as_by_srun(stalled, 2, place, 4.0)
    assert [text for text, _ in found] == [[0, 1], [0, 1]], found


def stalled_save(rank, folder, place, seconds):
    from shards import local_tensors, model

    process_group.TIMEOUT_S = 2.0
    init_distributed(device="cpu")
    specs, full = model(1)
    mesh = Mesh(tp=2, rank=rank)
    if rank == 0:
        kept = getattr(saving, place) if place == "_reserve" else getattr(saving.Staging, place)

        def slow(*args):
            time.sleep(seconds)
            return kept(*args)

        setattr(saving if place == "_reserve" else saving.Staging, place, slow)
    save_folder(folder, specs, local_tensors(specs, full, mesh), mesh)
    dist.barrier()
    shutdown_distributed()
    return "saved"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("place", ["create", "publish"])
def test_save_succeeds_when_the_disk_of_one_rank_stalls_for_seconds(tmp_path, place):
    found = as_by_srun(stalled_save, 2, tmp_path / "out", place, 4.0)
    assert [text for text, _ in found] == ["saved", "saved"], found
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("place", ["start", "before", "first"])
def test_gather_of_objects_waits_two_minutes_for_a_slow_rank(place):
    found = as_by_srun(stalled, 2, place, 120.0, timeout=300)
    assert [text for text, _ in found] == [[0, 1], [0, 1]], found


@pytest.mark.slow
@pytest.mark.parametrize("place", ["create", "publish"])
def test_save_waits_two_minutes_for_a_slow_disk(tmp_path, place):
    found = as_by_srun(stalled_save, 2, tmp_path / "out", place, 120.0, timeout=300)
    assert [text for text, _ in found] == ["saved", "saved"], found


def waits_for_a_stopped_rank(rank, where, silence):
    patience.SILENCE_S = silence
    os.environ[process_group.VARIABLE] = "8"
    init_distributed(device="cpu")
    together(mesh_of(2), "warm", lambda: None)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    with rank_guard("train_step"):
        if where == "together":
            together(mesh_of(2), "save", lambda: None)
        else:
            dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("where", ["together", pytest.param("collective", marks=pytest.mark.slow)])
def test_error_of_a_timed_out_collective_names_the_stopped_rank(where):
    (text, seconds), other = as_by_srun_but_first(waits_for_a_stopped_rank, where, 3.0)
    assert seconds < 90
    assert "rank 1" in text
    assert ("no heartbeat arrived" in text) or ("timed out after 8 s waiting for rank 1" in text), (
        text
    )
    assert "killed" not in text
    assert other is None


def as_by_srun_but_first(fn, *args):
    """Run ranks as srun starts them, of which the second never answers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    _, nobody = context.Pipe(duplex=False)
    started = [
        context.Process(target=entry, args=(rank, 2, port, fn, args, pipe), daemon=True)
        for rank, pipe in ((0, theirs), (1, nobody))
    ]
    for process in started:
        process.start()
    theirs.close()
    try:
        assert ours.poll(120), "rank 0 hangs"
        return ours.recv(), None
    finally:
        for process in started:
            process.kill()
            process.join()


def test_process_group_timeout_is_taken_from_the_argument_then_the_environment_variable(
    monkeypatch,
):
    assert process_group.timeout_of(None) == 60
    assert process_group.timeout_of(None, over_nccl=True) == 600
    monkeypatch.setenv(process_group.VARIABLE, "300")
    assert process_group.timeout_of(None) == process_group.timeout_of(None, over_nccl=True) == 300
    assert process_group.timeout_of(5) == 5
    for text in ("soon", "-1", "0", "nan"):
        monkeypatch.setenv(process_group.VARIABLE, text)
        with pytest.raises(MeshError, match="expected seconds"):
            process_group.timeout_of(None)


def test_error_of_a_failed_start_names_the_rank_that_never_started():
    store = local_store()
    with pytest.raises(dist.DistStoreError, match=r"timed out after 0.2 s waiting for rank 1, 2"):
        process_group.meet(store, 0, 3, 0.2)


def test_local_store_listens_on_the_loopback_interface_only():
    store = local_store()
    listening = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    port = f":{store.port:04X}"
    rows = [line.split() for line in listening.splitlines()]
    found = [row[1] for row in rows if row[1].endswith(port) and row[3] == "0A"]
    assert found == [f"0100007F{port}"]


def error_in_a_step(folder):
    mesh = mesh_of(2)

    def work():
        if mesh.rank == 1:
            raise WeightsError("x", "y", "z")

    with pytest.raises((WeightsError, RankError), match="z"):
        together(mesh, "step", work)
    return together(mesh, "again", lambda: mesh.rank)


def test_train_step_after_a_failed_step_succeeds_on_every_rank(ranks, tmp_path):
    assert ranks.run(error_in_a_step, 2, tmp_path) == [[0, 1], [0, 1]]


def hearts():
    """Return the heartbeat threads after process groups were made and destroyed repeatedly."""
    together(mesh_of(2), "step", lambda: None)
    begin = time.monotonic()  # the thread of a group that has gone ends with its next beat
    while (count := sum(thread.name == "heartbeat" for thread in threading.enumerate())) > 1:
        if time.monotonic() - begin > 5 * heartbeat.BEAT_S:
            break
        time.sleep(0.05)
    return count


def test_repeated_jobs_keep_one_heartbeat_thread_per_rank(ranks):
    for _ in range(3):
        assert ranks.run(hearts, 2) == [1, 1]


def late_to_a_patient_group(rank):
    """Delay rank 0 longer than the group's setup limit, shorter than its timeout."""
    init_distributed(device="cpu")
    compat.MADE_WITHIN_S = 2.0
    group = compat.patient_group(60.0)
    if rank == 0:
        time.sleep(4.0)
    x = torch.ones(1)
    dist.all_reduce(x, group=group)
    shutdown_distributed()
    return float(x)


def test_collective_in_a_group_with_a_long_timeout_waits_longer_than_the_setup_limit():
    assert [text for text, _ in as_by_srun(late_to_a_patient_group, 2)] == [2.0, 2.0]


def gone_before_the_group(rank):
    init_distributed(device="cpu")
    compat.MADE_WITHIN_S = 3.0
    if rank == 1:
        os._exit(9)
    with rank_guard("load"):
        compat.patient_group(3600.0)


@pytest.mark.slow
def test_rank_that_dies_before_the_group_is_created_raises_on_its_peers():
    found = as_by_srun(gone_before_the_group, 2)
    text, seconds = found[0]
    assert text.startswith("RankError"), found
    assert seconds < 45
