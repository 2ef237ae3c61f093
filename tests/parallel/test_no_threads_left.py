"""Threads and models after a job: a destroyed process group leaves no threads in a reused worker.

A model that is dropped is freed: what looks at its parameters from outside does not keep them.
"""

import gc
import threading
import weakref
from pathlib import Path

import pytest
import torch

from parity import Case, batch_of, checkpoint
from slapo_zoo import AutoScheduledModel

GPT2 = Case("GPT2LMHeadModel", ("tokens",))


def native_threads(folder, out):
    """Return the number of threads of this process, gloo's included, before a job's work."""
    found = len(list(Path("/proc/self/task").iterdir()))
    model = AutoScheduledModel.from_pretrained(folder, tp=2)
    model.save_pretrained(out)
    return found, threading.active_count()


def test_training_jobs_in_a_reused_worker_process_leave_no_native_threads(ranks, tmp_path):
    folder = checkpoint(GPT2, tmp_path)
    counts = [ranks.run(native_threads, 2, folder, tmp_path / "out")[0][0] for _ in range(6)]
    assert counts[-1] <= counts[1] + 2, counts


def drop_trained(folder, kw, own_loop):
    """Train a step and delete the model; return what of it still lives, and the number of threads."""
    model = AutoScheduledModel.from_pretrained(folder, **kw).train()
    model.input_check_interval = 0  # the ranks are given the same rows
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        if own_loop:
            model(**batch_of(GPT2)).loss.backward()
        else:
            model.train_step(batch_of(GPT2))
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    alive = weakref.ref(model), weakref.ref(next(model.parameters()))
    del model, optimizer
    gc.collect()
    return [ref() is not None for ref in alive], len(list(Path("/proc/self/task").iterdir()))


CELLS = [
    ({"tp": 2}, True), ({"tp": 2}, False), ({"tp": 2, "sequence_parallel": True}, True),
    ({"pp": 2}, False), ({"pp": 2, "pipeline_order": "gpipe"}, False), ({"dp": 2}, True),
    ({"dp": 2}, False), ({"dp": 2, "dp_shard": 2, "zero_stage": 1}, False),
    ({"dp": 2, "dp_shard": 2, "zero_stage": 2}, False), ({"tp": 2, "precision": "bf16"}, False),
]  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("kw", "own_loop"), CELLS)
def test_deleted_model_is_freed_by_the_garbage_collector(kw, own_loop, ranks, tmp_path):
    folder = checkpoint(GPT2, tmp_path)
    first = ranks.run(drop_trained, 2, folder, kw, own_loop)[0]
    again = ranks.run(drop_trained, 2, folder, kw, own_loop)[0]
    assert first[0] == again[0] == [False, False]
    assert again[1] <= first[1], (first[1], again[1])
