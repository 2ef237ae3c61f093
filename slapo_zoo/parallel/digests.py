"""Digests: whether ranks, files or runs have the same, told by one short text."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def digest(*facts: Any) -> str:
    """The SHA-256 of facts, one line for each."""
    return hashlib.sha256("\n".join(map(str, facts)).encode()).hexdigest()


def digest_of_tensor(tensor: Tensor) -> str:
    """The SHA-256 of the shape, the dtype and the bytes of a tensor."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tuple(tensor.shape)}{tensor.dtype}".encode() + data).hexdigest()


def unlike(found: Sequence[Any]) -> list[int]:
    """The ranks of which a fact is not that of rank 0."""
    return [rank for rank, fact in enumerate(found) if fact != found[0]]
