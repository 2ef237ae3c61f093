"""Copy tensors from mapped files to a GPU through two pinned buffers.

Its speed is unmeasured. A direct copy from pageable memory would wait for each tensor, and one of
strided columns would allocate a temporary tensor on the device.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

BUFFER = 64 << 20  # bytes; two are enough to keep a bus busy


class DeviceCopy:
    """Copier of CPU tensors to a device: one pinned buffer is filled while the other is being transferred.

    Args:
        device: target device; if it is not CUDA, the buffers are plain memory.
        size: bytes of each of the two buffers.
    """

    def __init__(self, device: torch.device, size: int = BUFFER):
        self._device, self._cuda = device, device.type == "cuda"
        kind = {"dtype": torch.uint8, "device": "cpu", "pin_memory": self._cuda}
        self._buffers = [torch.empty(size, **kind) for _ in "12"]
        self._sent: list[Any] = [None, None]
        self._turn = 0

    def fill(self, tensor: Tensor, axis: int, parts: Sequence[Tensor]) -> None:
        """Copy `parts`, CPU tensors of any strides and dtype, into `tensor` on the device: they are concatenated along
        `axis`, to the shape of `tensor`, and cast to its dtype.
        """
        for piece, sources in _pieces(tensor, parts, axis, self._buffers[0].nbytes):
            buffer = self._next().narrow(0, 0, piece.nbytes).view(piece.dtype).view(piece.shape)
            filled = 0
            for source in sources:
                buffer.narrow(axis, filled, source.shape[axis]).copy_(source)
                filled += source.shape[axis]
            piece.copy_(buffer, non_blocking=self._cuda)
            if self._cuda:  # the current device may be another one
                stream = torch.cuda.current_stream(self._device)
                self._sent[self._turn] = stream.record_event()

    def finish(self) -> None:
        """Wait for all copies; afterwards the buffers may be freed."""
        for event in self._sent:
            if event is not None:
                event.synchronize()

    def _next(self) -> Tensor:
        """Return the pinned buffer to fill next, after waiting for the last transfer from it."""
        self._turn = 1 - self._turn
        if self._sent[self._turn] is not None:
            self._sent[self._turn].synchronize()
        return self._buffers[self._turn]


def _pieces(
    tensor: Tensor, parts: Sequence[Tensor], axis: int, most: int
) -> Iterator[tuple[Tensor, Sequence[Tensor]]]:
    """Yield (some rows of `tensor`, slices of `parts` that make these rows); the rows fit into a buffer of `most` bytes.
    The tensor is the concatenation of `parts` along `axis`.
    """
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
