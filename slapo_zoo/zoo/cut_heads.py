"""Check that the attentions of a model can run the chosen way of attention over cp."""

from collections.abc import Mapping
from typing import Any

from slapo_zoo.errors import MeshError
from slapo_zoo.hf.attention import CoreAttention


def require_way(modules: Mapping[str, Any], n: int, way: str) -> None:
    """Raise MeshError if `way` is "ulysses" and n does not divide the number of heads of some attention on this rank,
    or if it is "ring" and an attention computes its own scores.

    Args:
        modules: path --> module of a model.
        n: number of cp ranks.
        way: how attention sees the tokens of all cp ranks: a name of `token_cut.WAYS`.
    """
    counts = {path: len(m.heads) for path, m in modules.items() if isinstance(m, CoreAttention)}
    counts |= {
        path: getattr(m, "num_heads", None) or m.num_attention_heads
        for path, m in modules.items()
        if hasattr(m, "_attn")
    }
    own = next((path for path, m in modules.items() if hasattr(m, "_attn")), None)
    if way == "ring" and own is not None:
        problem = "this attention computes its own scores, of all keys at once"
        raise MeshError(
            own, 'cp_attention="ring"', problem, 'use cp_attention="gather" or "ulysses"'
        )
    for path, count in counts.items() if way == "ulysses" else ():
        if count % n:
            fits = ", ".join(str(i) for i in range(1, count + 1) if count % i == 0)
            problem = f"cp={n} does not divide the {count} heads of a rank"
            hint = f'use cp_attention="gather", or cp among {fits}'
            raise MeshError(path, f"cp_attention={way!r}", problem, hint)
