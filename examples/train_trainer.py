"""transformers.Trainer with tensor parallelism: torchrun --nproc-per-node 4 train_trainer.py CHECKPOINT."""

import sys

import torch
from transformers import TrainingArguments

from slapo_zoo import AutoScheduledModel, ScheduledTrainer


def main(checkpoint, steps=4):
    """Four steps on random tokens; the losses."""
    model = AutoScheduledModel.from_pretrained(checkpoint, tp=2, seed=0)
    tokens = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (16, 16), generator=tokens)
    arguments = TrainingArguments(
        output_dir="run",
        per_device_train_batch_size=2,  # rows of a dp rank
        max_steps=steps,
        learning_rate=1e-3,
        logging_steps=1,
        save_steps=2,  # a checkpoint of every mesh goes on under any other
        report_to=[],
        use_cpu=model.device.type == "cpu",
    )
    trainer = ScheduledTrainer(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in ids],
    )
    trainer.train()
    trainer.save_model("trained")
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    print(main(sys.argv[1]))
