"""Digests (SHA-256), with which the data of ranks, files and runs is compared."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def digest(*facts: Any) -> str:
    """Return the SHA-256 of the values in `facts`, each converted to text, on one line each."""
    return hashlib.sha256("\n".join(map(str, facts)).encode()).hexdigest()


def digest_of_tensor(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's shape, dtype and bytes."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tuple(tensor.shape)}{tensor.dtype}".encode() + data).hexdigest()


def unlike(found: Sequence[Any]) -> list[int]:
    """Return the ranks whose value differs from rank 0's; `found` has one value (a digest, a number) per rank."""
    return [rank for rank, fact in enumerate(found) if fact != found[0]]


def structure_hash(model: nn.Module) -> str:
    """Return "sha256:..." over the paths and classes of all modules and the names and shapes of all parameters."""
    lines = [f"{path} {type(module).__name__}" for path, module in model.named_modules()]
    named = model.named_parameters(remove_duplicate=False)
    lines += [f"{name} {tuple(p.shape)}" for name, p in named]
    return "sha256:" + digest(*sorted(lines))
