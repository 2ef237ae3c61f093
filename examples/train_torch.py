"""FSDP2 over dp beside tensor parallelism: torchrun --nproc-per-node 4 train_torch.py CHECKPOINT."""

import sys

import torch

from slapo_zoo import AutoScheduledModel, init_target_engine


def main(checkpoint, steps=4):
    """Four steps on random tokens; the losses."""
    model = AutoScheduledModel.from_pretrained(checkpoint, tp=2, seed=0)  # dp: what is left
    engine, _ = init_target_engine(
        model,
        "torch",
        data_parallel="fsdp2",
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        clip=1.0,
    )
    tokens = torch.Generator().manual_seed(model.mesh.coord("dp"))  # dp peers read different rows
    model.train()
    losses = []
    for _ in range(steps):
        ids = torch.randint(model.config.vocab_size, (2, 16), generator=tokens)
        losses.append(float(engine.update({"input_ids": ids, "labels": ids})))
    engine.save_pretrained("trained")
    return losses


if __name__ == "__main__":
    print(main(sys.argv[1]))
