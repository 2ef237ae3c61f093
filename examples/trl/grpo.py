"""Rewards of sampled answers (GRPO) by TRL, with a generate function of one's own: torchrun --nproc-per-node 2 grpo.py CHECKPOINT."""

import sys
import zlib

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from slapo_zoo import AutoScheduledModel, ScheduledTrainer

PROMPTS = ["to be", "or not", "not to", "be or"] * 2
GENERATIONS, ANSWER = 2, 6  # answers to a prompt, and tokens of an answer
ROWS = 4  # answers of a step, all copies of the model together


class ScheduledGRPO(ScheduledTrainer, GRPOTrainer):
    """TRL's trainer for a model of AutoScheduledModel."""


def reward(completions, **columns):
    """The share of letters in an answer."""
    return [sum(letter.isalpha() for letter in text) / (1 + len(text)) for text in completions]


def sample(prompts, trainer):
    """Draw an answer to each prompt; prompt and turn decide what is drawn, so every layout draws the same."""
    words, model = trainer.processing_class, trainer.model
    asked, answers = [], []
    model.eval()
    for number, prompt in enumerate(prompts):
        ids = torch.tensor([words(prompt)["input_ids"]], device=model.device)
        turn = (trainer.state.global_step, number % GENERATIONS)
        torch.manual_seed(zlib.crc32(f"{prompt} {turn}".encode()))
        whole = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, max_new_tokens=ANSWER,
            min_new_tokens=ANSWER, pad_token_id=words.pad_token_id,
        )  # fmt: skip
        asked.append(ids[0].tolist())
        answers.append(whole[0, ids.shape[1] :].tolist())
    model.train()
    return {"prompt_ids": asked, "completion_ids": answers, "logprobs": None}


def train(trainer_class, model, checkpoint, output, dp=1, steps=3, parts=1):
    """Train by a trainer of TRL, a step in so many parts; return the losses."""
    args = GRPOConfig(
        output, per_device_train_batch_size=ROWS // dp // parts, gradient_accumulation_steps=parts, num_generations=GENERATIONS,
        max_completion_length=ANSWER, max_steps=steps, optim="sgd", learning_rate=0.1, logging_steps=1, save_strategy="no", report_to=[],
        gradient_checkpointing=False, bf16=False, use_cpu=model.device.type == "cpu", disable_tqdm=True,
    )  # fmt: skip
    trainer = trainer_class(
        model=model, reward_funcs=reward, args=args, train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=AutoTokenizer.from_pretrained(checkpoint), rollout_func=sample,
    )  # fmt: skip
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(checkpoint, output="trained", tp=2, dp=1, parts=1):
    """Load one part of the checkpoint on every rank, train it and save what plain transformers loads."""
    model = AutoScheduledModel.from_pretrained(checkpoint, tp=tp, dp=dp)
    losses = train(ScheduledGRPO, model, checkpoint, output, dp, parts=parts)
    model.save_pretrained(output)
    return losses


if __name__ == "__main__":
    print(main(sys.argv[1]))
