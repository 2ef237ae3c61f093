"""Pre-train a small GPT-2 on bytes, tp=2 and pp=2: torchrun --nproc-per-node 4 pretrain_gpt2.py

The text is Python's own documentation, which every Python brings along.
"""

import os
from pydoc_data.topics import topics

import torch
from transformers import GPT2Config

from slapo_zoo import AutoScheduledModel

TOKENS, ROWS = 64, 16
CONFIG = GPT2Config(
    vocab_size=256, n_embd=64, n_head=4, n_layer=4, n_positions=TOKENS, bos_token_id=0,
    eos_token_id=0,
)  # fmt: skip


def blocks():
    """The documentation as rows of TOKENS bytes."""
    data = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)
    return data[: len(data) // TOKENS * TOKENS].view(-1, TOKENS).long()


def main(steps=100):
    """Losses of every step."""
    model = AutoScheduledModel.from_config(
        CONFIG, tp=2, pp=2, seed=0, auto_class="GPT2LMHeadModel", micro_batches=4
    )
    data = blocks()
    data = data[torch.randperm(len(data), generator=torch.Generator().manual_seed(0))]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    model.train()
    losses = []
    for step in range(steps):
        rows = data[torch.arange(step * ROWS, (step + 1) * ROWS) % len(data)]
        losses.append(float(model.train_step({"input_ids": rows, "labels": rows})))
        model.clip_grad_norm_(1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 20 == 0 and model.mesh.rank == 0:
            print(f"step {step}: loss {losses[-1]:.3f}", flush=True)
    model.save_pretrained("python_docs")
    return losses


if __name__ == "__main__":
    losses = main()
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"last loss {losses[-1]:.3f} (bytes drawn alike: 5.545)")
