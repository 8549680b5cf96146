"""Copies from the device of a tensor: they begin one after the other, and are awaited one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class SourceDevice(Protocol):
    """A device that tensors lie on, for copies from it; used by one thread at a time."""

    lockable: bool
    """Whether it writes page-locked memory of this process by itself."""

    def wait_for_queued_work(self) -> None:
        """Wait for all work that was queued on the device so far, on all of its streams.

        The thread that copies need not be the one whose stream writes the tensors.
        """
        ...

    def begin_copy(self, source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
        """Begin to copy bytes to main memory; return what waits until they are there.

        Copies end in the order in which they began. The copy runs asynchronously only into page-locked memory;
        the caller must keep both tensors until it has ended.
        """
        ...

    def allocate_pinned(self, nbytes: int) -> torch.Tensor:
        """Return page-locked main memory, [nbytes] uint8."""
        ...


class Accelerator:
    """The `SourceDevice` that a tensor of torch lies on, with a stream of its own for copies.

    Args:
        device: Of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        import torch

        self._module: Any = getattr(torch, device.type)
        self._device = device
        self._stream = self._module.Stream(device=device)
        self.lockable = device.type == "cuda"

    def wait_for_queued_work(self) -> None:
        """Wait for all work that was queued on the device so far, on all of its streams."""
        self._module.synchronize(self._device)

    def begin_copy(self, source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
        """Begin to copy bytes to main memory; return what waits until they are there."""
        # If the tensor was not contiguous, the current stream makes the contiguous copy.
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = self._module.Event()
            event.record()
        wait: Callable[[], None] = event.synchronize
        return wait

    def allocate_pinned(self, nbytes: int) -> torch.Tensor:
        """Return page-locked main memory, [nbytes] uint8."""
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def accelerator_of(tensor: torch.Tensor) -> SourceDevice | None:
    """Return the device of a tensor; None if that is main memory, or the tensor has no values."""
    return None if tensor.device.type in ("cpu", "meta") else Accelerator(tensor.device)
