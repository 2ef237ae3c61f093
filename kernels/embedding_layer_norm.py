"""Kernel embedding_layer_norm: y = dropout(LayerNorm(word[ids] + position[position_ids] + kind[kinds])).

`kind` has BERT's token type embeddings. B batch rows, S tokens, N columns.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from slapo_zoo.dispatch.kernel_registry import kernel
from slapo_zoo.kernels.dropout import dropout
from slapo_zoo.kernels.dropout_mask import dropout_of, mask_like
from slapo_zoo.kernels.layer_norm import layer_norm
from slapo_zoo.kernels.layer_norm import reference as layer_norm_reference

SHAPES = [(1, 3, 64), (3, 5, 100), (2, 33, 257), (0, 2, 32)]


def reference(
    ids: Tensor,
    position_ids: Tensor,
    kinds: Tensor | None,
    word: Tensor,
    position: Tensor,
    kind: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-12,
    padding_idx: int = -1,
    seeds: Tensor | None = None,
    p: float = 0.0,
) -> Tensor:
    """Compute BERT's embeddings [B, S, N], layer norm and dropout in torch operations. `word`, `position` and `kind` are the
    weights of the embeddings, `kinds` the token type ids; `seeds` [B] draw the dropout, None drops nothing.
    """
    rows = word[ids]
    if padding_idx >= 0:  # that row has no gradient
        rows = torch.where((ids == padding_idx)[..., None], rows.detach(), rows)
    z = rows + position[position_ids]
    if kind is not None and kinds is not None:
        z = z + kind[kinds]
    y = layer_norm_reference(z, weight, bias, eps)
    mask = mask_like(y, None, seeds, p)
    return y if mask is None else y * mask


def inputs(B: int, S: int, N: int, **like: Any) -> dict[str, Any]:
    """Return random arguments (dtype and device of `like`): B rows of S tokens, hidden size N; ids repeat."""
    device = like.get("device")
    word, position, kind = (torch.randn(n, N, **like) for n in (17, S, 2))
    return {
        "ids": torch.randint(17, (B, S), device=device), "padding_idx": 1,
        "position_ids": torch.arange(S, device=device)[None],
        "kinds": torch.randint(2, (B, S), device=device), "word": word, "position": position,
        "kind": kind, "weight": torch.randn(N, **like) + 1.0, "bias": torch.randn(N, **like),
        "seeds": torch.randint(2**63 - 1, (B,), device=device), "p": 0.25,
    }  # fmt: skip


def _forward(
    module: Any,
    input_ids: Tensor | None = None,
    token_type_ids: Tensor | None = None,
    position_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    before: int = 0,
    **by_name: int,
) -> Tensor:
    """Run BertEmbeddings.forward (same arguments) with this kernel's norm and dropout. The embeddings are looked up by the
    child modules, not by the kernel, because a child that is sharded over tp also all-reduces its output.
    """
    given: Any = inputs_embeds if input_ids is None else input_ids
    B, S = given.shape[:2]
    if position_ids is None:
        first = sum(by_name.values(), before)  # transformers 5.24 has renamed the argument
        position_ids = module.position_ids[:, first : S + first]
    if token_type_ids is None:
        token_type_ids = torch.zeros((B, S), dtype=torch.long, device=given.device)
    z = module.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
    z = z + module.token_type_embeddings(token_type_ids)
    z = z + module.position_embeddings(position_ids)
    y = layer_norm(z, module.LayerNorm.weight, module.LayerNorm.bias, module.LayerNorm.eps)
    return dropout(y, **dropout_of(module.dropout, y))


@kernel(
    "embedding_layer_norm", reference, inputs, SHAPES, cpu="F.embedding, F.layer_norm",
    serves={"BertEmbeddings": _forward},
    passes=("LayerNorm", "dropout"),
)  # fmt: skip
def embedding_layer_norm(
    ids: Tensor,
    position_ids: Tensor,
    kinds: Tensor | None,
    word: Tensor,
    position: Tensor,
    kind: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-12,
    padding_idx: int = -1,
    keep: Tensor | None = None,
    seeds: Tensor | None = None,
    p: float = 0.0,
) -> Tensor:
    """Compute the embeddings [B, S, N] of a BERT-like model; the backward is deterministic (a sorted scatter).

    Args:
        ids: word ids [B, S].
        position_ids: [B or 1, S].
        kinds: token types [B, S], or None.
        word: word embeddings [V, N].
        position: position embeddings [P, N].
        kind: token type embeddings [K, N], or None.
        weight: weight [N] of the norm.
        bias: bias [N] of the norm.
        eps: added to the variance.
        padding_idx: word whose row gets no gradient; -1 for none.
        keep: dropout mask of 0 and 1/(1-p), [B, S, N], or None.
        seeds: int64 [B]; the mask is hashed from them when `keep` is None.
        p: dropout probability.
    """
    z = functional.embedding(ids, word, padding_idx if padding_idx >= 0 else None)
    z = z + functional.embedding(position_ids, position)
    if kind is not None and kinds is not None:
        z = z + functional.embedding(kinds, kind)
    y = layer_norm(z, weight, bias, eps)
    return dropout(y, keep, seeds, p)
