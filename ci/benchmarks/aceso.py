"""Aceso's measured GPT and T5 runs on V100 beside the planner's simulated times; nothing is measured here.

Seconds of a step are from the artifact of Aceso (EuroSys 2024; branch EuroSys24AE of microsoft/SuperScaler, README
and scripts/plot_fig7a.py, plot_fig15a.py): Aceso's own plan, and the best of Megatron-LM's grid, computed from the
published ratio of their throughputs. The plans are not published, only the spaces that were searched. So each row is
compared with the fastest simulated layout of that space: Megatron's grid (tp, pp, dp, 1 to 8 rows of a micro-batch
over all replicas, no or full recomputation), and for Aceso any share of recomputation and any rows. Devices:
V100-32GB, NVLink, and 100 Gb/s per node (assumed). No constant is fitted to these rows.

T5 has 2048 tokens in the encoder and 512 in the decoder (search/aceso_utils.py). Aceso's Wide-ResNet is left out: its
blocks widen inside the 3x3 convolution (runtime/megatron/model/flex_resnet.py), those of torchvision and of this
package do not, so its 1B model has 1.7B parameters here. Step times that Aceso's own cost model predicted are shown
where the artifact has them.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.runs import Size, config_of

ROWS = 8  # rows of a micro-batch over all replicas, in Megatron's grid


class Setting(NamedTuple):
    """One published measurement: a model, a number of devices, and seconds of a step.

    Args:
        size: sizes of the model.
        gpus: number of devices.
        rows: rows of a step, over all replicas.
        megabytes: memory that a device may use.
        aceso: seconds of a step with Aceso's plan.
        megatron: seconds with the best of Megatron's grid; 0 if that is the same layout.
        predicted: seconds that Aceso itself predicted; 0 if they are not published.
        family: "gpt2" or "t5".
    """

    size: Size
    gpus: int
    rows: int
    megabytes: int
    aceso: float
    megatron: float
    predicted: float = 0.0
    family: str = "gpt2"


SETTINGS = (
    Setting(Size(1024, 24, 16, 2048, 51200), 1, 1024, 28000, 190.58, 0.0),
    Setting(Size(2048, 24, 32, 2048, 51200), 4, 1024, 28000, 100.28, 100.28 * 1.22),
    Setting(Size(2560, 32, 32, 2048, 51200), 8, 1024, 28000, 84.6, 84.6 * 1.28),
    Setting(Size(4096, 32, 32, 2048, 51200), 16, 1024, 28000, 85.82, 85.82 * 1.31),
    Setting(Size(5120, 40, 40, 2048, 51200), 32, 1024, 28000, 86.57, 86.57 * 1.28),
    Setting(Size(2048, 24, 32, 2048, 51200), 4, 512, 12000, 58.98, 512 / 6.98, 58.76),
    Setting(Size(1024, 48, 16, 2048, 30592), 4, 512, 12000, 512 / 15.14, 512 / 9.94, 33.66, "t5"),
)  # fmt: skip


def planner_for(setting: Setting) -> Any:
    """Return the planner for a setting's model on V100, with fp16 and Megatron's runtime."""
    from transformers import T5Config

    from slapo_zoo.tune.planner.hardware import GIB, data_sheet
    from slapo_zoo.tune.planner.layout_search import Planner

    v100 = data_sheet("V100-32GB", 125e12, 0.9e12, 150e9, 12.5e9 / 8, 32 * GIB, 16e9, 80, 15.7e12)
    size = setting.size
    if setting.family == "gpt2":
        return Planner(config_of(size), v100, size.seq_len, "fp16", "megatron")
    config = T5Config(
        d_model=size.width, d_kv=64, d_ff=4 * size.width, num_heads=size.heads, vocab_size=size.vocabulary,
        num_layers=size.blocks // 2, architectures=["T5ForConditionalGeneration"],
    )  # fmt: skip
    planner = Planner(config, v100, size.seq_len, "fp16", "megatron")
    planner.family.target_len = 512
    return planner


def space(setting: Setting, wide: bool) -> Iterator[Any]:
    """Yield the layouts of Megatron's grid; with `wide` those that Aceso may reach with one plan for all layers."""
    from slapo_zoo.tune.planner.layout import Layout, divisors

    shares = [i / 8 for i in range(9)] if wide else [0.0, 1.0]
    for tp in (n for n in divisors(setting.gpus) if n <= 8):
        for pp in divisors(setting.gpus // tp):
            dp = setting.gpus // tp // pp
            for rows in (n for n in (1, 2, 4, 8) if setting.rows % (dp * n) == 0):
                if (wide or rows * dp <= ROWS) and setting.size.blocks % pp == 0:
                    for share in shares:
                        yield Layout(
                            tp, pp, dp, rows, setting.rows // dp // rows, checkpoint_ratio=share
                        )


def fastest(planner: Any, setting: Setting, wide: bool) -> Any:
    """Return the forecast of the fastest layout in the space that fits; if none fits, of the one that needs least
    memory.

    On one device the only layout is the published one.
    """
    found = [planner.forecast(layout) for layout in space(setting, wide)]
    if setting.gpus == 1:  # the one plan that is published
        found = [f for f in found if f.layout.rows == 8 and f.layout.checkpoint_ratio == 1]
    fits = [f for f in found if f.memory <= setting.megabytes * 1e6]
    return min(fits, key=lambda f: f.step.seconds) if fits else min(found, key=lambda f: f.memory)


def rows_of(setting: Setting) -> Iterator[dict[str, Any]]:
    """Yield a table row for each system (Megatron-LM, Aceso) that was measured in a setting."""
    planner, size = planner_for(setting), setting.size
    for system, measured in (("Megatron-LM", setting.megatron), ("Aceso", setting.aceso)):
        if measured:
            found = fastest(planner, setting, system == "Aceso")
            own = setting.predicted if system == "Aceso" and setting.predicted else None
            yield {
                "what": f"{system}: {setting.family} {size.blocks} x {size.width}, {setting.gpus} V100",
                "measured s": measured, "predicted by Aceso s": own, "simulated s": found.step.seconds,
                "error": found.step.seconds / measured - 1, "simulated layout": str(found.layout),
            }  # fmt: skip


def table(quick: bool) -> list[dict[str, Any]]:
    """Return the rows of all settings; with `quick` of the first alone, whose plan is published."""
    return [row for setting in SETTINGS[: 1 if quick else None] for row in rows_of(setting)]
