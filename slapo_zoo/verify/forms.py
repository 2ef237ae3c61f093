"""Detection of how the tensors that all tp ranks recorded at a module are shards of the plain model's tensor.

Under a correct schedule the tp ranks hold equal tensors, or slices of one axis in the order of the ranks, or slices
of the tokens. Slices may be padded, equal on neighbours, or taken of q, k and v separately. Partial sums are
accepted only where the schedule says so.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

Close = Callable[[Tensor], bool]


def form_of(parts: Sequence[Tensor], want: Tensor, close: Close, partial: bool = False) -> str:
    """Return how the tp ranks' tensors form `want`: "the same on all", "runs of axis 1" (slices), "3 groups of runs of
    axis 1" (slices of q, k, v), "runs of the tokens of each row", "terms of a sum", or "" for none of these.

    Args:
        parts: one tensor per tp rank, in order.
        want: the plain model's tensor.
        close: function that returns whether a tensor of the shape of `want` is `want` up to rounding.
        partial: accept "terms of a sum" too: tensors of the shape of `want` that add up to it.
    """
    if all(part.shape == want.shape and close(part) for part in parts):
        return "the same on all"
    for name, whole in _candidates(parts, want):
        if whole.shape == want.shape and close(whole):
            return name
    if partial and all(part.shape == want.shape for part in parts) and close(sum(parts)):  # pyright: ignore[reportArgumentType]
        return "terms of a sum"
    return ""


def _candidates(parts: Sequence[Tensor], want: Tensor) -> Iterator[tuple[str, Tensor]]:
    distinct = _without_repeats(parts)
    for axis in reversed(range(want.ndim)):
        for some in (parts, distinct) if len(distinct) < len(parts) else (parts,):
            whole = _joined(some, axis, want)
            if whole is not None:
                yield f"runs of axis {axis}", whole
        for groups in (2, 3):
            if want.shape[axis] % groups == 0 and all(
                p.ndim == want.ndim and p.shape[axis] % groups == 0 for p in parts
            ):
                chunks = zip(*(p.chunk(groups, axis) for p in parts), strict=True)
                yield (
                    f"{groups} groups of runs of axis {axis}",
                    torch.cat([torch.cat(chunk, axis) for chunk in chunks], axis)
                    if _equal_except_on(parts, axis)
                    else want.new_empty(0),
                )
    yield from _tokens_of_flat_rows(parts, want)


def _joined(parts: Sequence[Tensor], axis: int, want: Tensor) -> Tensor | None:
    """Return `parts` concatenated along an axis, without padding at the end; None if the shape is not `want`'s."""
    if not all(part.ndim == want.ndim for part in parts) or not _equal_except_on(parts, axis):
        return None
    whole = torch.cat(list(parts), axis)
    if not 0 <= whole.shape[axis] - want.shape[axis] < len(parts):
        return None
    return whole.narrow(axis, 0, want.shape[axis])


def _equal_except_on(parts: Sequence[Tensor], axis: int) -> bool:
    """Return whether the shapes of the parts are equal on all axes but `axis`."""
    shapes = {tuple(s for i, s in enumerate(p.shape) if i != axis) for p in parts}
    return len(shapes) == 1


def _without_repeats(parts: Sequence[Tensor]) -> list[Tensor]:
    """Return `parts` without tensors equal to the one before them (KV heads that neighbouring ranks share)."""
    kept = [parts[0]]
    for part in parts[1:]:
        if part.shape != kept[-1].shape or not torch.equal(part, kept[-1]):
            kept.append(part)
    return kept


def _tokens_of_flat_rows(parts: Sequence[Tensor], want: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield (description, tensor like `want`) for each way in which the ranks' `parts` may be tokens of flattened rows.
    OPT flattens its activations to [rows * tokens, ...]; each rank then holds some tokens of every row.
    """
    n, flat = len(parts), parts[0].shape[0] if parts[0].ndim else 0
    if want.ndim < 2 or any(p.shape != parts[0].shape for p in parts) or flat * n != want.shape[0]:
        return
    for rows in (r for r in range(2, flat + 1) if flat % r == 0):
        split = [part.reshape(rows, flat // rows, *part.shape[1:]) for part in parts]
        yield "runs of the tokens of each row", torch.cat(split, 1).reshape(want.shape)
