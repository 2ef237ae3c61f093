"""Counts of labels and padding in the running micro-batch, held on the host, so that code need not wait for a GPU.

A training step reads them from the GPU once, for all its micro-batches, with the numbers by which mean losses divide.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100  # labels that do not count, as in torch and transformers


@dataclass(frozen=True)
class Known:
    """Facts about one micro-batch that the host knows without reading a GPU; a field that it does not know is None.

    Args:
        padded: True if an attention mask hides a token in any micro-batch of the step.
        targets: number of labels that count in the loss, i.e. are not -100.
        real: for each row the number of tokens that are not padding; None also if layers must compute padding tokens.
        packed: True if a row holds more than one sequence, as its position ids show.
    """

    padded: bool | None = None
    targets: int | None = None
    real: tuple[int, ...] | None = None
    packed: bool | None = None


_NOTHING = Known()
_NOW: ContextVar[Known] = ContextVar("known", default=_NOTHING)  # read in backward threads too


def known() -> Known:
    """Return what the host knows of the running micro-batch, e.g. its number of targets; all None outside a training step."""
    return _NOW.get()


@contextmanager
def knowing(numbers: Known) -> Iterator[None]:
    """Context in which `known()` returns `numbers`, counts of the running micro-batch's padding and targets."""
    token = _NOW.set(numbers)
    try:
        yield
    finally:
        _NOW.reset(token)


def places(where: Tensor, count: int | None) -> Tensor:
    """Return where.nonzero()[:, 0] of the bool tensor `where` [N]: the indices of its True elements. With `count`, the
    number of these elements, the host does not wait for a GPU.
    """
    if count is None or where.device.type == "cpu":
        return where.nonzero()[:, 0]
    problem = f"attention_mask now marks another number of tokens than the {count} that the step counted at its start; hint: change attention_mask before the step, not in the forward"
    torch._assert_async(where.sum() == count, problem)  # pyright: ignore[reportPrivateImportUsage]
    return torch.nonzero_static(where, size=count)[:, 0]
