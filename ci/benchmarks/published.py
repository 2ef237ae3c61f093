"""The published multi-node figures of Slapo beside the planner's: simulated; not measured.

Published are samples/s of three systems on 16, 32 and 64 V100 (awslabs/slapo, benchmark/plot/multi_node.py),
without a model. Assumed here, from the plot of the same figure and the run scripts of the authors' fork
(chhzh123/slapo): a GPT of 10B parameters, rows of 1024 tokens, 256 of them a step and 4 a micro-batch, float16,
tp=8, pp=2, 1F1B. The devices are those of EC2 p3dn.24xlarge by its data sheet. No constant is fitted to the figures, so look at
how each column grows rather than at its height: the planner counts every operation of plain eager code as a
pass over memory of its own, while all three systems ran fused kernels.
"""

from typing import Any

PUBLISHED = {  # devices: samples per second
    16: {"Megatron-LM": 9.21, "DeepSpeed": 9.75, "Slapo": 11.29},
    32: {"Megatron-LM": 16.69, "DeepSpeed": 19.14, "Slapo": 22.01},
    64: {"Megatron-LM": 28.16, "DeepSpeed": 23.90, "Slapo": 30.53},
}
SIZE: dict[str, Any] = {
    "n_layer": 48,
    "n_embd": 4096,
    "n_head": 32,
}  # 9.9B parameters; only "10B" is published
SEQ_LEN, ROWS = 1024, 256
SCRIPT = {"tp": 8, "pp": 2, "rows": 4, "stages_per_rank": 1, "sequence_parallel": False}
AS_SCRIPT, FASTEST = "simulated, tp=8 pp=2", "simulated, fastest"


def make_planner(size: dict[str, Any]) -> Any:
    """Of the assumed model on the assumed devices."""
    import torch
    from transformers import GPT2Config

    from slapo_zoo.tune.planner.hardware import GIB, data_sheet
    from slapo_zoo.tune.planner.search import Planner

    config: Any = GPT2Config(
        **size, n_positions=SEQ_LEN, vocab_size=50264, activation_function="gelu",
        bos_token_id=1, eos_token_id=2, architectures=["GPT2LMHeadModel"],
    )  # fmt: skip
    config.loss_type = "ForCausalLMLoss"
    # 32 GiB a device; 100 Gb/s a node, shared by its eight devices
    p3dn = data_sheet("V100, p3dn.24xlarge", 125e12, 0.9e12, 150e9, 12.5e9 / 8, 32 * GIB)
    return Planner(config, p3dn, SEQ_LEN, torch.float16)


def simulate(planner: Any, gpus: int) -> dict[str, tuple[float, str]]:
    """(samples/s, layout): the fastest that fits of those like the authors' script, and of all."""
    fits = planner.search(gpus, ROWS).feasible
    theirs = [f for f in fits if SCRIPT.items() <= vars(f.layout).items()]
    return {
        name: (ROWS / found[0].step.seconds, str(found[0].layout))
        for name, found in ((AS_SCRIPT, theirs), (FASTEST, fits))
        if found
    }


def run(quick: bool) -> dict[str, list[dict[str, Any]]]:
    """Throughput, growth over 16 devices, and the layouts that were simulated."""
    planner = make_planner({"n_layer": 8, "n_embd": 256, "n_head": 8} if quick else SIZE)
    found = {gpus: simulate(planner, gpus) for gpus in PUBLISHED}
    rates: dict[str, dict[int, float]] = {
        name: {gpus: PUBLISHED[gpus][name] for gpus in PUBLISHED} for name in PUBLISHED[16]
    }
    for name in (AS_SCRIPT, FASTEST):
        rates[name] = {gpus: found[gpus][name][0] for gpus in found if name in found[gpus]}
    speed = [{"what": name} | {f"{n} GPUs": r[n] for n in r} for name, r in rates.items()]
    growth = [{"what": name, "32 / 16": r[32] / r[16], "64 / 16": r[64] / r[16],
               "efficiency at 64": r[64] / r[16] / 4} for name, r in rates.items()]  # fmt: skip
    layouts = [{"what": name, "GPUs": gpus, "layout": layout}
               for gpus, of in found.items() for name, (_, layout) in of.items()]  # fmt: skip
    return {
        "samples/s: published, and simulated (not measured)": speed,
        "growth: published, and simulated (not measured)": growth,
        "simulated layouts": layouts,
    }
