"""Fine-tune BERT to tell code from comments: torchrun --nproc-per-node 2 classify_bert.py [CHECKPOINT]

The data are lines of Python's own library, which every Python brings along. A checkpoint of BERT
with a byte vocabulary may be given; without one a small new model learns.
"""

import argparse
import asyncio.base_events
import inspect
import os
import sys
import tokenize
import typing
import unittest.mock

import torch
from transformers import BertConfig

from slapo_zoo import AutoScheduledModel

TOKENS, ROWS = 48, 32
MODULES = (argparse, asyncio.base_events, typing, unittest.mock)
CONFIG = BertConfig(
    vocab_size=260, hidden_size=64, num_attention_heads=4, num_hidden_layers=2,
    intermediate_size=128, max_position_embeddings=TOKENS, num_labels=2,
)  # fmt: skip


def lines(module):
    """(text, 1 for a comment and 0 for code) of the lines that are all the one or the other."""
    source = inspect.getsource(module).splitlines(keepends=True)
    kinds = {}
    for token in tokenize.generate_tokens(iter(source).__next__):
        kinds.setdefault(token.start[0], set()).add(token.type)
    for number, found in kinds.items():
        text = source[number - 1].strip() if number <= len(source) else ""
        if len(text) > 20 and text.startswith("#"):
            yield text.lstrip("# "), 1
        elif len(text) > 20 and not found & {tokenize.COMMENT, tokenize.STRING}:
            yield text, 0


def encode(text):
    """Bytes as ids; 0 is padding, 1 stands first."""
    ids = [1, *(byte + 4 for byte in text.encode()[: TOKENS - 1])]
    return ids + [0] * (TOKENS - len(ids))


def examples():
    """Return as many comments as lines of code, in an order that is always the same."""
    found = [row for module in MODULES for row in lines(module)]
    kinds = [[encode(text) for text, kind in found if kind == k] for k in (0, 1)]
    least = min(map(len, kinds))
    ids = torch.tensor(kinds[0][:least] + kinds[1][:least])
    labels = torch.arange(2).repeat_interleave(least)
    order = torch.randperm(2 * least, generator=torch.Generator().manual_seed(0))
    return ids[order], labels[order]


def batch(ids, labels):
    """Return the inputs of the model."""
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def main(checkpoint=None, steps=120):
    """Accuracy on lines that training has not seen."""
    arguments = {"tp": 2, "seed": 0, "auto_class": "BertForSequenceClassification"}
    if checkpoint:
        model = AutoScheduledModel.from_pretrained(checkpoint, num_labels=2, **arguments)
    else:
        model = AutoScheduledModel.from_config(CONFIG, **arguments)
    ids, labels = (x.to(model.device) for x in examples())
    (held_out, ids), (held_out_labels, labels) = (x.tensor_split([4 * ROWS]) for x in (ids, labels))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model.train()
    for step in range(steps):
        rows = torch.arange(step * ROWS, (step + 1) * ROWS) % len(ids)
        loss = model.train_step(batch(ids[rows], labels[rows]))
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 and model.mesh.rank == 0:
            print(f"step {step}: loss {float(loss):.3f}", flush=True)
    with torch.no_grad():
        logits = model.eval()(**batch(held_out, held_out_labels)).logits
    model.save_pretrained("code_or_comment")
    return float((logits.argmax(-1) == held_out_labels).float().mean())


if __name__ == "__main__":
    accuracy = main(*sys.argv[1:2])
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"accuracy on held-out lines: {accuracy:.1%}")
