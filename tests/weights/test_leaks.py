"""Long runs: no growth of memory, files, threads and shared memory over steps and saves."""

import os
from pathlib import Path

import pytest
import torch

from parity import Case, batch_of, checkpoint
from slapo_zoo import AutoScheduledModel, async_save_checkpoint

GPT2 = Case("GPT2LMHeadModel", ("tokens",))
WARM_UP = 0.3  # share of the steps for allocators, caches and the first saves


def counted():
    """Return anonymous resident bytes, open files, threads and shared memory segments of this process."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    maps = Path("/proc/self/maps").read_text().splitlines()
    return (
        int(status["RssAnon"].split()[0]) * 1024,
        len(os.listdir("/proc/self/fd")),
        int(status["Threads"]),
        sum("/dev/shm" in line for line in maps),
    )


def long_run(folder, out, steps, every):
    """Return this rank's memory, files and threads at the end of each tenth of the run, right after a save."""
    model = AutoScheduledModel.from_pretrained(folder, tp=2, pp=2).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    found = []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        model.train_step(batch_of(GPT2, step % 7))
        model.clip_grad_norm_(1.0)
        optimizer.step()
        if step % every == 0:
            saving = async_save_checkpoint(model, out, optimizer, step=step)
        if step % (steps // 10) == 0:
            saving.result()
            found.append((step, *counted()))
    return found


def slope(found):
    """Return bytes per step, by least squares, after the warm-up."""
    rest = found[int(WARM_UP * len(found)) :]
    steps, sizes = (torch.tensor([row[i] for row in rest], dtype=torch.float64) for i in (0, 1))
    steps = steps - steps.mean()
    return float((steps * (sizes - sizes.mean())).sum() / (steps * steps).sum())


def check(runs, most):
    """Fail above `most` bytes per step, or where files, threads or segments grow."""
    for rank, found in enumerate(runs):
        print(
            f"rank {rank}: {slope(found):.0f} bytes a step; files, threads, segments {found[0][2:]} --> {found[-1][2:]}"
        )
        assert slope(found) < most
        half = len(found) // 2  # a thread of the last save may just have ended, or not yet
        first, last = (
            [max(row[i] for row in part) for i in (2, 3, 4)]
            for part in (found[:half], found[half:])
        )
        assert all(b <= a for a, b in zip(first, last, strict=True)), (first, last)


@pytest.mark.slow
def test_two_thousand_train_steps_leak_no_memory_files_or_threads(ranks, tmp_path):
    folder = checkpoint(GPT2, tmp_path)
    check(ranks.run(long_run, 4, folder, tmp_path / "out", 2000, 20, timeout=1500), most=1024)
