"""A reward model from preferences by TRL: torchrun --nproc-per-node 2 reward.py CHECKPOINT."""

import sys

from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer

from slapo_zoo import AutoScheduledModel, ScheduledTrainer

PAIRS = {
    "chosen": ["to be or not", "or not to", "not to be", "be to"] * 2,
    "rejected": ["to be not", "or be", "not to", "be or to be"] * 2,
}
ROWS = 4  # pairs of a step, all copies of the model together


class ScheduledReward(ScheduledTrainer, RewardTrainer):
    """TRL's trainer for a model of AutoScheduledModel."""


def train(trainer_class, model, checkpoint, output, dp=1, steps=3):
    """Train by a trainer of TRL; return the losses."""
    args = RewardConfig(
        output, per_device_train_batch_size=ROWS // dp, max_steps=steps, optim="sgd", learning_rate=0.1,
        logging_steps=1, save_strategy="no", report_to=[], gradient_checkpointing=False, bf16=False, use_cpu=model.device.type == "cpu",
        disable_tqdm=True,
    )  # fmt: skip
    trainer = trainer_class(
        model=model, args=args, train_dataset=Dataset.from_dict(PAIRS),
        processing_class=AutoTokenizer.from_pretrained(checkpoint),
    )  # fmt: skip
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(checkpoint, output="trained", tp=2, dp=1):
    """Load one part of the checkpoint on every rank, train it and save what plain transformers loads.

    The head is new, so the seed decides its weights: the same on every layout.
    """
    words = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoScheduledModel.from_pretrained(
        checkpoint, tp=tp, dp=dp, seed=0, auto_class=AutoModelForSequenceClassification, num_labels=1,
        pad_token_id=words.pad_token_id,
    )  # fmt: skip
    losses = train(ScheduledReward, model, checkpoint, output, dp)
    model.save_pretrained(output)
    return losses


if __name__ == "__main__":
    print(main(sys.argv[1]))
