"""Shard saved activations over tp: of an input that is equal on all tp ranks, each rank saves 1/tp.

rewrite:  saved x [B, S, D] on each of n ranks  -->  saved x_r [B * S * D / n]; the backward all-gathers x

Source: Korthikanti et al. 2022, arXiv:2205.05198, section 6 (Megatron-LM's --distribute-saved-activations).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from slapo_zoo.language.offload import Kept, Pack, unpack
from slapo_zoo.parallel.compat import all_gather_single
from slapo_zoo.parallel.mesh import Mesh

SHARDED = "sharded"


class Share(Kept):
    """Handle for a saved activation that is equal on all tp ranks: each rank keeps 1/tp of its elements."""

    def __init__(self, x: Tensor, mesh: Mesh):
        self.shape, self.group, self.size = x.shape, mesh.group("tp"), mesh.tp
        flat, each = x.detach().reshape(-1), -(-x.numel() // mesh.tp)
        mine = flat[mesh.coord("tp") * each :][:each]
        self.part = flat.new_zeros(each)
        self.part[: len(mine)].copy_(mine)

    def again(self) -> Tensor:
        """All-gather the saved activation over tp and return it in its original shape."""
        out = self.part.new_empty(self.size * len(self.part))
        all_gather_single(out, self.part, group=self.group)
        return out[: self.shape.numel()].view(self.shape)


def kept_in_shares(x: Any, mesh: Mesh, keeps: Sequence[Pack]) -> AbstractContextManager:
    """Return a context for one call in which autograd saves only 1/tp of the argument `x` on each tp rank.

    Args:
        x: the module's first argument, equal on all tp ranks; if it is no float tensor, the context does nothing.
        mesh: mesh with the tp group and the coordinates of this rank.
        keeps: pack functions (of torch's saved_tensors_hooks) for all other saved tensors, tried from the last to the
            first; the first handle that one of them returns is saved.
    """
    if mesh.tp == 1 or not (isinstance(x, Tensor) and x.is_floating_point()):
        return nullcontext()
    whole = x.untyped_storage()._cdata, x.shape, x.stride(), x.storage_offset()

    def pack(kept: Tensor) -> Any:
        storage = kept.untyped_storage()._cdata
        if (storage, kept.shape, kept.stride(), kept.storage_offset()) == whole:
            with torch.no_grad():
                return Share(kept, mesh)
        return next((y for keep in reversed(keeps) if (y := keep(kept)) is not kept), kept)

    return saved_tensors_hooks(pack, unpack)
