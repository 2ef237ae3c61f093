"""torchrun restarts of a job whose ranks are killed: it resumes and ends as an undisturbed run."""

import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from slapo_zoo.parallel.ranks.store import agree_on_round

SCRIPT = Path(__file__).parent / "elastic_train.py"


def descendants(pid):
    """Living or unreaped processes below a process."""
    children = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        children.setdefault(int(fields[1]), []).append((int(stat.parent.name), fields[0]))
    found, todo = [], [pid]
    while todo:
        for child, state in children.get(todo.pop(), []):
            found.append((child, state))
            todo.append(child)
    return found


def torchrun(folder, steps, kills):
    """Run the job; return the digest of the final weights, and the steps at which each start resumed."""
    folder.mkdir()
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "--max-restarts", str(len(kills)), str(SCRIPT), str(folder), str(steps), ",".join(kills),
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, env=env, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    resumed = folder / "resumed"
    starts = resumed.read_text().split()[::2] if resumed.exists() else []
    return (folder / "digest").read_text(), [int(step) for step in starts]


def undisturbed_and_killed(tmp_path, steps, kills):
    before = {pid for pid, _ in descendants(os.getpid())}
    plain, _ = torchrun(tmp_path / "plain", steps, [])
    found, starts = torchrun(tmp_path / "killed", steps, kills)
    assert found == plain
    assert len(list((tmp_path / "killed").glob("killed-*"))) == len(kills)
    assert not {pid for pid, _ in descendants(os.getpid())} - before
    return starts


@pytest.mark.slow
def test_torchrun_restarts_from_the_last_saved_step_after_a_killed_rank(tmp_path):
    assert undisturbed_and_killed(tmp_path, 4, ["2:1"]) == [2]


@pytest.mark.soak
def test_elastic_training_killed_five_times_at_random_resumes_at_each_killed_step(tmp_path):
    draw = random.Random(time.time_ns() if os.environ.get("SLAPO_ZOO_RANDOM") else 0)
    kills = [f"{step}:{draw.randrange(2)}" for step in sorted(draw.sample(range(1, 15), 5))]
    starts = undisturbed_and_killed(tmp_path, 16, kills)
    assert starts == [int(kill.split(":")[0]) for kill in kills]


def meet(store, number, rank, answers):
    answers[number, rank] = agree_on_round(store, rank, 3, 20)


def test_elastic_restart_of_ranks_ignores_store_entries_of_earlier_starts():
    """Start three times over one store, with the ranks in another order each time."""
    store, answers = dist.HashStore(), {}
    for number, order in enumerate([(0, 1, 2), (2, 1, 0), (1, 0, 2)]):
        threads = [threading.Thread(target=meet, args=(store, number, r, answers)) for r in order]
        for thread in threads:
            thread.start()
            time.sleep(0.1)
        for thread in threads:
            thread.join()
    found = [{answers[number, rank] for rank in range(3)} for number in range(3)]
    assert [len(tokens) for tokens in found] == [1, 1, 1]
    assert len(set.union(*found)) == 3


def test_elastic_start_raises_when_rank_0_does_not_answer():
    store = dist.HashStore()
    store.set("slapo_zoo/round", "left by an earlier start")
    store.set("left by an earlier start/answers", "one two")
    with pytest.raises(dist.DistStoreError, match="rank 0 did not answer rank 1"):
        agree_on_round(store, 1, 2, 0.2)


def fail():
    raise ValueError("on purpose")


def test_failing_job_leaves_no_zombie_process(ranks):
    with pytest.raises(ValueError, match="on purpose"):
        ranks.run(fail, 2)
    deadline = time.monotonic() + 20
    while zombies := [p for p in descendants(os.getpid()) if p[1] == "Z"]:
        assert time.monotonic() < deadline, zombies
        time.sleep(0.1)
