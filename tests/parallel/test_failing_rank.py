"""Failures of one rank in the middle of a step: all ranks stop with its error, and none hangs."""

import errno
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from parity import batch_of, checkpoint
from refusals import BERT, GPT2
from slapo_zoo import (
    AutoScheduledModel,
    RankError,
    SlapoError,
    emulate,
    save_checkpoint,
)
from slapo_zoo.errors import WeightsError
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.placement import TensorSpec
from slapo_zoo.parallel.ranks import heartbeat
from slapo_zoo.parallel.ranks.agreement import together
from slapo_zoo.parallel.ranks.launch import run_local
from slapo_zoo.weights import save
from slapo_zoo.weights.save import save_folder


@pytest.fixture(scope="session")
def sources(tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    return {"gpt2": checkpoint(GPT2, root), "bert": checkpoint(BERT, root)}


def error_of_step(folder, tp, pp, guilty, how):
    """Return the error of this rank after rank `guilty` raised; then the process ends."""
    model = AutoScheduledModel.from_pretrained(folder, tp=tp, pp=pp).train()
    model.train_step(batch_of(GPT2))
    if dist.get_rank() == guilty:
        sabotage(model, how)
    begin = time.monotonic()
    try:
        model.train_step(batch_of(GPT2), micro_batches=4)
    except (SlapoError, ValueError, RuntimeError) as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return None


def sabotage(model, how):
    """Make the MLP of a block on this rank raise when it is called for the second time."""
    blocks = [b for b in model.transformer.h if type(b).__name__ == "GPT2Block"]
    calls = []

    def hook(module, args, *rest):
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("the disk of this node is on fire")

    if how == "forward":
        blocks[-1].mlp.register_forward_pre_hook(hook)
    else:
        blocks[-1].mlp.register_full_backward_hook(hook)


@pytest.mark.one_in(3, 2)
@pytest.mark.parametrize("how", ["forward", "backward"])
@pytest.mark.parametrize(
    ("tp", "pp", "guilty"), [(2, 1, 1), (1, 2, 0), (1, 2, 1), (2, 2, 1), (2, 2, 2)]
)
def test_error_in_train_step_on_one_rank_is_raised_on_all_ranks(tp, pp, guilty, how, sources):
    arguments = (sources["gpt2"], tp, pp, guilty, how)
    results = run_local(error_of_step, tp * pp, arguments, threads=1, timeout=60)
    for rank, (kind, text, seconds) in enumerate(results):
        assert seconds < 60
        assert "the disk of this node is on fire" in text
        if rank != guilty:
            assert kind == "RankError"
            assert text.startswith(f"rank {guilty}: train_step: ")


def error_after_a_handled_one(folder, out):
    """Let rank 1 fail to save, continue on all ranks, then let rank 0 fail in a step."""
    model = AutoScheduledModel.from_pretrained(folder, tp=2).train()
    writing = save.write_tensors
    if dist.get_rank() == 1:
        save.write_tensors = full
    with pytest.raises((WeightsError, RankError), match="No space left"):
        save_checkpoint(model, out, step=1)
    save.write_tensors = writing
    if dist.get_rank() == 0:
        sabotage(model, "forward")
    with pytest.raises((RankError, ValueError)) as caught:
        model.train_step(batch_of(GPT2), micro_batches=4)
    return type(caught.value).__name__, str(caught.value)


def full(*args):
    raise OSError(errno.ENOSPC, "No space left on device", "x")


def test_error_of_a_failed_rank_does_not_name_an_earlier_handled_error(sources, tmp_path):
    arguments = (sources["gpt2"], tmp_path / "out")
    guilty, other = run_local(error_after_a_handled_one, 2, arguments, threads=1, timeout=60)
    assert guilty == ("ValueError", "the disk of this node is on fire")
    assert other[0] == "RankError"
    assert other[1].startswith("rank 0: train_step: ValueError: the disk of this node is on fire")


def train_until_it_fails(folder):
    model = AutoScheduledModel.from_pretrained(folder, tp=2).train()
    if dist.get_rank() == 1:
        sabotage(model, "backward")
    for step in range(4):
        model.train_step(batch_of(GPT2, step))


def test_run_local_raises_the_error_of_the_failed_rank(sources):
    begin = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1: .*: ValueError: the disk .* on fire") as caught:
        run_local(train_until_it_fails, 2, (sources["gpt2"],), threads=1)
    assert time.monotonic() - begin < 60
    assert "sabotage" in caught.value.traceback_text or "hook" in caught.value.traceback_text


def fails_on_rank_0():
    if dist.get_rank() == 0:
        raise ValueError("rank 0 fails")
    dist.barrier()


def test_failed_rank_0_of_emulated_ranks_does_not_wait_until_its_peers_have_read_the_error(
    monkeypatch,
):
    """The store of ranks that are threads outlives rank 0."""
    asked = []
    monkeypatch.setattr(heartbeat.Heart, "not_told", lambda self: asked.append(self) or [])
    with pytest.raises(ValueError, match="rank 0 fails"):
        emulate(fails_on_rank_0, mesh=(2, 1, 1))
    assert not asked


SCRIPT = """
import sys
sys.path[:0] = sys.argv[2:]
from test_failing_rank import train_until_it_fails
train_until_it_fails(sys.argv[1])
"""


@pytest.mark.slow
def test_torchrun_prints_the_error_of_the_failed_rank(sources, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", "--redirects=3", f"--log-dir={tmp_path / 'log'}", "train.py"]
    command += [
        str(sources["gpt2"]),
        str(Path(__file__).parent),
        str(Path(__file__).parents[1] / "support"),
    ]
    begin = time.monotonic()
    result = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=120, check=False,
        capture_output=True,
    )  # fmt: skip
    assert time.monotonic() - begin < 60
    assert result.returncode != 0
    errors = {p.parent.name: p.read_text() for p in (tmp_path / "log").glob("**/stderr.log")}
    assert "ValueError: the disk of this node is on fire" in errors["1"]
    if "RankError" in errors["0"]:  # or torchrun was faster in stopping it
        assert "rank 1: train_step: " in errors["0"]


LEAVES = """
import torch.distributed as dist
from slapo_zoo import init_distributed
from slapo_zoo.parallel.ranks import heartbeat
heartbeat.BEAT_S = 1e-5  # in the store nearly all the time
init_distributed(device="cpu")
dist.barrier()
kept = [[] for _ in range(300_000)]  # the end of the interpreter takes a while
assert heartbeat.current() is not None
dist.destroy_process_group()
"""


def test_program_that_destroys_its_process_group_exits_with_code_0(tmp_path):
    """Destroy the process group as hand-written loops and Accelerate do: no thread uses the store when Python ends."""
    (tmp_path / "leaves.py").write_text(LEAVES)
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    where = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    started = [subprocess.Popen([sys.executable, "leaves.py"], cwd=tmp_path, stderr=subprocess.PIPE,
                                env=os.environ | where | {"RANK": str(r), "LOCAL_RANK": str(r)})
               for r in range(2)]  # fmt: skip
    for process in started:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err.decode()


def save_on_rank_0_first(folder):
    mesh = Mesh(dp=2, rank=dist.get_rank())
    specs, tensors = [TensorSpec("w", (2,), "float32")], {"w": torch.ones(2)}
    try:
        if mesh.rank == 0:
            save_folder(folder / "alone", specs, tensors, mesh)
        return together(mesh, "evaluate", lambda: mesh.rank)
    except RankError as error:
        return str(error)


def test_ranks_that_call_different_steps_raise_an_error_that_names_both_steps(threads, tmp_path):
    errors = threads.run(save_on_rank_0_first, 2, tmp_path)
    assert all("rank 0 is at save_folder, rank 1 at evaluate" in text for text in errors)
    assert not list(tmp_path.iterdir())
