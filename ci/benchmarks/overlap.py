"""Time of training steps on tp=2 with the all-reduce of dx beside the weight gradients, against one after the other."""

import time
from statistics import quantiles
from typing import Any

import torch
from torch import nn

from benchmarks.ranks import barrier, on_ranks


class Mlp(nn.Module):
    """Feed-forward with a residual: two linears with a GELU between them."""

    def __init__(self, width: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [rows, width] to the same shape."""
        return x + self.down(nn.functional.gelu(self.up(x)))


def seconds(width: int, rows: int, layers: int, rounds: int) -> dict[str, list[float]]:
    """Return {"plain" and "overlapped": seconds on this rank of training steps, one per round}; they take turns.

    The model is `layers` feed-forwards of hidden size `width`, its input [rows, width].
    """
    steps = {"plain": _stepper(width, layers, False), "overlapped": _stepper(width, layers, True)}
    x = torch.randn(rows, width)
    found: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds + 1):
        for name, model in sorted(steps.items(), reverse=bool(i % 2)):
            barrier()
            begin = time.perf_counter()
            model(x).sum().backward()
            if i:  # the first warms up
                found[name].append(time.perf_counter() - begin)
            model.zero_grad()
    return found


def _stepper(width: int, layers: int, overlap: bool) -> nn.Module:
    import torch.distributed as dist

    from slapo_zoo import Mesh, Schedule

    model = nn.Sequential(*(Mlp(width) for _ in range(layers)))
    sch: Any = Schedule(model, Mesh(tp=2, rank=dist.get_rank()))
    sch["*"].sync("bwd_post", "all_reduce")
    sch["*.up"].shard("weight", 0).shard("bias", 0)
    sch["*.down"].shard("weight", 1).sync("fwd_post", "all_reduce")
    sch.overlap(overlap)
    return model


def run(quick: bool) -> dict[str, list[dict[str, Any]]]:
    """Return the table of ratios overlapped / plain for each size; below 1 overlapping is faster."""
    sizes = [(256, 256, 2, 4)] if quick else [(512, 256, 4, 60), (1024, 256, 2, 40), (1024, 1024, 1, 20)]  # fmt: skip
    rows = []
    for width, tokens, layers, rounds in sizes:
        ranks = on_ranks(seconds, 2, width, tokens, layers, rounds)
        slowest = {name: [max(t) for t in zip(*(r[name] for r in ranks), strict=True)] for name in ranks[0]}  # fmt: skip
        pairs = [a / b for a, b in zip(slowest["overlapped"], slowest["plain"], strict=True)]
        low, middle, high = quantiles(pairs, n=4)
        what = f"{layers} MLPs, {tokens} x {width}, gloo"
        least = {f"{name}, least s": min(times) for name, times in slowest.items()}
        rows.append({"what": what, "rounds": rounds, **least, "overlapped / plain": middle,
                     "quartiles": f"{low:.2f} .. {high:.2f}"})  # fmt: skip
    return {"a training step on tp=2, median of ratios": rows}
