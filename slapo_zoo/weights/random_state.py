"""Where torch's own generators stand on every rank, as text; equal states are kept once."""

import base64
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slapo_zoo.parallel.mesh import Mesh


def states_here(device: torch.device) -> dict[str, str]:
    """The states of this rank's generators, by kind of device."""
    states = {"cpu": _text(torch.get_rng_state())}
    if device.type == "cuda":
        states["cuda"] = _text(torch.cuda.get_rng_state(device))
    return states


def pack_states(by_rank: Sequence[dict[str, str]]) -> dict[str, Any]:
    """JSON of all ranks: {"cpu": {"states": [...], "of_rank": [0, 0, 1, 1]}}."""
    packed = {}
    for kind in by_rank[0]:
        found = [states.get(kind, "") for states in by_rank]
        unique = list(dict.fromkeys(found))
        packed[kind] = {"states": unique, "of_rank": [unique.index(text) for text in found]}
    return packed


def restore_states(packed: dict[str, Any], saved: Mesh, mesh: Mesh, device: torch.device) -> None:
    """Set this rank's generators: to its own states on the same mesh.

    On another mesh all ranks of a copy take the states that the first rank of a copy had, so that
    what is drawn for replicated activations stays the same on tp peers.
    """
    same = (saved.tp, saved.pp, saved.dp) == (mesh.tp, mesh.pp, mesh.dp)
    rank = mesh.rank if same else saved.at(tp=0, pp=0, dp=mesh.coord("dp") % saved.dp)
    for kind, found in packed.items():
        state = _tensor(found["states"][found["of_rank"][rank]])
        if kind == "cpu":
            torch.set_rng_state(state)
        elif device.type == kind:
            torch.cuda.set_rng_state(state, device)


def _text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
