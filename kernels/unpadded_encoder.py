"""Kernel unpadded_encoder: run the layers of a BERT-like encoder on the real tokens of a padded batch only.

Real tokens are packed into one row while the layers run; in each layer the child `core_attn` computes attention within
each batch row. B batch rows, S tokens, N real tokens of all rows.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from slapo_zoo.dispatch.kernel_registry import register_kernel
from slapo_zoo.parallel.known import known, places

SHAPES = [(1, 5, 16), (3, 7, 24), (2, 33, 16)]
SERVES = ("BertEncoder", "RobertaEncoder", "AlbertTransformer")


def reference(x: Tensor, real: Tensor, layers: Callable[[Tensor], Tensor]) -> Tensor:
    """Run the layers on all tokens in plain torch operations; the result is 0 at padding, where `real` [B, S] is False."""
    return layers(x) * real[..., None]


def inputs(B: int, S: int, D: int, **like: Any) -> dict[str, Any]:
    """Return random arguments for x [B, S, D]; the last row has one token. `like` has dtype and device."""
    real = torch.arange(S) < torch.tensor([[S]] * (B - 1) + [[1]])
    return {
        "x": torch.randn(B, S, D, **like),
        "real": real.to(like.get("device")),
        "layers": torch.tanh,
    }


def unpadded(x: Tensor, real: Tensor, layers: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute layers(x) [B, S, D'] on the real tokens only; the result is 0 at padding.

    Args:
        x: hidden states [B, S, D].
        real: bool [B, S], True at real tokens.
        layers: maps the N real tokens [1, N, D] to [1, N, D'].
    """
    if torch.compiler.is_compiling():  # shapes must not depend on data
        return reference(x, real, layers)
    counts = known().real
    at = places(real.flatten(), None if counts is None else sum(counts))
    y = layers(x.flatten(0, 1).index_select(0, at)[None])[0]
    return y.new_zeros((real.numel(), y.shape[-1])).index_copy(0, at, y).view(*real.shape, -1)


def _install(site: Any, **options: Any) -> None:
    state = site.state
    state.unpads = True

    def forward(
        module: Any, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any
    ) -> Any:
        real, own = state.forward.real_tokens if known().real else None, type(module).forward
        if real is None or hidden_states.shape[:2] != real.shape:
            return own(module, hidden_states, attention_mask, **kwargs)
        outputs = []

        def layers(rows: Tensor) -> Tensor:
            outputs.append(own(module, rows, None, **kwargs))
            return outputs[0].last_hidden_state

        with state.random.packing(real):
            found = unpadded(hidden_states, real, layers)
        outputs[0].last_hidden_state = found
        return outputs[0]

    site.module.forward = MethodType(forward, site.module)


register_kernel(
    "unpadded_encoder", serves=dict.fromkeys(SERVES, unpadded), entry=unpadded,
    reference=reference, inputs=inputs, shapes=tuple(SHAPES), paths={"cpu": "real tokens only", "cuda": "the same"},
    runs_inside=True,
)(_install)  # fmt: skip
