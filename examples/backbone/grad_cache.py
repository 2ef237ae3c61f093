"""GradCache, large batches of a contrastive loss with dropout: torchrun --nproc-per-node 2 grad_cache.py CHECKPOINT

Rows are embedded in parts without a graph; the loss gives each embedding its gradient; a second
forward of each part, with the random state of the first, carries it on. One part's graph lives at a time.
The state is that of the CPU's generator, also on a GPU: a scheduled model tells by it that a call repeats its dropout.
"""

import sys

import torch
from torch.nn import functional

from slapo_zoo import AutoScheduledModel

ROWS, PARTS, TOKENS, VOCAB = 8, 4, 12, 99


def embed(model, ids):
    """Unit vectors: the mean of the last hidden states."""
    hidden = model.base_model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
    return functional.normalize(hidden.mean(1), dim=-1)


def contrast(vectors):
    """Neighbouring rows belong together."""
    scores = (vectors @ vectors.T / 0.1).fill_diagonal_(-torch.inf)
    return functional.cross_entropy(scores, torch.arange(ROWS, device=scores.device) ^ 1)


def direct(model, ids):
    """All parts in one graph."""
    loss = contrast(torch.cat([embed(model, part) for part in ids.chunk(PARTS)]))
    loss.backward()
    return float(loss.detach())


def cached(model, ids):
    """The same gradient, one part after the other."""
    states, found = [], []
    with torch.no_grad():
        for part in ids.chunk(PARTS):
            states.append(torch.get_rng_state())
            found.append(embed(model, part))
    vectors = torch.cat(found).requires_grad_()
    loss = contrast(vectors)
    loss.backward()
    for part, state, grad in zip(ids.chunk(PARTS), states, vectors.grad.chunk(PARTS), strict=True):
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state)
            embed(model, part).backward(grad)
    return float(loss.detach())


def main(model):
    """Return the relative difference of the two gradients, and both losses."""
    ids = torch.randint(3, VOCAB, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    ids = ids.to(model.device)
    model.train()
    losses, grads = [], []
    for way in (direct, cached):
        model.zero_grad()
        torch.manual_seed(7)
        losses.append(way(model, ids))
        grads.append(
            torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        )
    return float((grads[0] - grads[1]).norm() / grads[0].norm()), losses


if __name__ == "__main__":
    apart, losses = main(AutoScheduledModel.from_pretrained(sys.argv[1], tp=2, seed=0))
    print(f"gradients differ by {apart:.1e} of their norm, losses {losses}")
