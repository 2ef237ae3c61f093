"""Preferences against a frozen copy (DPO): torchrun --nproc-per-node 4 dpo.py CHECKPOINT."""

import copy
import sys

import torch
from torch.nn.functional import logsigmoid

from slapo_zoo import AutoScheduledModel

BETA, PAIRS = 0.5, 4


def log_probabilities(logits, ids):
    """Return log probabilities of each row, in pairs of a chosen and a rejected one: [rows / 2, 2]."""
    each = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])
    return each.sum((1, 2)).view(-1, 2)


def preference(output, batch):
    """The loss of one micro-batch; what the reference said comes with its rows."""
    gain = log_probabilities(output.logits, batch["ids"]) - batch["reference"].view(-1, 2)
    return -logsigmoid(BETA * (gain[:, 0] - gain[:, 1])).mean()


def main(checkpoint, steps=6):
    """Steps on the same pairs, on two tp ranks and two stages; the losses."""
    model = AutoScheduledModel.from_pretrained(checkpoint, tp=2, pp=2, seed=0)
    reference = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    words = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (2 * PAIRS, 16), generator=words)
    ids = ids.to(model.device)
    with torch.no_grad():
        before = log_probabilities(reference(input_ids=ids).logits, ids).flatten()
    batch = {"input_ids": ids, "ids": ids, "reference": before}
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        # a micro-batch holds whole pairs
        losses.append(float(model.train_step(batch, loss_fn=preference, micro_batches=PAIRS)))
        model.clip_grad_norm_(1.0)
        optimizer.step()
    model.save_pretrained("trained")
    return losses


if __name__ == "__main__":
    print(main(sys.argv[1]))
