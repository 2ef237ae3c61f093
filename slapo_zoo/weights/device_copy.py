"""From mapped files to a GPU: pinned buffers, and one copy to the device for each byte.

Unmeasured: written without a GPU at hand. A copy from pageable memory, which the driver stages by
itself, would wait for each tensor, and one of strided columns would allocate a tensor on the way.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

BUFFER = 64 << 20  # bytes; two are enough to keep a bus busy


class DeviceCopy:
    """Fill tensors of a device: one buffer is filled while the other one travels.

    Args:
        device: with another one than CUDA the buffers are plain memory.
        size: bytes of each of both buffers.
    """

    def __init__(self, device: torch.device, size: int = BUFFER):
        self._cuda = device.type == "cuda"
        self._buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=self._cuda) for _ in "12"]
        self._sent: list[Any] = [None, None]
        self._turn = 0

    def fill(self, tensor: Tensor, axis: int, parts: Sequence[Tensor]) -> None:
        """Put the parts side by side along `axis`, cast.

        Args:
            tensor: on the device, of the size of all parts.
            axis: along which they lie.
            parts: on the CPU, of any strides and dtype.
        """
        for piece, sources in _pieces(tensor, parts, axis, self._buffers[0].nbytes):
            buffer = self._next().narrow(0, 0, piece.nbytes).view(piece.dtype).view(piece.shape)
            filled = 0
            for source in sources:
                buffer.narrow(axis, filled, source.shape[axis]).copy_(source)
                filled += source.shape[axis]
            piece.copy_(buffer, non_blocking=self._cuda)
            if self._cuda:
                self._sent[self._turn] = torch.cuda.Event()
                self._sent[self._turn].record()

    def finish(self) -> None:
        """Wait for all copies, after which the buffers may be freed."""
        for event in self._sent:
            if event is not None:
                event.synchronize()

    def _next(self) -> Tensor:
        """Return the next buffer, once its last copy has ended."""
        self._turn = 1 - self._turn
        if self._sent[self._turn] is not None:
            self._sent[self._turn].synchronize()
        return self._buffers[self._turn]


def _pieces(
    tensor: Tensor, parts: Sequence[Tensor], axis: int, most: int
) -> Iterator[tuple[Tensor, Sequence[Tensor]]]:
    """Runs of rows of the tensor that fit into a buffer, and what fills each, side by side."""
    parts = [part.reshape(1) if not part.ndim else part for part in parts]
    together = [(tensor, list(parts))]
    if axis == 0:
        runs = tensor.split([len(part) for part in parts])
        together = [(run, [part]) for run, part in zip(runs, parts, strict=True)]
    for target, sources in together:
        if target.numel():
            rows = max(most // target[0].nbytes, 1)
            yield from zip(target.split(rows), zip(*(s.split(rows) for s in sources), strict=True),
                           strict=True)  # fmt: skip
