"""Throughput, MFU, cost and bottleneck of a simulated training step."""

from dataclasses import dataclass, replace

from slapo_zoo.tune.planner.layout_search import Forecasted, Planner

FASTER = 2.0  # links and network, to see whether they bind


@dataclass(frozen=True)
class Worth:
    """Throughput, MFU and bottleneck of a predicted step.

    Args:
        tokens_per_s: tokens per second of the whole cluster.
        mfu: model flops per second divided by the peak rate; None where the device's peak is unknown.
        gpu_hours: device hours to train on 10^9 tokens.
        binds: compute, bubble, transfers and optimizer --> share of the step, 0 to 1.
        faster_link: share of the step that links and network of twice the rate would save.
        spare: bytes of device memory that stay free on the fullest rank.
        error: mean relative error of such forecasts against published runs; None if never compared.
    """

    tokens_per_s: float
    mfu: float | None
    gpu_hours: float
    binds: dict[str, float]
    faster_link: float
    spare: float
    error: float | None

    def text(self) -> str:
        """Format the estimate as two lines: throughput, then what bounds the step."""
        error = "unmeasured" if self.error is None else f"± {self.error:.0%}"
        used = "" if self.mfu is None else f", MFU {self.mfu:.0%}"
        shares = ", ".join(
            f"{name} {share:.0%}" for name, share in self.binds.items() if share >= 0.005
        )
        return (
            f"simulated ({error}): {self.tokens_per_s:.3g} tokens/s{used}, "
            f"{self.gpu_hours:.3g} GPU hours for 10^9 tokens\n"
            f"the step: {shares}; links of twice the rate would save {self.faster_link:.0%}; "
            f"{self.spare / 2**30:.1f} GiB are left"
        )


def worth(planner: Planner, found: Forecasted) -> Worth:
    """Return throughput, MFU and bottleneck of a step that the planner has forecast."""
    at, step, hardware = found.layout, found.step, planner.hardware
    gpus = at.tp * at.pp * at.dp
    tokens = at.dp * at.micro_batches * at.rows * planner.seq_len
    uses = planner.profile(at.tp, at.sequence_parallel).uses(at.rows)
    flops = sum(use.forward.flops + use.backward.flops for use in uses)
    flops *= at.tp * at.dp * at.micro_batches
    peak = hardware.peak * gpus * step.seconds
    links = replace(hardware, link=FASTER * hardware.link, network=FASTER * hardware.network)
    other = planner.on(links).forecast(at).step.seconds
    waits = step.gradients_s + step.transfer_s
    parts = {"sums over dp and transfers": waits, "optimizer": step.optimizer_s}
    shares = {name: seconds / step.seconds for name, seconds in parts.items()}
    shares = {"bubble": step.bubble_share} | shares
    return Worth(
        tokens / step.seconds, flops / peak if peak else None,
        gpus * step.seconds / tokens * 1e9 / 3600,
        {"compute": max(1.0 - sum(shares.values()), 0.0)} | shares, 1.0 - other / step.seconds,
        hardware.memory - hardware.reserved - found.memory, hardware.error or None,
    )  # fmt: skip
