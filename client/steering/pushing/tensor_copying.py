"""Copies a tensor to shared memory: one copy, in pieces, from main memory or a device.

A device writes page-locked shared memory by itself. Where the memory can't be locked, the bytes pass
through two pinned buffers.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from rollout_client.steering.plain_tensors import check_readable, unreadable_error

if TYPE_CHECKING:
    import torch

PIECE_BYTES = 512 << 10
"""How many bytes a processor copies at once: half of the smallest second-level cache of today's servers, so that they
are still in the cache when they are hashed."""

REPORT_BYTES = 4 << 20
"""Fewest bytes that one report covers, except the last report of a tensor."""

DEVICE_PIECE_BYTES = 4 << 20
"""How many bytes a device copies at once."""

PINNED_BYTES = 32 << 20
"""Size of each of the two buffers that a device's bytes pass through."""

AHEAD = 4
"""How many copies of pieces are queued on a device before this process waits for the oldest."""

Done = Callable[[int], None]
"""Takes how many bytes of the tensor are there."""

BegunCopy = tuple[int, int, Callable[[], None]]
"""Begin and end of the bytes that a device copies, and what waits until they are there."""

Hashed = Callable[[memoryview], None]
"""Takes the bytes of the tensor, run by run, in order."""


class Accelerator:
    """A device that tensors lie on, with a stream of its own for copies from it; used by one thread at a time."""

    lockable: bool
    """Whether it writes page-locked memory of this process by itself."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._module: Any = getattr(torch, device.type)
        self._device = device
        self._stream = self._module.Stream(device=device)
        self.lockable = device.type == "cuda"

    def wait_for_queued_work(self) -> None:
        """Wait for all work that was queued on the device so far, on all of its streams.

        The thread that copies need not be the one whose stream writes the tensors.
        """
        self._module.synchronize(self._device)

    def begin_copy(self, source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
        """Begin to copy bytes to main memory; return what waits until they are there.

        Copies end in the order in which they began. The copy runs asynchronously only into page-locked memory;
        the caller must keep both tensors until it has ended.
        """
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


def accelerator_of(tensor: torch.Tensor) -> Accelerator | None:
    """Return the device of a tensor; None if that is main memory, or the tensor has no values."""
    return None if tensor.device.type in ("cpu", "meta") else Accelerator(tensor.device)


class Copier:
    """Copies tensors; keeps pinned buffers and devices from one tensor to the next."""

    def __init__(
        self, device_of: Callable[[torch.Tensor], Accelerator | None] = accelerator_of
    ) -> None:
        self._device_of = device_of
        self._devices: dict[torch.device, Accelerator | None] = {}
        self._pinned: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def copy(
        self,
        name: str,
        tensor: torch.Tensor,
        view: memoryview,
        done: Done,
        page_locked: Callable[[], bool] = lambda: False,
        hashed: Hashed | None = None,
    ) -> None:
        """Copy a tensor's bytes in the order of its elements; nothing writes once it has returned or raised.

        Args:
            name: For errors.
            tensor: The tensor, on any device, with any strides.
            view: The place for it, writable, of exactly its size.
            done: Takes the progress: so many bytes are there.
            page_locked: Locks the pages of `view`, if it can; called for tensors of a device only.
            hashed: Hashes the copied bytes, in this thread.

        Raises:
            LayoutError: It has no plain values, or its memory was freed.
        """
        import torch

        if not len(view):
            return
        check_readable(name, tensor)
        done = _with_reports(view, done, hashed)
        if (device := self._device(tensor)) is not None:
            with self._lock:
                device.wait_for_queued_work()
                there, flat = torch.frombuffer(view, dtype=torch.uint8), flat_bytes(name, tensor)
                if device.lockable and page_locked():
                    _straight(device, flat, there, done)
                else:
                    self._through_pinned(device, flat, there, done)
            return
        if tensor.device.type == "cpu" and not tensor.is_contiguous():
            return _copy_strided(tensor, view, done)
        flat = flat_bytes(name, tensor)
        if type(flat) is not torch.Tensor:  # it may have no memory of its own
            torch.frombuffer(view, dtype=torch.uint8).copy_(flat)
            return done(len(view))
        # The C library's copy doesn't read the memory that it overwrites; torch's does.
        source, target = flat.data_ptr(), ctypes.addressof(ctypes.c_char.from_buffer(view))
        for begin, end in _pieces(len(view), PIECE_BYTES):
            ctypes.memmove(target + begin, source + begin, end - begin)
            done(end)

    def _device(self, tensor: torch.Tensor) -> Accelerator | None:
        with self._lock:
            if tensor.device not in self._devices:
                self._devices[tensor.device] = self._device_of(tensor)
            return self._devices[tensor.device]

    def _through_pinned(
        self, device: Accelerator, flat: torch.Tensor, there: torch.Tensor, done: Done
    ) -> None:
        """Let the device fill one pinned buffer while this thread copies the other one."""
        if not self._pinned:
            self._pinned = [device.allocate_pinned(PINNED_BYTES) for _ in range(2)]

        def buffer_of(begin: int, end: int) -> torch.Tensor:
            return self._pinned[begin // PINNED_BYTES % 2][: end - begin]

        def came(begin: int, end: int) -> None:
            there[begin:end].copy_(buffer_of(begin, end))
            done(end)

        copies = (
            (begin, end, device.begin_copy(flat[begin:end], buffer_of(begin, end)))
            for begin, end in _pieces(flat.numel(), PINNED_BYTES)
        )
        _take_copies(copies, 1, came)


def _straight(device: Accelerator, flat: torch.Tensor, there: torch.Tensor, done: Done) -> None:
    """Let the device write the bytes to their place, some pieces ahead of the reported progress."""
    copies = (
        (begin, end, device.begin_copy(flat[begin:end], there[begin:end]))
        for begin, end in _pieces(flat.numel(), DEVICE_PIECE_BYTES)
    )
    _take_copies(copies, AHEAD, lambda _, end: done(end))


def _take_copies(copies: Iterable[BegunCopy], ahead: int, came: Callable[[int, int], None]) -> None:
    """Begin copies, so many before the oldest has ended, and call `came` for each once it is there, in order.

    Whatever was begun has ended once this returns or raises, since other code may use the memory afterwards.
    """
    begun: deque[BegunCopy] = deque()

    def take() -> None:
        begin, end, wait = begun.popleft()
        wait()
        came(begin, end)

    try:
        for copy in copies:
            begun.append(copy)
            if len(begun) > ahead:
                take()
        while begun:
            take()
    finally:
        for _, _, wait in begun:
            wait()


def _with_reports(view: memoryview, done: Done, hashed: Hashed | None) -> Done:
    """Return what hashes bytes, and reports them once they are some megabytes, or the last ones."""
    there = reported = 0

    def came(end: int) -> None:
        nonlocal there, reported
        if hashed is not None:
            hashed(view[there:end])
        there = end
        if end - reported >= REPORT_BYTES or end == len(view):
            reported = end
            done(end)

    return came


def _copy_strided(tensor: torch.Tensor, view: memoryview, done: Done) -> None:
    """Copy a tensor whose elements don't lie in order, some rows at a time, without a temporary copy of all."""
    import torch

    there = torch.frombuffer(view, dtype=torch.uint8)
    source, target = tensor.detach(), there.view(tensor.dtype).view(tensor.shape)
    row = tensor.nbytes // len(tensor)
    for begin, end in _pieces(len(tensor), max(1, PIECE_BYTES // row)):
        target[begin:end].copy_(source[begin:end])
        done(end * row)


def _pieces(size: int, step: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, size, step):
        yield begin, min(begin + step, size)


def flat_bytes(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes in order, [bytes] uint8: its own memory where that is contiguous.

    Raises:
        LayoutError: It is a subclass of tensors that can't be read so.
    """
    import torch

    try:
        # Flat first: any stride of a scalar or a single row counts as contiguous, but `view` refuses it.
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        if plain.stride(0) != 1:
            plain = plain.clone(memory_format=torch.contiguous_format)
        return plain.view(torch.uint8)
    except Exception as error:
        if type(tensor) in (torch.Tensor, torch.nn.Parameter):
            raise
        raise unreadable_error(name, tensor, error) from error
