"""Blocks that repeat run twice on a tape; what follows writes the rows of the second call again.

A model of 80 equal blocks is counted in the time of two. The first call is not taken: it keeps what
all share (a mask, rotary tables) for the backward, which counts once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from slapo_zoo.language.tape import Row, Tape

POSITIONS = {"layer_idx", "layer_id", "layer_number", "layer_index"}  # say where, not what, it is


Seen = list[tuple[list[Row], Any]]  # calls: their rows, and their outputs on fake tensors


def skip_repeated(tape: Tape, model: nn.Module, units: Sequence[str]) -> None:
    """Skip every call after the second of equal blocks on inputs of equal shapes, and write its rows again.

    rewrite:  y = block(x)  -->  y of the shape of the second call's, whose rows are written again

    Args:
        tape: of the forward that follows.
        model: of fake tensors, for this forward only: its units are changed.
        units: paths of the blocks, and of others, which are called once.
    """
    calls: dict[Any, Seen] = {}
    for unit in units:
        module = model.get_submodule(unit)
        if any(True for _ in module.children()):
            module.forward = _once_more(tape, module.forward, signature(module), calls)


def signature(module: nn.Module) -> tuple[Any, ...]:
    """Equal for modules that compute alike: classes, shapes, and plain attributes."""
    rows = []
    for path, part in module.named_modules():
        shapes = tuple((n, tuple(p.shape)) for n, p in part._parameters.items() if p is not None)
        plain = {n: v for n, v in vars(part).items() if isinstance(v, bool | int | float | str)}
        rows.append((path, type(part), shapes, tuple(sorted(
            (n, v) for n, v in plain.items() if n not in POSITIONS))))  # fmt: skip
    return tuple(rows)


def _once_more(tape: Tape, forward: Callable, who: Any, calls: dict[Any, Seen]) -> Callable:
    def run(*args: Any, **kwargs: Any) -> Any:
        earlier = calls.setdefault((who, _shapes((args, kwargs))), [])
        begin = len(tape.rows)
        if len(earlier) > 1:
            rows, like = earlier[1]
            output = tree_map(_alike, like)
            tape.rows[begin:] = rows  # and not what making the output has written
            return output
        output = forward(*args, **kwargs)
        earlier.append((tape.rows[begin:], output))
        return output

    return run


def _alike(x: Any) -> Any:
    return torch.empty_like(x).requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


def _shapes(tree: Any) -> tuple[Any, ...]:
    leaves, spec = tree_flatten(tree)
    described = [(tuple(x.shape), x.dtype, x.requires_grad) if isinstance(x, Tensor)
                 else x if isinstance(x, bool | int | float | str | None) else type(x)
                 for x in leaves]  # fmt: skip
    return tuple(described), str(spec)
