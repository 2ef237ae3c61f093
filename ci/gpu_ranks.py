"""Stages of `gpu-day` that run full models: dropout masks, several ranks on one device, loading and saving."""

import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_models import batch_of, config_of, device

LAYOUTS: dict[str, dict[str, Any]] = {
    "group": {}, "tp2": {"tp": 2}, "pp2": {"pp": 2}, "dp2": {"dp": 2}, "zero2": {"dp": 2, "dp_shard": 2},
    "offload": {"checkpoint_ratio": 1.0, "checkpoint_policy": "offload"},
    "sp2": {"tp": 2, "sequence_parallel": True}, "tp2pp2": {"tp": 2, "pp": 2}, "pp2dp2": {"pp": 2, "dp": 2},
    "cp2": {"cp": 2},
}  # fmt: skip
CASES = ("masks:bits", *(f"ranks:{name}" for name in LAYOUTS), "load:files")
CLOSE = 1e-4  # relative tolerance of a loss in fp32 with dropout: masks are equal, the order of sums is not


def masks(what: str, out: Path, fake: bool) -> dict[str, Any]:
    """Compare dropout seeds and masks of the device with those of the CPU, bit by bit, also for a slice of a row.

    Return the number of comparisons; RuntimeError if two differ. `what` and `out` are unused.
    """
    from slapo_zoo.kernels.dropout import dropout
    from slapo_zoo.parallel.rng.device_seeds import hashed_cells, later
    from slapo_zoo.parallel.rng.layout_independent_random import RandomStream

    compared = 0
    for p in (0.1, 0.5):
        for shape in ((3, 8, 24),) if fake else ((8, 512, 768), (4, 1000, 1024), (16, 128, 3072)):
            stream = RandomStream(seed=7, step=1, num_rows=shape[0])
            host, there = (torch.ones(shape, device=on) for on in ("cpu", device()))
            with stream.at(*stream.position()):  # both devices draw for the same step and call
                seeds, theirs = (
                    torch.as_tensor(stream.seeds(x, "site"), dtype=torch.int64).cpu()
                    for x in (host, there)
                )
            kept = hashed_cells(host, p, seeds)
            found = dropout(there, seeds=seeds.to(device()), p=p)
            half = hashed_cells(
                host[:, shape[1] // 2 :], p, later(seeds, host[0, : shape[1] // 2].numel())
            )
            for ours, wanted in (
                (theirs, seeds),
                (hashed_cells(there, p, seeds).cpu(), kept),
                (found.cpu() != 0, kept != 0),
                (half, kept[:, shape[1] // 2 :]),
            ):
                if not torch.equal(ours, wanted):
                    raise RuntimeError(f"masks {shape} p={p}: device and host differ")
                compared += 1
    return {"compared": compared}


def ranks(what: str, out: Path, fake: bool) -> dict[str, Any]:
    """Train on a layout of LAYOUTS (`what`) and without ranks, with dropout; return the largest difference of losses.

    RuntimeError is raised for a difference above CLOSE. Ranks that share one device communicate through gloo.
    """
    from slapo_zoo.parallel.ranks.launch import run_local

    layout = LAYOUTS[what]
    nprocs = math.prod(layout.get(mesh_dim, 1) for mesh_dim in ("tp", "pp", "dp", "cp"))
    if layout.get("pp", 1) > 1 and 0 < torch.cuda.device_count() < nprocs:
        return _refused(nprocs, layout)
    wanted = train({})
    # nccl if every rank has a device of its own; else gloo, which carries CUDA tensors
    each = run_local(train, nprocs, (layout,), timeout=100, start="spawn", threads=1)
    found = [
        max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True)) for losses in each
    ]
    if not max(found) <= CLOSE:
        raise RuntimeError(f"{what}: losses {each} for {wanted}")
    return {"error": max(found)}


def _refused(nprocs: int, layout: dict[str, Any]) -> dict[str, Any]:
    """Return the error of pipeline stages that share a GPU, whose tensors gloo cannot send; RuntimeError without one."""
    from slapo_zoo.errors import RankError
    from slapo_zoo.parallel.ranks.launch import run_local

    try:
        run_local(train, nprocs, (layout,), timeout=100, start="spawn", threads=1)
    except RankError as error:
        if "from stage to stage" in str(error):
            return {"refused": str(error)}
        raise
    raise RuntimeError("stages that share a GPU were not refused")


def train(layout: dict[str, Any]) -> list[float]:
    """Train GPT-2, BERT and Llama for three steps each on this rank, and return the losses."""
    families = ("GPT2LMHeadModel", "BertForMaskedLM", "LlamaForCausalLM")
    return [loss for family in families for loss in _train(family, layout)]


def _train(family: str, layout: dict[str, Any]) -> list[float]:
    from slapo_zoo import AutoScheduledModel

    torch.manual_seed(0)
    config = config_of(family, tiny=True, dropout="default")
    model: Any = AutoScheduledModel.from_config(config, seed=0, device=device(), **layout)
    model.train()
    model.schedule.state.offloads.notes = []  # then small activations are offloaded too
    batch = batch_of(config, 4, 12)
    dp, at = model.mesh.dp, model.mesh.coord("dp")
    mine = {name: x[at * 4 // dp : (at + 1) * 4 // dp] for name, x in batch.items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        losses.append(float(model.train_step(mine)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def load(what: str, out: Path, fake: bool) -> dict[str, Any]:
    """Return the rate of loading safetensors to the device, and how long an asynchronous save stops training."""
    from transformers import GPT2Config

    from slapo_zoo import AutoScheduledModel
    from slapo_zoo.model.checkpoints.training_checkpoint import async_save_checkpoint

    width, heads, blocks, words = (32, 4, 2, 101) if fake else (1600, 25, 24, 50257)
    config = GPT2Config(
        n_embd=width, n_head=heads, n_layer=blocks, vocab_size=words, n_positions=1024,
        architectures=["GPT2LMHeadModel"],
    )  # fmt: skip
    with tempfile.TemporaryDirectory(dir=out) as folder:
        model: Any = AutoScheduledModel.from_config(config, seed=0, device=device())
        model.save_pretrained(folder)
        seconds, model = _timed(lambda: AutoScheduledModel.from_pretrained(folder, device=device()))
        size = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
        stall, saving = _timed(lambda: async_save_checkpoint(model, Path(folder) / "step"))
        whole, _ = _timed(saving.result)
    return {
        "bytes": size,
        "load GB/s": size / seconds / 1e9,
        "stall ms": 1e3 * stall,
        "save s": stall + whole,
    }


def _timed(function: Callable[[], Any]) -> tuple[float, Any]:
    if device() == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    result = function()
    if device() == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin, result
