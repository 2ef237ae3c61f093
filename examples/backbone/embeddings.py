"""Sentence embeddings evaluated amid masked-language training: torchrun --nproc-per-node 2 embeddings.py CHECKPOINT

After every step of the whole model its backbone embeds other rows, padded otherwise, and each row looks
for its neighbour: the same sentence with one word changed.
"""

import sys

import torch
from torch.nn import functional

from slapo_zoo import AutoScheduledModel

ROWS, TOKENS, VOCAB = 8, 12, 99


def rows(step, device):
    """Padded ids and their mask."""
    g = torch.Generator().manual_seed(step)
    ids = torch.randint(3, VOCAB, (ROWS, TOKENS), generator=g)
    mask = (torch.arange(TOKENS) < torch.randint(4, TOKENS + 1, (ROWS, 1), generator=g)).long()
    return (ids * mask).to(device), mask.to(device)


def embed(model, ids, mask):
    """Unit vectors: the mean of the last hidden states over real tokens."""
    hidden = model.base_model(ids, attention_mask=mask).last_hidden_state
    return functional.normalize((hidden * mask[..., None]).sum(1), dim=-1)


def evaluate(model):
    """Return how many rows find their neighbour, and how alike neighbours are."""
    model.eval()
    ids, mask = rows(1000, model.device)
    changed = ids.clone()
    changed[:, 1] = 3 + (ids[:, 1] + 40) % (VOCAB - 3)
    with torch.no_grad():
        scores = embed(model, ids, mask) @ embed(model, changed, mask).T
    model.train()
    right = (scores.argmax(-1) == torch.arange(ROWS, device=scores.device)).float().mean()
    return float(right), float(scores.diag().mean())


def main(model, steps=8):
    """Per step the loss, and the evaluation after it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    others = torch.arange(TOKENS, device=model.device) % 3 != 0
    model.train()
    losses, found = [], []
    for step in range(steps):
        ids, mask = rows(step, model.device)
        labels = ids.masked_fill((mask == 0) | others, -100)
        optimizer.zero_grad()
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        found.append(evaluate(model))
    return losses, found


if __name__ == "__main__":
    losses, found = main(AutoScheduledModel.from_pretrained(sys.argv[1], tp=2, seed=0))
    print(f"loss {losses[-1]:.4f}, neighbours found {found[-1][0]:.0%}, alike {found[-1][1]:.4f}")
