"""Dropout hash in Triton, bit for bit that of slapo_zoo.parallel.rng.random_stream.is_kept."""

import triton
import triton.language as tl


@triton.jit
def scaled_keep(counter, key, threshold, scale):
    """Return 0 (dropped) or `scale` per element, hashed from its index `counter` and the seed `key`."""
    bits = counter.to(tl.int64) * 0x2545F4914F6CDD1D + key
    bits = (bits ^ ((bits >> 31) & 0x1FFFFFFFF)) * -0x40A7B892E31B1A47
    bits = (bits ^ ((bits >> 31) & 0x1FFFFFFFF)) * -0x6B2FB644ECCEEE15
    bits = (bits >> 40) & 0xFFFFFF
    return tl.where(bits >= threshold, scale, 0.0)


def threshold_and_scale(p: float) -> tuple[int, float]:
    """Return the arguments `threshold` and `scale` of `scaled_keep` for a dropout probability."""
    return int(p * 0x1000000), 1.0 / (1.0 - p) if p < 1.0 else 1.0
