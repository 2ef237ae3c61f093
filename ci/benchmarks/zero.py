"""A training step of dp_shard=2 against torch's FSDP2 on the plain model: bytes that a rank sends, and time.

Bytes are counted from the collectives that torch's dispatcher sees, as a ring of n ranks sends them: (n-1)/n of its
output for an all-gather, (n-1)/n of its input for a reduce-scatter, twice that for an all-reduce.
"""

import time
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.ranks import barrier, on_ranks

MOST_BYTES, MOST_TIME, RANKS = 1.05, 1.05, 2
SHARES = {"_allgather_base_": 1.0, "_reduce_scatter_base_": 1.0, "allreduce_": 2.0}


class Sent(TorchDispatchMode):
    """Mode that counts in `bytes` what a rank sends in collectives over RANKS ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and (share := SHARES.get(func._schema.name.split("::")[1])):
            tensors = args[0] if isinstance(args[0], list) else args[:2]
            self.bytes += share * (RANKS - 1) / RANKS * max(t.nbytes for t in tensors)
        return func(*args, **(kwargs or {}))


def config_of(width: int, blocks: int) -> Any:
    """Return the config of a GPT-2 without dropout; `width` is its hidden size."""
    from transformers import GPT2Config

    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ends = {"bos_token_id": 1, "eos_token_id": 2, "loss_type": "ForCausalLMLoss"}
    config: Any = GPT2Config(n_layer=blocks, n_embd=width, n_head=4, vocab_size=4096, n_positions=128, **drops, **ends)  # fmt: skip
    config.architectures = ["GPT2LMHeadModel"]
    return config


def _ours(config: Any, precision: str) -> tuple[nn.Module, Any]:
    from slapo_zoo import AutoScheduledModel

    model: Any = AutoScheduledModel.from_config(
        config, dp_shard=RANKS, precision=precision, kernels="reference"
    ).train()
    model.input_check_interval = 0
    return model, lambda batch: model.train_step(batch, 1)


def plain(config: Any) -> Any:
    """Return the model of `transformers`, with random weights, in training mode."""
    from transformers import GPT2LMHeadModel

    return GPT2LMHeadModel(config).train()


def _fsdp2(config: Any, precision: str) -> tuple[nn.Module, Any]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = plain(config)
    narrow = torch.bfloat16 if precision == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32)
    for block in model.transformer.h:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model, lambda batch: model(**batch).loss.backward()


def measured(width: int, blocks: int, precision: str, rounds: int) -> dict[str, tuple[float, list]]:
    """Return {"ours" and "FSDP2": (bytes that this rank sends in a step, seconds of each round's step)}."""
    config = config_of(width, blocks)
    sides = {"ours": _ours(config, precision), "FSDP2": _fsdp2(config, precision)}
    ids = torch.randint(4096, (4, 128))
    batch = {"input_ids": ids, "labels": ids}
    found: dict[str, tuple[float, list]] = {}
    for name, (model, step) in sides.items():
        step(batch)  # warms up
        model.zero_grad()
        with Sent() as sent:
            step(batch)
        model.zero_grad()
        found[name] = sent.bytes, []
    for i in range(rounds):
        for name, (model, step) in sorted(sides.items(), reverse=bool(i % 2)):
            barrier()
            begin = time.perf_counter()
            step(batch)
            found[name][1].append(time.perf_counter() - begin)
            model.zero_grad()
    return found


def run(quick: bool) -> dict[str, list[dict[str, Any]]]:
    """Return a table row per precision."""
    width, blocks, rounds = (64, 4, 2) if quick else (512, 8, 15)
    rows = []
    for precision in ("fp32", "bf16"):
        ranks = on_ranks(measured, RANKS, width, blocks, precision, rounds)
        sent = {name: ranks[0][name][0] for name in ("ours", "FSDP2")}
        slowest = {name: [max(t) for t in zip(*(r[name][1] for r in ranks), strict=True)] for name in sent}  # fmt: skip
        ratio = median(a / b for a, b in zip(slowest["ours"], slowest["FSDP2"], strict=True))
        bytes_ratio = sent["ours"] / sent["FSDP2"]
        beyond = ["bytes, ratio"] * (bytes_ratio > MOST_BYTES)
        beyond += ["seconds, ratio"] * (ratio > MOST_TIME and not quick)
        rows.append({
            "what": f"GPT-2, {blocks} blocks x {width}, {precision}, gloo",
            "ours, MB": sent["ours"] / 1e6, "FSDP2, MB": sent["FSDP2"] / 1e6, "bytes, ratio": bytes_ratio,
            "ours, s": min(slowest["ours"]), "FSDP2, s": min(slowest["FSDP2"]), "seconds, ratio": ratio,
            "rounds": rounds, "beyond": beyond,
        })  # fmt: skip
    return {"a step of dp_shard=2 and of FSDP2: bytes that a rank sends, median of ratios of seconds": rows}  # fmt: skip
