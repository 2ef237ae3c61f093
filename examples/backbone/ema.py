"""An average of the weights, evaluated while the model trains: torchrun --nproc-per-node 2 ema.py CHECKPOINT"""

import copy
import sys

import torch

from slapo_zoo import AutoScheduledModel

ROWS, TOKENS, VOCAB, KEPT = 4, 12, 99, 0.8


def batch(step, device):
    """Padded rows, 0 is padding; every third real token is a target."""
    g = torch.Generator().manual_seed(step)
    ids = torch.randint(3, VOCAB, (ROWS, TOKENS), generator=g)
    mask = (torch.arange(TOKENS) < torch.randint(4, TOKENS + 1, (ROWS, 1), generator=g)).long()
    labels = ids.masked_fill((mask == 0) | (torch.arange(TOKENS) % 3 != 0), -100)
    found = {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}
    return {name: tensor.to(device) for name, tensor in found.items()}


def main(model, steps=8):
    """Losses of the model, and of the average on a batch that no step has seen."""
    average = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    model.train()
    losses, averaged = [], []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(**batch(step, model.device)).loss
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for a, p in zip(average.parameters(), model.parameters(), strict=True):
                a.lerp_(p, 1 - KEPT)
            averaged.append(float(average(**batch(1000, model.device)).loss))
        losses.append(float(loss.detach()))
    return losses, averaged


if __name__ == "__main__":
    losses, averaged = main(AutoScheduledModel.from_pretrained(sys.argv[1], tp=2, seed=0))
    print(f"loss {losses[-1]:.4f}, of the average {averaged[-1]:.4f}")
