"""SimCSE by the backbone: torchrun --nproc-per-node 2 simcse.py CHECKPOINT OUT

Two calls of the backbone on the same rows draw unlike masks of dropout; each view is the other's
positive, the rows beside it are its negatives. A plain model of `transformers` takes the same loop.
"""

import sys

import torch
from torch.nn import functional

from slapo_zoo import AutoScheduledModel

ROWS, TOKENS, VOCAB = 8, 12, 99


def sentences(step, device):
    """Padded rows of random words."""
    g = torch.Generator().manual_seed(step)
    ids = torch.randint(3, VOCAB, (ROWS, TOKENS), generator=g)
    lengths = torch.randint(4, TOKENS + 1, (ROWS, 1), generator=g)
    mask = (torch.arange(TOKENS) < lengths).long()
    return (ids * mask).to(device), mask.to(device)


def embed(model, ids, mask):
    """Unit vectors: the mean of the last hidden states over real tokens."""
    hidden = model.base_model(ids, attention_mask=mask).last_hidden_state
    return functional.normalize((hidden * mask[..., None]).sum(1), dim=-1)


def main(model, steps=30):
    """Train; per step the loss and how alike the two views of a row are."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    targets = torch.arange(ROWS, device=model.device)
    model.train()
    losses, alike = [], []
    for step in range(steps):
        optimizer.zero_grad()
        one, other = (embed(model, *sentences(step % 4, model.device)) for _ in range(2))
        loss = functional.cross_entropy(one @ other.T / 0.05, targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        alike.append(float((one * other).sum(-1).mean().detach()))
    return losses, alike


if __name__ == "__main__":
    model = AutoScheduledModel.from_pretrained(sys.argv[1], tp=2, seed=0)
    losses, alike = main(model)
    model.save_pretrained(sys.argv[2])
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, views alike {alike[0]:.3f}")
