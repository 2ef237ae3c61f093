"""Samples of a second process, rewarded: torchrun --nproc-per-node 2 sampled_reward.py CHECKPOINT.

Before each round the trainer hands its weights to the sampler, one bucket at a time and under their
HuggingFace names, as one would hand them to an inference engine.
"""

import multiprocessing
import sys

import torch

from slapo_zoo import AutoScheduledModel, broadcast_batch

ROWS, PROMPT, NEW = 32, 4, 8


def sampler(pipe, checkpoint):
    """The second process: plain transformers, which takes weights and gives samples."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    mine = dict(model.named_parameters())
    while (message := pipe.recv()) is not None:
        if isinstance(message, tuple):
            name, values = message
            mine[name].data.copy_(torch.from_numpy(values))
            continue
        ids = torch.full((ROWS, PROMPT), message)
        options = {"do_sample": True, "eos_token_id": None, "pad_token_id": 0}
        pipe.send(model.generate(ids, max_new_tokens=NEW, **options).numpy())


def reward(ids):
    """Reward small numbers among the new tokens: [rows]."""
    return (ids[:, PROMPT:] < 20).float().mean(1)


def policy_gradient(output, batch):
    """Log-probabilities of what was sampled, weighed by how much better than usual it was."""
    logits, chosen = output.logits[:, PROMPT - 1 : -1], batch["ids"][:, PROMPT:]
    said = logits.log_softmax(-1).gather(-1, chosen[..., None]).squeeze(-1).sum(-1)
    return -(said * batch["advantage"]).mean()


def main(checkpoint, rounds=8):
    """Rounds of sampling and one step each, on two tp ranks; the mean rewards."""
    model = AutoScheduledModel.from_pretrained(checkpoint, tp=2, seed=0).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first, (pipe, theirs) = model.mesh.rank == 0, multiprocessing.Pipe()
    if first:
        context = multiprocessing.get_context("spawn")
        context.Process(target=sampler, args=(theirs, checkpoint), daemon=True).start()
    rewards = []
    for _ in range(rounds):
        for name, tensor in model.stream_weights(bucket="64MB"):  # pairs on rank 0 alone
            pipe.send((name, tensor.cpu().numpy()))
        ids = None
        if first:
            pipe.send(1)
            ids = {"ids": torch.from_numpy(pipe.recv())}
        ids = broadcast_batch(ids, model.mesh)["ids"]
        found = reward(ids)
        rewards.append(float(found.mean()))
        batch = {"input_ids": ids, "ids": ids, "advantage": found - found.mean()}
        optimizer.zero_grad()
        model.train_step(batch, loss_fn=policy_gradient)
        model.clip_grad_norm_(1.0)
        optimizer.step()
    if first:
        pipe.send(None)
    model.save_pretrained("trained")
    return rewards


if __name__ == "__main__":
    print(main(sys.argv[1]))
