"""One tensor into shared memory: a single copy, in pieces, from wherever it is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rollout_worker.transfer.buckets import flat_bytes

if TYPE_CHECKING:
    import torch

PIECE_BYTES = 4 << 20
"""What is copied at once: it is still in the processor's cache when it is hashed."""

PINNED_BYTES = 32 << 20
"""Of each of the two buffers that a device's bytes come through."""

Done = Callable[[int], None]
"""Told how many bytes of the tensor are there."""


class Copier:
    """Copies tensors; keeps the pinned buffers of a device from one to the next."""

    def __init__(self) -> None:
        self._pinned: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def copy(self, name: str, tensor: torch.Tensor, view: memoryview, done: Done) -> None:
        """Copy a tensor's bytes in its order.

        Args:
            name: For errors.
            tensor: Anywhere, of any strides.
            view: Where to, writable; exactly its size.
            done: Told of progress.

        Raises:
            LayoutError: It has no plain values.
        """
        import torch

        if not len(view):
            return
        there = torch.frombuffer(view, dtype=torch.uint8)
        if tensor.device.type == "cpu" and not tensor.is_contiguous():
            _copy_strided(name, tensor, there)
            done(len(view))
            return
        flat = flat_bytes(name, tensor)
        if flat.device.type != "cpu":
            self._from_device(flat, there, done)
            return
        for begin, end in _pieces(len(view), PIECE_BYTES):
            there[begin:end].copy_(flat[begin:end])
            done(end)

    def _from_device(self, flat: torch.Tensor, there: torch.Tensor, done: Done) -> None:
        """Let the device fill one pinned buffer while the other one is copied out."""
        import torch

        accelerator: Any = getattr(torch, flat.device.type)
        with self._lock, accelerator.device(flat.device):
            self._through_pinned(accelerator, flat, there, done)

    def _through_pinned(
        self, accelerator: Any, flat: torch.Tensor, there: torch.Tensor, done: Done
    ) -> None:
        import torch

        if not self._pinned:
            size = (2, PINNED_BYTES)
            self._pinned = list(torch.empty(size, dtype=torch.uint8, pin_memory=True))
        before: tuple[int, int, Any, torch.Tensor] | None = None
        for index, (begin, end) in enumerate(_pieces(flat.numel(), PINNED_BYTES)):
            buffer = self._pinned[index % 2][: end - begin]
            buffer.copy_(flat[begin:end], non_blocking=True)
            event = accelerator.Event()
            event.record()
            if before is not None:
                _take(before, there, done)
            before = begin, end, event, buffer
        if before is not None:
            _take(before, there, done)


def _take(piece: tuple[int, int, Any, torch.Tensor], there: torch.Tensor, done: Done) -> None:
    begin, end, event, buffer = piece
    event.synchronize()
    there[begin:end].copy_(buffer)
    done(end)


def _copy_strided(name: str, tensor: torch.Tensor, there: torch.Tensor) -> None:
    """Copy a tensor whose elements don't lie in order, without another copy of it."""
    import torch

    if tensor.layout != torch.strided or tensor.is_quantized:
        there.copy_(flat_bytes(name, tensor))  # says what is wrong with it
        return
    there.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())


def _pieces(size: int, step: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, size, step):
        yield begin, min(begin + step, size)
