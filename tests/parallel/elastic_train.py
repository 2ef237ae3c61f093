"""Trained by torchrun with restarts: `python elastic_train.py FOLDER STEPS KILLS`.

KILLS is a list like `3:1,5:0`: in step 3 rank 1 kills itself, in step 5 rank 0, each once. A start goes
on from the last checkpoint; rank 0 writes the digest of all weights when the last step is done.
"""

import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import torch
import transformers

from slapo_zoo import AutoScheduledModel, load_checkpoint, save_checkpoint
from slapo_zoo.parallel.ranks.process_group import init_distributed, shutdown_distributed

CONFIG = transformers.GPT2Config(
    n_embd=32, n_head=4, n_layer=2, vocab_size=65, n_positions=32, bos_token_id=0, eos_token_id=0,
    architectures=["GPT2LMHeadModel"],
)  # fmt: skip


def kill_once(folder, step, kills):
    """End this process as a broken machine would, unless it has done so in an earlier life."""
    rank = os.environ["RANK"]
    done = folder / f"killed-{step}-{rank}"
    if f"{step}:{rank}" in kills and not done.exists():
        done.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def train(folder, steps, kills):
    model = AutoScheduledModel.from_config(CONFIG, tp=2, seed=0).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first, last = 0, folder / "last"
    if last.exists():
        first = load_checkpoint(model, last, optimizer).step
        (folder / "resumed").open("a").write(f"{first}\n")
    for step in range(first, steps):
        g = torch.Generator().manual_seed(step)
        ids = torch.randint(65, (4, 12), generator=g)
        optimizer.zero_grad()
        model.train_step({"input_ids": ids, "labels": ids})
        kill_once(folder, step, kills)
        optimizer.step()
        save_checkpoint(model, last, optimizer, step=step + 1)
    weights = model.consolidated_state_dict()
    if model.mesh.rank == 0:
        digest = hashlib.sha256()
        for name in sorted(weights):
            digest.update(name.encode() + weights[name].numpy().tobytes())
        (folder / "digest").write_text(digest.hexdigest())


if __name__ == "__main__":
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        time.sleep(2)  # rank 0 must not connect to the rank 1 that was there before
    init_distributed(timeout_s=30, device="cpu")
    train(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(","))
    shutdown_distributed()
