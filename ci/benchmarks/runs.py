"""Training runs that others measured and published, as layouts with which the planner's forecasts are compared."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from slapo_zoo.tune.planner.layout import Layout

FOLDER = Path(__file__).parent / "published_runs"


class Size(NamedTuple):
    """Sizes of a GPT; `width` is its hidden size."""

    width: int
    blocks: int
    heads: int
    seq_len: int
    vocabulary: int


@dataclass(frozen=True)
class Run:
    """One measured layout.

    Args:
        source: who published it.
        size: sizes of the model.
        layout: the configuration.
        seconds: time of a step; 0 where only memory is known.
        memory: GiB of weights, gradients, optimizer states and activations per device; 0 if unknown.
        node_network: bytes per second from a node to other nodes.
        same_memory: whether the measured system keeps as much in memory as the planner's runtime.
    """

    source: str
    size: Size
    layout: Layout
    seconds: float
    memory: float = 0.0
    node_network: float = 200e9  # Selene: eight cards of 200 Gb/s
    same_memory: bool = True

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of the run."""
        return self.layout.tp * self.layout.pp * self.layout.dp


def vtrain(name: str) -> Iterator[Run]:
    """Yield the runs of vTrain's artifact "single_node" or "multi_node": full recomputation, 800 Gb/s per node."""
    with (FOLDER / f"vtrain_{name}.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            n = {key: int(value) for key, value in row.items() if value.isdigit()}
            tp, dp, pp = (n[f"{what} parallelism"] for what in ("tensor", "data", "pipeline"))
            count = n["global batch"] // dp // n["micro batch"]
            size = Size(
                n["hidden size"], n["# layers"], n["attention heads"], n["sequence length"], 50304
            )
            layout = Layout(tp, pp, dp, n["micro batch"], count, checkpoint_ratio=1.0)
            source = f"vTrain, {name.replace('_', ' ')}"
            yield Run(source, size, layout, float(row["iteration time (ms)"]) / 1e3, 0.0, 100e9)


KORTHIKANTI = (  # blocks, width, heads, pp, rows, rows of a micro-batch, virtual stages, seconds and GiB by what is recomputed
    (48, 6144, 64, 1, 4, 4, 1, (1.42, 1.10), (45.56, 59.25, 9.56)),
    (96, 12288, 96, 8, 64, 1, 3, (18.13, 13.75), (45.56, 66.84, 12.35)),
    (105, 20480, 128, 35, 280, 1, 3, (49.05, 37.83), (31.64, 114.0, 23.1)),
    (128, 25600, 160, 64, 512, 1, 1, (94.42, 71.49), (32.96, 131.3, 26.6)),
)


def korthikanti() -> Iterator[Run]:
    """Yield the runs of arXiv:2205.05198, table 5 (times) and figure 1 (memory): 8 to 512 A100-80GB, tp=8."""
    for blocks, width, heads, pp, rows, per, virtual, times, sizes in KORTHIKANTI:
        size, order = Size(width, blocks, heads, 2048, 51200), "interleaved_1f1b"
        order = order if virtual > 1 else "1f1b"
        layout = Layout(8, pp, 1, per, rows // per, order, virtual)
        whole = replace(layout, checkpoint_ratio=1.0)
        fixed, nothing, selective = sizes
        source = "Korthikanti et al. 2022"
        yield Run(source, size, whole, times[0])
        only = replace(whole, checkpoint_policy="attention", sequence_parallel=True)
        yield Run(source, size, only, times[1], fixed + selective)
        yield Run(source, size, layout, 0.0, fixed + nothing)


MEGATRON = (  # width, blocks, heads, tp, pp, devices, rows, TFLOP/s of a device
    (2304, 24, 24, 1, 1, 32, 512, 137), (3072, 30, 32, 2, 1, 64, 512, 138),
    (4096, 36, 32, 4, 1, 128, 512, 142), (6144, 40, 48, 8, 1, 256, 1024, 135),
    (8192, 48, 64, 8, 2, 512, 1536, 138), (10240, 60, 80, 8, 4, 1024, 1792, 140),
    (12288, 80, 96, 8, 8, 1536, 2304, 148), (16384, 96, 128, 8, 16, 1920, 2160, 155),
    (20480, 105, 128, 8, 35, 2520, 2520, 163), (25600, 128, 160, 8, 64, 3072, 3072, 163),
)  # fmt: skip


TABLE_2 = (  # width, blocks, heads, tp, pp, devices, rows, TFLOP/s of a device
    (12288, 96, 96, 8, 12, 384, 1536, 153), (12288, 96, 96, 8, 12, 768, 1536, 149),
    (12288, 96, 96, 8, 12, 1536, 1536, 141), (20480, 105, 128, 8, 35, 560, 2240, 171),
    (20480, 105, 128, 8, 35, 1120, 2240, 167), (20480, 105, 128, 8, 35, 2240, 2240, 159),
)  # fmt: skip
ZERO_3 = (  # width, blocks, heads, devices, rows of a micro-batch, TFLOP/s of a device
    (12288, 96, 96, 384, 4, 144), (12288, 96, 96, 768, 2, 88), (12288, 96, 96, 1536, 1, 44),
    (20480, 105, 128, 640, 4, 138), (20480, 105, 128, 1120, 2, 98), (20480, 105, 128, 2240, 1, 48),
)  # fmt: skip


def megatron(number: int, table: Any) -> Iterator[Run]:
    """Yield the runs of arXiv:2104.04473, table 1 or 2 (`number`), whose rows are given as `table`.

    The paper does not state the pipeline order, nor for table 1 the micro-batch: 1F1B and one row are assumed.
    """
    for width, blocks, heads, tp, pp, gpus, rows, rate in table:
        layout = Layout(
            tp, pp, gpus // tp // pp, 1, rows // (gpus // tp // pp), checkpoint_ratio=1.0
        )
        size = Size(width, blocks, heads, 2048, 51200)
        yield Run(
            f"Megatron-LM 2021, table {number}", size, layout, _seconds(size, rows, gpus, rate)
        )


def zero_3() -> Iterator[Run]:
    """Yield the ZeRO-3 runs of arXiv:2104.04473, table 2: DeepSpeed, tp = pp = 1, one micro-batch per step."""
    for width, blocks, heads, gpus, rows, rate in ZERO_3:
        size, layout = Size(width, blocks, heads, 2048, 51200), Layout(1, 1, gpus, rows, 1)
        layout = replace(layout, checkpoint_ratio=1.0, dp_shard=gpus)
        seconds = _seconds(size, rows * gpus, gpus, rate)
        yield Run("ZeRO-3, Megatron-LM 2021, table 2", size, layout, seconds, same_memory=False)


def _seconds(size: Size, rows: int, gpus: int, rate: float) -> float:
    """Return the seconds of a step of `rows` rows at `rate` TFLOP/s per device, by equation 3 of arXiv:2104.04473."""
    more = 1 + 2048 / (6 * size.width) + 51200 / (16 * size.blocks * size.width)
    return 96 * rows * 2048 * size.blocks * size.width**2 * more / gpus / rate / 1e12


SOURCES: dict[str, Any] = {
    "single": lambda: vtrain("single_node"), "multi": lambda: vtrain("multi_node"), "korthikanti": korthikanti,
    "megatron": lambda: megatron(1, MEGATRON), "megatron 2": lambda: megatron(2, TABLE_2), "zero 3": zero_3,
}  # fmt: skip


def config_of(size: Size) -> Any:
    """Return the config of a GPT-2 of these sizes, with Megatron's dropout."""
    from transformers import GPT2Config

    config: Any = GPT2Config(
        n_layer=size.blocks, n_embd=size.width, n_head=size.heads, n_positions=size.seq_len,
        vocab_size=size.vocabulary, activation_function="gelu", bos_token_id=1, eos_token_id=2,
        architectures=["GPT2LMHeadModel"],
    )  # fmt: skip
    config.loss_type = "ForCausalLMLoss"
    return config


@lru_cache(maxsize=2)  # runs of the same model follow each other
def planner_of(size: Size, node_network: float) -> Any:
    """Return the planner of a model on A100-80GB; `node_network` is the bytes per second of a node to others."""
    from slapo_zoo.tune.planner.hardware import HARDWARE, NETWORK
    from slapo_zoo.tune.planner.layout_search import Planner

    device = replace(HARDWARE["a100"], network=NETWORK * node_network / 8)
    return Planner(config_of(size), device, size.seq_len, "fp16", "megatron")
