"""Dropout seeds and masks that are hashed on the device; in each step only one number is sent to the device.

The seeds are the same integers that `RandomStream.cells` computes in Python. Compiled code calls these
functions as custom operators, because compilers do not support integers that wrap around.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

from slapo_zoo.parallel.once import runs_at_once

NAMESPACE = "slapo_zoo"
MASK = (1 << 64) - 1
GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
STRIDE = 0x2545F4914F6CDD1D  # added to the hash input per element: see hashed_bits
PLANS = 8  # number of batch sizes whose seeds are cached


def mix_state(state: int, word: int) -> int:
    """Mix a 64-bit word into a 64-bit hash state and return the new state (the finaliser of splitmix64)."""
    state = (state ^ word) * FIRST & MASK
    state = (state ^ (state >> 27)) * SECOND & MASK
    return state ^ (state >> 31)


def mix(*words: int) -> int:
    """Hash integers to a 63-bit seed."""
    state = GOLDEN
    for word in words:
        state = mix_state(state, word)
    return state >> 1


def mix_tensors(state: Tensor, *words: Tensor) -> Tensor:
    """Mix `words` one after the other into an int64 hash state, elementwise, and return the 63-bit
    seeds. The result equals that of `mix` for the same integers.
    """
    for word in words:
        state = (state ^ word) * signed(FIRST)
        state = (state ^ _shifted(state, 27)) * signed(SECOND)
        state = state ^ _shifted(state, 31)
    return _shifted(state, 1)


def signed(word: int) -> int:
    """Reinterpret an unsigned 64-bit integer as int64."""
    word &= MASK
    return word - (1 << 64) if word >> 63 else word


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift int64 values right by `bits`, filling with zeros."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def later(seeds: Tensor, elements: Tensor | int) -> Tensor:
    """Return the seeds with which a mask begins at element `elements` of each block that `seeds` [n] seed."""
    if torch.compiler.is_compiling() and not isinstance(elements, Tensor):
        return moved_seeds(seeds, 1, 0, elements)
    return seeds + elements * signed(STRIDE) if isinstance(elements, Tensor) else seeds + signed(elements * STRIDE)  # fmt: skip


def split_cells(seeds: Tensor, parts: int, size: int) -> Tensor:
    """Cut each of the n blocks (cells) of a dropout mask into `parts` blocks of `size` elements. Return their seeds
    [n * parts], which give the same mask as `seeds` [n].
    """
    if parts == 1:
        return seeds
    if torch.compiler.is_compiling():
        return moved_seeds(seeds, parts, size, 0)
    starts = torch.arange(0, parts * size, size, device=seeds.device)
    return later(seeds[:, None], starts).flatten()


@torch.library.custom_op(f"{NAMESPACE}::moved_seeds", mutates_args=())
def moved_seeds(seeds: Tensor, parts: int, size: int, first: int) -> Tensor:
    """Return seeds [n * parts]: `seeds` [n] seed n blocks of a dropout mask, each is cut into `parts` blocks of `size`
    elements, and of each new block the first `first` elements are skipped. A custom op of torch.
    """
    return later(split_cells(seeds, parts, size), first)


@moved_seeds.register_fake
def _(seeds, parts, size, first):
    return seeds.new_empty(seeds.numel() * parts)


def hashed_cells(x: Tensor, p: float, seeds: Sequence[int] | Tensor) -> Tensor:
    """Return a dropout mask of 0 and 1 in the shape and dtype of x; an element is 0 with probability `p`.

    x is cut into as many equal blocks (cells) as there are seeds, and the mask of a block is hashed from its seed.
    """
    if torch.compiler.is_compiling() and isinstance(seeds, Tensor):
        return hashed_mask(seeds, p, x.shape, x.dtype)
    key = torch.as_tensor(seeds, dtype=torch.int64, device=x.device)
    counter = torch.arange(x.numel() // max(len(key), 1), dtype=torch.int64, device=x.device)
    return is_kept(counter[None], key[:, None], p).to(x.dtype).view(x.shape)


def drawn_cells(x: Tensor, p: float, seeds: Sequence[int], first: int = 0) -> Tensor:
    """Return a dropout mask of 0 and 1 in the shape and dtype of x, drawn on the CPU; elements are 0 with probability `p`.

    x is cut into as many equal blocks (cells) as there are seeds. For each a generator is seeded, whose first `first`
    draws are skipped. On a CPU this is eight times as fast as `bernoulli_` and three times as fast as a hash of each
    element; the probability is rounded to a multiple of 2**-16.
    """
    import numpy as np  # not at the top: exported kernels import torch alone

    keep, least = torch.empty(x.shape, dtype=x.dtype, device="cpu"), round(p * 65536) - 32768
    if least > 32767 or not keep.numel():
        return keep.zero_()
    for cell, seed in zip(keep.view(len(seeds), -1), seeds, strict=True):
        end = first + len(cell)
        words = np.random.SFC64(seed).random_raw(-(-end // 4))
        torch.ge(torch.from_numpy(words.view(np.int16))[first:end], least, out=cell)
    return keep


def is_kept(counter: Tensor, key: Tensor, p: float) -> Tensor:
    """Return True where dropout keeps element number `counter` of a block with seed `key`; the two
    tensors broadcast. `p` is the probability that an element becomes 0.
    """
    return hashed_bits(counter, key) >= int(p * 0x1000000)


def hashed_bits(counter: Tensor, key: Tensor) -> Tensor:
    """Return 24 random bits for element number `counter` of a block of elements with seed `key`; the two broadcast."""
    bits = counter * STRIDE + key  # int64 wraps around, as intended
    for multiplier in (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15):
        bits = (bits ^ ((bits >> 31) & 0x1FFFFFFFF)) * multiplier
    return (bits >> 40) & 0xFFFFFF


@torch.library.custom_op(f"{NAMESPACE}::hashed_mask", mutates_args=())
def hashed_mask(seeds: Tensor, p: float, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a dropout mask of 0 and 1 in `shape` and `dtype`; an element is 0 with probability `p`; a custom op.

    The elements are cut into as many equal blocks as there are `seeds`, and each block is hashed from its seed.
    """
    whole = torch.empty((), dtype=dtype, device=seeds.device).expand(list(shape))
    return hashed_cells(whole, p, seeds)


@hashed_mask.register_fake
def _(seeds, p, shape, dtype):
    return seeds.new_empty(shape, dtype=dtype)


@dataclass
class _Plan:
    """Dropout seeds of all modules for one micro-batch, in one tensor `made`. `add` registers (hash of the module's
    path, rows of its input, these per row of the micro-batch, heads); `places` maps this to its slice of `made`.
    """

    places: dict[tuple, slice] = field(default_factory=dict)
    words: list[Tensor] = field(default_factory=list)  # 4 x [n]: site, row, rows per row, head
    position: tuple = ()
    made: Tensor | None = None

    def add(self, place: tuple, device: torch.device) -> None:
        site, count, per_row, heads = place
        heads = heads or (0,)
        rows = torch.arange(count, device=device).repeat_interleave(len(heads))
        each = [torch.full_like(rows, site), rows, torch.full_like(rows, per_row)]
        known = torch.arange(heads[0], heads[0] + len(heads), device=device).repeat(count)
        if list(heads) != list(range(heads[0], heads[0] + len(heads))):
            known = torch.tensor(heads, device=device).repeat(count)
        new = [*each, known]
        start = len(self.words[0]) if self.words else 0
        pairs = zip(self.words, new, strict=True) if self.words else ()
        self.words = [torch.cat(pair) for pair in pairs] or new
        self.places[place] = slice(start, start + len(rows))
        self.made = None


class DeviceSeeds:
    """Cache of dropout seeds on a device; those of all dropout modules are computed together, once per micro-batch."""

    def __init__(self) -> None:
        self.plans: dict[tuple, _Plan] = {}
        self.keys: dict[torch.device, tuple[int, Tensor]] = {}

    def find(
        self, device: torch.device, seed: int, position: tuple[int, int, int], site: int,
        count: int, heads: Sequence[int],
    ) -> Tensor:  # fmt: skip
        """Return the dropout seeds of a module in a micro-batch: [count * len(heads)], or [count] for empty `heads`.
        `seed` is the run's, `position` is (step, first row, number of rows) of the micro-batch, `site` the hash of the
        module's path, `count` the rows of its input (a multiple of the micro-batch's), `heads` global head indices.
        """
        step, first_row, num_rows = position
        if (
            not runs_at_once() and detect_fake_mode() is not None
        ):  # a dry run: do not cache fake tensors
            self = DeviceSeeds()
        if len(self.plans) > PLANS:
            self.plans.clear()
        plan = self.plans.setdefault((device, num_rows), _Plan())
        place = (site, count, count // num_rows if num_rows else 1, tuple(heads))
        with torch.inference_mode(False):  # training reads what an evaluation has cached
            if place not in plan.places:
                plan.add(place, device)
            if plan.made is None or plan.position != (seed, step, first_row):
                sites, rows, per_row, known = plan.words
                plan.made = mix_tensors(self._key(device, seed, step), sites, rows + per_row * first_row, known)  # fmt: skip
                plan.position = (seed, step, first_row)
            return plan.made[plan.places[place]]

    def _key(self, device: torch.device, seed: int, step: int) -> Tensor:
        """Return the hash state of (seed, step) as a scalar on the device; the host does not wait for the device."""
        state = signed(mix_state(mix_state(GOLDEN, seed), step))
        held = self.keys.get(device)
        if held is None:
            held = (state, torch.full((), state, dtype=torch.int64, device=device))
        elif held[0] != state:
            held = (state, held[1].fill_(state))
        self.keys[device] = held
        return held[1]
