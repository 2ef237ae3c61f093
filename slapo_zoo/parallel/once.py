"""A gradient that is right once: a graph of it (`create_graph=True`) is refused in words.

torch's `once_differentiable` says nothing where the gradient that comes in asks for none, as that of a
loss does not, or where the second backward is told its inputs: a gradient penalty would then be wrong
in silence.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from slapo_zoo.errors import SlapoError


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the backward of a Function or an operator, (ctx, *grads) --> gradients."""

    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: Any) -> Any:
        refuse_graph()
        return backward(ctx, *grads)

    return wrapper


def refuse_graph() -> None:
    """Raise SlapoError in a backward with `create_graph=True`."""
    if torch.is_grad_enabled():
        problem = (
            "what ran here (a collective, a kernel) knows its gradient, not the gradient of that"
        )
        hint = 'one process with kernels="reference", attention="eager" has second derivatives'
        raise SlapoError("backward", "create_graph=True", problem, hint)
