"""A loop of one's own with Accelerate: accelerate launch train_accelerate.py CHECKPOINT."""

import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from slapo_zoo import AutoScheduledModel, prepare


def main(checkpoint):
    """One epoch on random tokens; the losses."""
    model = AutoScheduledModel.from_pretrained(checkpoint, tp=2, seed=0)
    accelerator = Accelerator(cpu=model.device.type == "cpu")
    tokens = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (16, 16), generator=tokens)
    loader = DataLoader([{"input_ids": row, "labels": row} for row in ids], batch_size=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = prepare(accelerator, model, optimizer, loader)
    model.train()
    losses = []
    for batch in loader:
        losses.append(float(model.train_step(batch)))  # forward, backward, sums over the mesh
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained("trained")
    return losses


if __name__ == "__main__":
    print(main(sys.argv[1]))
