"""ZeRO-3 over dp beside tensor parallelism: deepspeed --num_gpus 4 train_deepspeed.py CHECKPOINT."""

import sys

import torch

from slapo_zoo import AutoScheduledModel, init_target_engine

CONFIG = {  # or the path of a JSON file
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}


def main(checkpoint, steps=4):
    """Four steps on random tokens; the losses."""
    model = AutoScheduledModel.from_pretrained(checkpoint, tp=2, seed=0)
    engine, _ = init_target_engine(model, "deepspeed", config=CONFIG)
    tokens = torch.Generator().manual_seed(model.mesh.coord("dp"))
    losses = []
    for _ in range(steps):
        ids = torch.randint(model.config.vocab_size, (2, 16), generator=tokens)
        losses.append(float(engine.train_step({"input_ids": ids, "labels": ids})))
        engine.step()
    engine.save_pretrained("trained")
    return losses


if __name__ == "__main__":
    print(main(next(word for word in sys.argv[1:] if not word.startswith("--local_rank"))))
