"""Functions that raise for second derivatives (`create_graph=True`) of custom autograd Functions, and for torch.func.

torch's decorator `once_differentiable` raises neither in a backward that begins at the loss nor in a second backward
with `inputs=`, so a gradient penalty would be silently wrong.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from slapo_zoo.errors import SlapoError


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an autograd function's backward, (ctx, *grads) --> gradients, so that `create_graph=True` raises SlapoError."""

    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: Any) -> Any:
        refuse_graph()
        return backward(ctx, *grads)

    return wrapper


def refuse_graph() -> None:
    """Raise SlapoError if the running backward has `create_graph=True`."""
    if torch.is_grad_enabled():
        problem = "a collective or kernel in this graph has a gradient, but no second derivative"
        hint = 'for second derivatives use one process, kernels="reference" and attention="eager"'
        raise SlapoError("backward", "create_graph=True", problem, hint)


def refuse_transform() -> None:
    """Raise SlapoError in a forward within a transform of torch.func (grad, vmap, ...), where collectives have no rule."""
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack():  # pyright: ignore[reportAttributeAccessIssue]
        problem = "collectives and gradient hooks of a model on several ranks do not run within grad, vmap, jvp, ..."
        hint = "take gradients by loss.backward(), for each sample by a backward of its own; or use one process"
        raise SlapoError("forward", "a transform of torch.func", problem, hint)


def runs_at_once() -> bool:
    """Return whether a call of torch is only computed: no compiler or torch.func transform traces it, and no mode sees it."""
    if torch.compiler.is_compiling():
        return False
    c: Any = torch._C
    seen = c._len_torch_dispatch_stack() or c._is_torch_function_mode_enabled()
    return not (seen or c._functorch.peek_interpreter_stack())
