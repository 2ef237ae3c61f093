"""Pipeline stages that die or raise in the middle of a step: every other rank stops with the reason."""

import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist

from parity import Case, batch_of, checkpoint
from slapo_zoo import AutoScheduledModel, RankError
from slapo_zoo.errors import SlapoError, StageError
from slapo_zoo.parallel.ranks import killed_rank
from slapo_zoo.parallel.ranks.killed_rank import is_lost_peer
from slapo_zoo.parallel.ranks.launch import _receive, _start_all, stop

GPT2 = Case("GPT2LMHeadModel", ("tokens",), (("n_layer", 8),), rows=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return checkpoint(GPT2, tmp_path_factory.mktemp("killed"))


def build(folder, tp, pp, order):
    return AutoScheduledModel.from_pretrained(
        folder, tp=tp, pp=pp, pipeline_order=order, micro_batches=8
    ).train()


def own_block(model):
    """The last block of this rank."""
    blocks = [b for b in model.transformer.h if type(b).__name__ == "GPT2Block"]
    return blocks[-1]


def on_call(module, nth, action):
    """Run an action when the nth forward of a module begins."""
    calls = []

    def hook(*_):
        calls.append(1)
        if len(calls) == nth:
            action()

    module.register_forward_pre_hook(hook)


def outcome(model):
    """Return how a training step ends on this rank, and after how many seconds."""
    begin = time.monotonic()
    try:
        model.train_step(batch_of(GPT2))
    except SlapoError as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "nothing", "", time.monotonic() - begin


def killed_in_step(folder, tp, pp, order, guilty):
    killed_rank.ERROR_WAIT_S, killed_rank.SILENT_S = (
        1.0,
        2.5,
    )  # of this process, which ends with the test
    model = build(folder, tp, pp, order)
    model.train_step(batch_of(GPT2))
    if dist.get_rank() == guilty:
        on_call(own_block(model).mlp, 3, lambda: os.kill(os.getpid(), signal.SIGKILL))
    return outcome(model)


@pytest.mark.parametrize(
    ("tp", "pp", "order", "guilty"),
    [
        (1, 4, "1f1b", 1),
        pytest.param(1, 4, "zbv", 3, marks=pytest.mark.slow),
        pytest.param(2, 2, "1f1b", 2, marks=pytest.mark.slow),
    ],
)
def test_rank_killed_during_a_step_raises_rank_error_on_all_other_ranks(
    tp, pp, order, guilty, folder
):
    """No launcher stops the other ranks: the parent only listens."""
    ranks = []
    job = ("cpu", "killed_in_step", killed_in_step, (folder, tp, pp, order, guilty))
    try:
        store = _start_all(ranks, tp * pp, "fork", 1, job)
        for local in ranks:
            assert local.pipe.poll(90), f"rank {local.rank} hangs"
            result = _receive(local, "killed_in_step")
            if local.rank == guilty:
                assert "killed by SIGKILL" in str(result.report)
                continue
            kind, text, seconds = result
            assert kind == "RankError"
            assert seconds < 60
            assert re.search(rf"lost contact with ranks? [\d, ]*\b{guilty}\b", text), text
        del store
    finally:
        stop(ranks)


def fails_in_step(folder, order, guilty, how):
    """Return this rank's error, the gradients left, and the position of the random stream."""
    model = build(folder, 1, 2, order)
    model.train_step(batch_of(GPT2))
    before = {n: p.grad.clone() for n, p in model.named_parameters()}
    stream = model.schedule.state.random.step

    def burn(*_):  # it keeps no name of the module
        raise ValueError("the disk of this node is on fire")

    if dist.get_rank() == guilty and how == "forward":
        on_call(own_block(model).mlp, 3, burn)
    elif dist.get_rank() == guilty:
        own_block(model).mlp.register_full_backward_hook(burn)
    seen = outcome(model)
    same = all(torch.equal(p.grad, before[n]) for n, p in model.named_parameters())
    return seen, same, model.schedule.state.random.step == stream


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("order", "how", "guilty"),
    [
        ("1f1b", "forward", 0),
        ("1f1b", "backward", 1),
        ("zbv", "forward", 1),
        ("zbv", "backward", 0),
    ],
)
def test_pipeline_error_names_stage_module_and_micro_batch(order, how, guilty, folder):
    from slapo_zoo.parallel.ranks.launch import run_local

    results = run_local(fails_in_step, 2, (folder, order, guilty, how), threads=1, timeout=90)
    for rank, ((kind, text, seconds), same_gradients, same_stream) in enumerate(results):
        assert kind == (StageError if rank == guilty else RankError).__name__
        assert seconds < 60
        # the last block of the rank; in a V, rank 0 holds the first stage and the last
        stage, block = {"1f1b": [(0, 3), (1, 7)], "zbv": [(3, 7), (2, 5)]}[order][guilty]
        number = 2 if how == "forward" else 0
        assert f"stage {stage}, micro-batch {number}, transformer.h.{block}.mlp: {how}" in text
        assert "ValueError: the disk of this node is on fire" in text
        assert same_gradients
        assert same_stream


def test_check_for_a_lost_peer_terminates_on_circular_exception_causes():
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert not is_lost_peer(first)
