"""Save and restore the random generators of torch, Python and NumPy of every rank; equal states are stored once."""

import base64
import json
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slapo_zoo.parallel.mesh import Mesh

CUDA_BYTES = 16


def states_here(device: torch.device) -> dict[str, str]:
    """Return the states of this rank's random generators as base64 text, by kind: cpu, cuda, python, numpy."""
    states = {"cpu": _text(torch.get_rng_state().numpy().tobytes())}
    if device.type == "cuda":
        states["cuda"] = _text(torch.cuda.get_rng_state(device).numpy().tobytes())
    version, words, gauss = random.getstate()
    states["python"] = _text(json.dumps([version, words, gauss]).encode())
    kind, words, *rest = np.random.get_state()
    states["numpy"] = _text(json.dumps([kind, np.asarray(words).tolist(), *rest]).encode())
    return states


def pack_states(by_rank: Sequence[dict[str, str]]) -> dict[str, Any]:
    """Return the generator states of all ranks as JSON, equal states once. The form is {"cpu": {"states": [...],
    "of_rank": [0, 0, 1, 1]}}: `of_rank` has each rank's index in `states`.
    """
    packed = {}
    for kind in by_rank[0]:
        found = [states.get(kind, "") for states in by_rank]
        unique = list(dict.fromkeys(found))
        packed[kind] = {"states": unique, "of_rank": [unique.index(text) for text in found]}
    return packed


def check_states(packed: Any, ranks: int) -> str:
    """Return why generator states from a file cannot be restored, or '' if they can.

    Args:
        packed: {kind: {"states": base64 texts, "of_rank": index of each rank's state}}, read from the file.
        ranks: number of ranks of the saved mesh.
    """
    if "cpu" not in packed or not packed.keys() <= set(READ):
        return f"found generators of {sorted(packed)!r:.60}, expected some of {sorted(READ)}"
    for kind, found in packed.items():
        if not isinstance(found, dict) or set(found) != {"states", "of_rank"}:
            return f"{kind}: found {found!r:.60}, expected states and of_rank"
        states, of_rank = found["states"], found["of_rank"]
        if not isinstance(states, list) or not isinstance(of_rank, list) or len(of_rank) != ranks:
            return f"{kind}: expected lists with the states and, for each of {ranks} ranks, the index of its state"
        if not all(type(i) is int and 0 <= i < len(states) for i in of_rank):
            return f"{kind}: found of_rank {of_rank!r:.60}, expected indices below {len(states)}, the number of states"
        for text in states:
            try:
                READ[kind](text)
            except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
                return f"{kind}: not a state that the generator takes: {str(error).splitlines()[0]:.80}"
    return ""


def sizes_of(mesh: Mesh) -> dict[str, int]:
    """Return {mesh dim: size} for a checkpoint, "cp" only if over 1; "dp" covers all mesh dims that split the batch rows."""
    sizes = {"tp": mesh.tp, "pp": mesh.pp, "dp": mesh.size("batch"), "cp": mesh.size("cp")}
    return {name: size for name, size in sizes.items() if name != "cp" or size > 1}


def restore_states(packed: dict[str, Any], saved: Mesh, mesh: Mesh, device: torch.device) -> None:
    """Set this rank's random generators to the states saved for it in `packed` (kind such as "cuda" --> states of all
    ranks), if `mesh` equals the mesh `saved`. On another mesh, all ranks of data-parallel replica i take the states of
    the first rank of saved replica i % saved.dp, so that tp and cp peers draw the same numbers.
    """
    first = saved.at(tp=0, pp=0, cp=0, dp=mesh.coord("batch") % saved.dp)
    rank = mesh.rank if saved.sizes == sizes_of(mesh) else first
    for kind, found in packed.items():
        if kind != "cuda" or device.type == "cuda":
            state = READ[kind](found["states"][found["of_rank"][rank]])
            SET[kind](state, *[device] * (kind == "cuda"))


def _cpu(text: str) -> Tensor:
    state = _tensor(text)
    torch.Generator().set_state(state)  # raises for an invalid state
    return state


def _cuda(text: str) -> Tensor:
    state = _tensor(text)
    if state.numel() != CUDA_BYTES:
        raise ValueError(f"found a CUDA generator state of {state.numel()} bytes, expected {CUDA_BYTES}")  # fmt: skip
    return state


def _python(text: str) -> Any:
    version, words, gauss = json.loads(_bytes(text))
    state = (version, tuple(words), gauss)
    random.Random().setstate(state)  # noqa: S311 - no secret
    return state


def _numpy(text: str) -> Any:
    kind, words, *rest = json.loads(_bytes(text))
    state = (kind, np.array(words, np.uint32), *rest)
    np.random.RandomState().set_state(state)
    return state


READ = {"cpu": _cpu, "cuda": _cuda, "python": _python, "numpy": _numpy}
SET: dict[str, Any] = {"cpu": torch.set_rng_state, "cuda": torch.cuda.set_rng_state,
                       "python": random.setstate, "numpy": np.random.set_state}  # fmt: skip


def _text(state: bytes) -> str:
    return base64.b64encode(state).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(_bytes(text)), dtype=torch.uint8)
