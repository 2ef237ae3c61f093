"""Megatron-core's process groups under a scheduled model: torchrun ... train_megatron.py CHECKPOINT."""

import sys

import torch

from slapo_zoo import AutoScheduledModel, init_target_engine


def main(checkpoint, steps=4):
    """Four steps on random tokens; the losses."""
    model = AutoScheduledModel.from_pretrained(checkpoint, tp=2, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, _ = init_target_engine(model, "megatron", optimizer=optimizer, clip=1.0)
    tokens = torch.Generator().manual_seed(model.mesh.coord("dp"))
    model.train()
    losses = []
    for _ in range(steps):
        ids = torch.randint(model.config.vocab_size, (2, 16), generator=tokens)
        losses.append(float(engine.update({"input_ids": ids, "labels": ids})))
    engine.save_pretrained("trained")
    return losses


if __name__ == "__main__":
    print(main(sys.argv[1]))
