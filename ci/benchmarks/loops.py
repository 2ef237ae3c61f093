"""Time of a hand-written training loop against `train_step`, and how much of the dp all-reduce the backward hides."""

import time
from collections.abc import Callable
from statistics import median, quantiles
from typing import Any

import torch

from benchmarks.ranks import barrier, on_ranks

MOST = 1.02  # most time of train_step, relative to a hand-written step


def seconds(layout: dict[str, int], width: int, layers: int, rounds: int) -> dict[str, list[float]]:
    """Return {kind of loop: seconds on this rank of forward and backward, one per round}; the kinds take turns.

    The model is a GPT-2 of `layers` blocks and hidden size `width`, with `layout` as arguments of from_config.
    """
    model, batch = _model(layout, width, layers)
    found: dict[str, list[float]] = {name: [] for name in _KINDS}
    for i in range(rounds + 2):
        for name in sorted(_KINDS, reverse=bool(i % 2)):
            model.zero_grad()
            barrier()
            begin = time.perf_counter()
            _KINDS[name](model, batch)
            if i > 1:  # the first two warm up
                found[name].append(time.perf_counter() - begin)
    return found


def _model(layout: dict[str, int], width: int, layers: int) -> tuple[Any, dict[str, torch.Tensor]]:
    from transformers import GPT2Config

    from slapo_zoo import AutoScheduledModel

    config = GPT2Config(
        n_embd=width, n_layer=layers, n_head=4, vocab_size=2048, n_positions=128, bos_token_id=0, eos_token_id=0,
        embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, architectures=["GPT2LMHeadModel"],
    )  # fmt: skip
    model = AutoScheduledModel.from_config(config, seed=0, **layout).train()
    model.input_check_interval = 0
    g = torch.Generator().manual_seed(model.mesh.coord("dp"))
    ids = torch.randint(0, 2048, (4, 128), generator=g)
    return model, {"input_ids": ids, "labels": ids}


def _by_hand(model: Any, batch: dict[str, Any]) -> None:
    model(**batch).loss.backward()


def _without_sums(model: Any, batch: dict[str, Any]) -> None:
    with model.no_sync():
        model(**batch).loss.backward()


def _one_after_the_other(model: Any, batch: dict[str, Any]) -> None:
    _without_sums(model, batch)
    reducer = model._slapo.calls.reducer
    reducer.averaged = False
    reducer.finish({})


def _by_train_step(model: Any, batch: dict[str, Any]) -> None:
    model.train_step(batch, micro_batches=1)


_KINDS: dict[str, Callable[[Any, dict[str, Any]], None]] = {
    "by hand": _by_hand, "train_step": _by_train_step, "no sums": _without_sums, "sums after": _one_after_the_other,
}  # fmt: skip


def _slowest(layout: dict[str, int], *sizes: int) -> dict[str, list[float]]:
    ranks = on_ranks(seconds, 2, layout, *sizes)
    return {name: [max(t) for t in zip(*(r[name] for r in ranks), strict=True)] for name in _KINDS}


def run(quick: bool) -> dict[str, list[dict[str, Any]]]:
    """Return two tables: time of the hand-written loop over that of `train_step`, and the hidden share of the dp
    all-reduce.

    Of each round the slowest rank counts.
    """
    sizes = (64, 2, 4) if quick else (512, 6, 30)
    loops, hidden = [], []
    for what, layout in (("tp=2", {"tp": 2}), ("dp=2", {"dp": 2})):
        found = _slowest(layout, *sizes)
        ratios = [a / b for a, b in zip(found["by hand"], found["train_step"], strict=True)]
        low, middle, high = quantiles(ratios, n=4)
        beyond = ["by hand / train_step"] if middle > MOST and not quick else []
        loops.append({"what": what, "rounds": sizes[2], "train_step, s": median(found["train_step"]),
                      "by hand / train_step": middle, "quartiles": f"{low:.3f} .. {high:.3f}", "beyond": beyond})  # fmt: skip
    none, after, beside = (median(found[name]) for name in ("no sums", "sums after", "by hand"))
    hidden.append({"what": "dp=2", "backward without sums, s": none, "sums after it, s": after - none,
                   "sums that show, s": beside - none, "hidden": 1 - (beside - none) / (after - none)})  # fmt: skip
    return {"forward and backward, GPT-2 on gloo": loops, "the sum over dp": hidden}
