"""Custom operators for draws of a random stream: a compiled graph takes the stream's position as its input.

They are functions of their arguments alone, so a graph draws anew at every step without a compilation,
and what it recomputes in its backward is what it drew, wherever the stream has gone meanwhile.
"""

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from slapo_zoo.errors import SlapoError
from slapo_zoo.rng import random_stream
from slapo_zoo.rng.device_seeds import DeviceSeeds, later, split_cells
from slapo_zoo.rng.random_stream import RandomStream, SiteName, Where, hashed_cells

NAMESPACE = "slapo_zoo"
# A graph that is replayed, as CUDA graphs are, would not ask for the position again.
UNSAFE = [t for n in ("cudagraph_unsafe",) if (t := getattr(torch.Tag, n, None)) is not None]
_SEEDS = DeviceSeeds()  # of all graphs


def _stream(at: Tensor, seed: int, rows: bool, real: Tensor | None) -> RandomStream:
    step, first_row, num_rows = at.tolist()  # on the host: nothing waits
    if num_rows == random_stream.NOWHERE:
        problem = "compiled code beside any call of the model would draw the same masks for ever"
        raise SlapoError("dropout", "torch.compile", problem, "call a module alone uncompiled")
    random_stream.GRAPHS[0] += 1
    place = (first_row, num_rows) if rows else (0, 0)
    stream = RandomStream(seed, step, *place, device_seeds=_SEEDS, is_open=True)
    stream.real_tokens = real if rows else None
    return stream


def in_graph(site: Where) -> tuple[Tensor | None, str]:
    """A site as operators take it: the hash of its path as a tensor, and what stands behind the path."""
    return (site.key, site.suffix) if isinstance(site, SiteName) else (None, str(site))


def _whole(key: Tensor | None, site: str) -> int:
    return zlib.crc32(site.encode(), 0 if key is None else int(key))


@torch.library.custom_op(f"{NAMESPACE}::drawn_mask", mutates_args=(), tags=UNSAFE)
def drawn_mask(
    at: Tensor, seed: int, rows: bool, real: Tensor | None, key: Tensor | None, site: str,
    heads: Sequence[int], shape: Sequence[int], p: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """RandomStream.keep_mask on a CPU for a tensor of `shape`, where axis 0 are `rows` of the batch.

    `at`, int64 [3], is the position of the stream; with `key`, int64, on the host, the hash of the site's name begins.
    """
    whole = torch.empty((), dtype=dtype).expand(list(shape))
    return _stream(at, seed, rows, real).keep_mask(whole, p, _whole(key, site), list(heads)).clone()


@drawn_mask.register_fake
def _(at, seed, rows, real, key, site, heads, shape, p, dtype):
    return torch.empty(shape, dtype=dtype)


@torch.library.custom_op(f"{NAMESPACE}::drawn_uniform", mutates_args=(), tags=UNSAFE)
def drawn_uniform(
    at: Tensor, seed: int, rows: bool, key: Tensor | None, site: str,
    shape: Sequence[int], dtype: torch.dtype, device: torch.device,
) -> Tensor:  # fmt: skip
    """RandomStream.uniform for a tensor of `shape` on the device; arguments as above."""
    whole = torch.empty((), dtype=dtype, device=device).expand(list(shape))
    return _stream(at, seed, rows, None).uniform(whole, _whole(key, site))


@drawn_uniform.register_fake
def _(at, seed, rows, key, site, shape, dtype, device):
    return torch.empty(shape, dtype=dtype, device=device)


@torch.library.custom_op(f"{NAMESPACE}::drawn_seeds", mutates_args=(), tags=UNSAFE)
def drawn_seeds(
    at: Tensor, seed: int, rows: bool, key: Tensor | None, site: str,
    count: int, heads: Sequence[int], device: torch.device,
) -> Tensor:  # fmt: skip
    """DeviceSeeds.find for `count` rows, of the site's name; arguments as above."""
    return (
        _stream(at, seed, rows, None).found(device, _whole(key, site), count, list(heads)).clone()
    )


@drawn_seeds.register_fake
def _(at, seed, rows, key, site, count, heads, device):
    return torch.empty(count * max(len(heads), 1), dtype=torch.int64, device=device)


@torch.library.custom_op(f"{NAMESPACE}::moved_seeds", mutates_args=())
def moved_seeds(seeds: Tensor, parts: int, size: int, first: int) -> Tensor:
    """device_seeds.split_cells into `parts` of `size`, then `later` by `first`."""
    return later(split_cells(seeds, parts, size), first)


@moved_seeds.register_fake
def _(seeds, parts, size, first):
    return seeds.new_empty(seeds.numel() * parts)


@torch.library.custom_op(f"{NAMESPACE}::hashed_mask", mutates_args=())
def hashed_mask(seeds: Tensor, p: float, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """hashed_cells for a tensor of `shape`."""
    whole = torch.empty((), dtype=dtype, device=seeds.device).expand(list(shape))
    return hashed_cells(whole, p, seeds)


@hashed_mask.register_fake
def _(seeds, p, shape, dtype):
    return seeds.new_empty(shape, dtype=dtype)
