"""Emulated mesh in one process: the ranks are threads, the results equal one device."""

import gc
import resource
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers

from slapo_zoo import AutoScheduledModel, emulate
from slapo_zoo.errors import MeshError, RankError, StageError
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.ranks import emulation
from slapo_zoo.parallel.ranks.agreement import together
from slapo_zoo.parallel.ranks.emulation import called_once
from slapo_zoo.parallel.ranks.launch import run_local

CONFIG = transformers.GPT2Config(
    n_embd=32, n_head=4, n_layer=4, vocab_size=65, n_positions=32, bos_token_id=0, eos_token_id=0,
    architectures=["GPT2LMHeadModel"],
)  # fmt: skip


def train(tp=1, pp=1, dp=1, **options):
    """Train three steps with dropout; return losses and a weight."""
    model = AutoScheduledModel.from_config(CONFIG, tp=tp, pp=pp, dp=dp, seed=0, **options).train()
    ids = torch.arange(48).reshape(4, 12) % 65
    rows = ids.tensor_split(dp)[model.mesh.coord("dp")]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(float(model.train_step({"input_ids": rows, "labels": rows})))
        model.clip_grad_norm_(1.0)
        optimizer.step()
    return losses, model.consolidated_state_dict()


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("tp", "pp", "dp", "options"),
    [(2, 1, 1, {}), (1, 2, 1, {}), (2, 2, 1, {}), (2, 1, 2, {}), (4, 1, 1, {}),
     (2, 1, 1, {"sequence_parallel": True}), (1, 2, 1, {"pipeline_order": "zbv"})],
)  # fmt: skip
def test_training_on_emulated_ranks_has_the_losses_and_weights_of_one_process(tp, pp, dp, options):
    losses, weights = train()
    results = emulate(train, tp, pp, dp, **options, mesh=(tp, pp, dp))
    for found, _ in results:
        assert found == pytest.approx(losses, rel=1e-5)
    for name, want in weights.items():
        torch.testing.assert_close(results[0][1][name], want, rtol=1e-4, atol=1e-5)


def under_autocast():
    """Return bf16 products by a weight, before and after it changes."""
    weight, found = torch.nn.Parameter(torch.ones(2, 2)), []
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(float((torch.ones(2, 2) @ weight).sum().detach()))
        weight.data *= 3
    return found


def test_emulated_ranks_under_autocast_read_weights_that_changed_since_the_last_context():
    assert emulate(under_autocast, mesh=(2, 1, 1)) == [[8.0, 24.0]] * 2


def fail():
    if dist.get_rank() == 1:
        raise ValueError("rank 1 fails")
    dist.barrier()


def test_emulate_raises_the_first_error_and_destroys_its_process_groups():
    world = dist.distributed_c10d._world
    with pytest.raises(ValueError, match="rank 1 fails"):
        emulate(fail, mesh=(2, 1, 1), timeout_s=5)
    assert not dist.is_initialized()
    assert dist.distributed_c10d._world is world
    assert emulate(dist.get_rank, mesh=(3, 1, 1)) == [0, 1, 2]


def fail_before_a_group_has_met():
    group = dist.new_group([0, 1])
    if dist.get_rank() == 1:
        raise ValueError("rank 1 fails")
    dist.all_reduce(torch.ones(1), group=group)


def raised_within_itself():
    first, second = ValueError("first"), ValueError("second")
    first.__context__, second.__context__ = second, first
    raise first


def test_emulate_raises_an_error_of_a_rank_whose_exception_causes_are_circular():
    with pytest.raises(ValueError, match="first"):
        emulate(raised_within_itself, mesh=(1, 1, 1))


def test_emulated_rank_waiting_in_a_user_process_group_gets_the_error_of_its_peer():
    """The user's group has torch's timeout of half an hour, yet the waiting rank gets the error within seconds."""
    began = time.monotonic()
    with pytest.raises(ValueError, match="rank 1 fails"):
        emulate(fail_before_a_group_has_met, mesh=(2, 1, 1))
    assert time.monotonic() - began < 20


def fail_in_the_last_stage(said):
    model = AutoScheduledModel.from_config(CONFIG, pp=2).train()
    ids = torch.arange(48).reshape(4, 12) % 65
    try:
        model.train_step({"input_ids": ids, "labels": ids + 65})  # no such classes
    except Exception as error:
        said[dist.get_rank()] = str(error)
        raise


def test_pipeline_stage_that_waits_for_a_failed_stage_raises_the_error_of_that_stage():
    said = {}
    with pytest.raises(StageError, match="found one beyond") as raised:
        emulate(fail_in_the_last_stage, said, mesh=(1, 2, 1), timeout_s=5)
    assert "rank 1: " in said[0]
    assert "fail_in_the_last_stage" in str(raised.value.__cause__), "where, in words"


def nested():
    emulate(fail, mesh=(2, 1, 1))


def test_emulate_inside_emulate_is_refused():
    with pytest.raises(MeshError, match="process group already"):
        emulate(nested, mesh=(2, 1, 1), timeout_s=5)


def agree_five_times():
    mesh = Mesh(2, 1, 1, dist.get_rank())
    return [together(mesh, "a step", lambda: mesh.rank) for _ in range(5)]


def test_emulated_ranks_can_gather_objects_repeatedly():
    """Each thread waits on a process group of its own."""
    for _ in range(3):
        assert emulate(agree_five_times, mesh=(2, 1, 1)) == [[[0, 1]] * 5] * 2


def test_emulation_that_fails_before_its_ranks_start_leaves_room_for_the_next(monkeypatch):
    """The lock that one process has for its ranks would wait for ever."""
    with monkeypatch.context() as patch:
        patch.setattr("slapo_zoo.parallel.compat.process_groups_per_thread", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            emulate(agree_five_times, mesh=(2, 1, 1))
    assert emulate(agree_five_times, mesh=(2, 1, 1)) == [[[0, 1]] * 5] * 2


def changes_in_a_step(changed):
    model = AutoScheduledModel.from_config(CONFIG, pp=2, seed=0, dtype=torch.float64).train()
    dist.barrier()
    before, ids = len(changed), torch.arange(48).reshape(4, 12) % 65
    dist.barrier()
    model.train_step({"input_ids": ids, "labels": ids})
    dist.barrier()
    return before > 0, len(changed) - before


def test_pipeline_step_on_emulated_ranks_never_changes_the_default_dtype(monkeypatch):
    """With another default dtype the other stage would send that dtype, and gloo would abort the process."""
    changed, change = [], torch.set_default_dtype
    monkeypatch.setattr(torch, "set_default_dtype", lambda d: (changed.append(d), change(d))[1])
    assert emulate(changes_in_a_step, changed, mesh=(1, 2, 1)) == [(True, 0)] * 2


class BuiltAtOnce(transformers.GPT2LMHeadModel):
    """A plain model whose construction on rank 0 lasts until rank 1 constructs one too, or half a second."""

    inside, second, done = threading.Event(), threading.Event(), threading.Event()

    def __init__(self, config):
        super().__init__(config)
        if dist.is_initialized() and dist.get_rank() == 0:
            self.inside.set()
            self.second.wait(0.5)
        elif dist.is_initialized():
            self.second.set()
            self.done.wait(0.5)


def load_plain(folder):
    if dist.get_rank() == 1:
        BuiltAtOnce.inside.wait(30)
    model = BuiltAtOnce.from_pretrained(folder)
    BuiltAtOnce.done.set()
    return model.lm_head.weight is model.transformer.wte.weight


def test_transformers_loads_on_two_emulated_ranks_restore_patched_attributes(tmp_path):
    """Each load replaces PreTrainedModel.tie_weights while it runs, and restores the method after it."""
    before = dict(vars(transformers.PreTrainedModel))
    transformers.GPT2LMHeadModel(CONFIG).save_pretrained(tmp_path)
    assert emulate(load_plain, tmp_path, mesh=(2, 1, 1)) == [True, True]
    assert dict(vars(transformers.PreTrainedModel)) == before


def set_aside(fail):
    if fail:
        return 1 / 0
    return gc.get_freeze_count() > 0


@pytest.mark.parametrize("fail", [False, True])
def test_emulate_freezes_objects_for_the_garbage_collector_and_unfreezes_them_at_its_end(
    fail, monkeypatch
):
    """The collector skips objects of torch and transformers meanwhile; objects frozen by the caller stay frozen, and are counted once."""
    expected = pytest.raises(ZeroDivisionError) if fail else nullcontext()
    gc.unfreeze()  # what tests/conftest.py has frozen
    monkeypatch.setattr(emulation, "_FROZEN", threading.Event())
    with expected:
        assert emulate(set_aside, fail, mesh=(2, 1, 1)) == [True, True]
    assert gc.get_freeze_count() == 0
    gc.freeze()
    try:
        with expected:
            emulate(set_aside, fail, mesh=(2, 1, 1))
        assert gc.get_freeze_count() > 0
        monkeypatch.setattr(gc, "get_freeze_count", None)
        with expected:
            emulate(lambda: 1 / (not fail), mesh=(2, 1, 1))
    finally:
        gc.unfreeze()


def agree_once():
    return agree_five_times()[0]


def native_threads():
    return len(list(Path("/proc/self/task").iterdir()))


def test_emulate_leaves_no_thread_and_a_later_fork_can_run_collectives():
    """A forked rank that frees a process group of its parent would wait for threads that do not exist in it."""
    emulate(agree_five_times, mesh=(2, 1, 1))
    before = native_threads()
    emulate(agree_five_times, mesh=(2, 1, 1))
    until = time.monotonic() + 30  # a thread that was joined ends a moment later for the system
    while native_threads() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert native_threads() <= before
    assert run_local(agree_once, 2, timeout=60, start="fork", threads=1) == [[0, 1]] * 2


def losing_first(monkeypatch, times):
    """Make rank 1 lose its peer during the group's setup, with gloo's error, `times` times."""
    make, left = dist.init_process_group, [times]

    def lossy(*args, **kwargs):
        make(*args, **kwargs)
        if kwargs["rank"] == 1 and left[0]:
            left[0] -= 1
            dist.destroy_process_group()
            raise RuntimeError("[gloo/transport/tcp/pair.cc:551] Connection closed by peer")

    monkeypatch.setattr(dist, "init_process_group", lossy)


def summed():
    x = torch.ones(1)
    dist.all_reduce(x)
    return float(x)


@pytest.mark.parametrize("start", ["threads", "processes"])
def test_rank_start_up_is_retried_once_when_a_peer_connection_is_lost(start, monkeypatch):
    losing_first(monkeypatch, 1)
    if start == "threads":
        assert emulate(summed, mesh=(2, 1, 1)) == [2.0, 2.0]
    else:
        assert run_local(summed, 2, start="fork", threads=1) == [2.0, 2.0]


def test_rank_start_up_raises_when_a_peer_connection_is_lost_twice(monkeypatch):
    losing_first(monkeypatch, 2)
    with pytest.raises((RankError, RuntimeError), match="closed by peer"):
        emulate(summed, mesh=(2, 1, 1), timeout_s=2)


def test_called_once_decorator_runs_a_function_once_when_threads_call_it_together():
    """functools.cache alone ran it in each thread: hooks of optimizers were installed twice, and steps taken twice."""
    gate, ran = threading.Barrier(4), []

    @called_once
    def install():
        time.sleep(0.05)  # long enough for every thread to come
        ran.append(1)

    def work():
        gate.wait()
        install()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ran) == 1


def test_emulation_raises_the_limit_of_open_files_or_refuses_ranks_that_need_more(monkeypatch):
    """Under the usual limit of 1024 files gloo ended the process of 32 ranks."""
    asked = []
    monkeypatch.setattr(resource, "getrlimit", lambda what: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda what, limits: asked.append(limits))
    emulation._allow_files(32 * 32)
    assert asked == [(4096, 4096)]
    with pytest.raises(MeshError, match="found a limit of 4096 open files"):
        emulate(len, mesh=(64, 1, 1))
