"""Preferences against a frozen copy (DPO) by TRL: torchrun --nproc-per-node 2 dpo.py CHECKPOINT."""

import copy
import sys

from datasets import Dataset
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer

from slapo_zoo import AutoScheduledModel, ScheduledTrainer

PAIRS = {
    "prompt": ["to be", "or", "not", "be"] * 2,
    "chosen": [" or not", " not to", " to be", " to"] * 2,
    "rejected": [" not", " be", " to", " or to be"] * 2,
}
ROWS = 4  # pairs of a step, all copies of the model together


class ScheduledDPO(ScheduledTrainer, DPOTrainer):
    """TRL's trainer for a model of AutoScheduledModel; the reference is divided as the model is."""


def train(trainer_class, model, checkpoint, output, dp=1, steps=3):
    """Train by a trainer of TRL; return the losses."""
    args = DPOConfig(
        output, per_device_train_batch_size=ROWS // dp, max_steps=steps, optim="sgd", learning_rate=0.1,
        logging_steps=1, save_strategy="no", report_to=[], gradient_checkpointing=False, bf16=False, use_cpu=model.device.type == "cpu",
        disable_tqdm=True,
    )  # fmt: skip
    trainer = trainer_class(
        model=model, ref_model=copy.deepcopy(model), args=args, train_dataset=Dataset.from_dict(PAIRS),
        processing_class=AutoTokenizer.from_pretrained(checkpoint),
    )  # fmt: skip
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(checkpoint, output="trained", tp=2, dp=1):
    """Load one part of the checkpoint on every rank, train it and save what plain transformers loads."""
    model = AutoScheduledModel.from_pretrained(checkpoint, tp=tp, dp=dp)
    losses = train(ScheduledDPO, model, checkpoint, output, dp)
    model.save_pretrained(output)
    return losses


if __name__ == "__main__":
    print(main(sys.argv[1]))
