"""T5 learns what the system's error names mean: torchrun --nproc-per-node 2 translate_t5.py

"ENOSPC" becomes "No space left on device", byte by byte. The pairs are the system's own.
"""

import errno
import os

import torch
from transformers import T5Config

from slapo_zoo import AutoScheduledModel

PAIRS = [(name, os.strerror(code)) for code, name in sorted(errno.errorcode.items())[:16]]
CONFIG = T5Config(
    vocab_size=260, d_model=64, d_kv=16, num_heads=4, d_ff=128, num_layers=2, dropout_rate=0.0,
    decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, initializer_factor=1.0,
)  # fmt: skip


def encode(texts):
    """Bytes as ids; 0 is padding, 1 the end."""
    rows = [torch.tensor([*(byte + 4 for byte in text.encode()), 1]) for text in texts]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def decode(row):
    """The text of a row of ids."""
    return bytes(int(i) - 4 for i in row if i >= 4).decode(errors="replace")


def main(steps=200):
    """Messages that it generates, and how many of them are right."""
    model = AutoScheduledModel.from_config(
        CONFIG, tp=2, seed=0, auto_class="T5ForConditionalGeneration"
    )
    ids = encode(name for name, _ in PAIRS).to(model.device)
    targets = encode(message for _, message in PAIRS).to(model.device)
    batch = {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "labels": targets.masked_fill(targets == 0, -100),
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for step in range(steps):
        loss = model.train_step(batch)
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 25 == 0 and model.mesh.rank == 0:
            print(f"step {step}: loss {float(loss):.3f}", flush=True)
    model.save_pretrained("error_names")
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    found = model.eval().generate(**inputs, max_new_tokens=targets.shape[1], do_sample=False)
    said = [decode(row) for row in found]
    return said, sum(a == b for a, (_, b) in zip(said, PAIRS, strict=True)) / len(PAIRS)


if __name__ == "__main__":
    said, right = main()
    lines = [f"{name:>8} --> {message}" for (name, _), message in zip(PAIRS, said, strict=True)]
    if int(os.environ.get("RANK", "0")) == 0:
        print(*lines, f"{right:.0%} of {len(PAIRS)} are right", sep="\n")
