"""Uncertainty of a masked language model by MC dropout: torchrun --nproc-per-node 2 mc_dropout.py CHECKPOINT

The model evaluates, its dropout modules alone stay in training mode; each call is another sample.
"""

import sys

import torch

from slapo_zoo import AutoScheduledModel

ROWS, TOKENS, VOCAB, SAMPLES = 4, 12, 99, 40


def main(model, samples=SAMPLES):
    """The mean over samples of the log-probabilities of the own tokens, and their spread."""
    ids = torch.randint(3, VOCAB, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    ids = ids.to(model.device)
    model.eval()
    for module in model.modules():
        if "Dropout" in type(module).__name__:
            module.train()
    found = []
    with torch.no_grad():
        for _ in range(samples):
            logits = model(input_ids=ids).logits
            found.append(logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0])
    every = torch.stack(found)
    return float(every.mean()), float(every.std(0).mean())


if __name__ == "__main__":
    mean, spread = main(AutoScheduledModel.from_pretrained(sys.argv[1], tp=2, seed=0))
    print(f"log-probability {mean:.3f}, spread over samples {spread:.3f}")
