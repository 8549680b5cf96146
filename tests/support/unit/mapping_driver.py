"""CUDA's virtual memory management on machines without a GPU: memfds are the memory, and are really mapped."""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from collections.abc import Callable
from typing import Any

UNIT = 1 << 16
"""Bytes that this device allocates at least."""
NAMES = {
    1: b"CUDA_ERROR_INVALID_VALUE",
    2: b"CUDA_ERROR_OUT_OF_MEMORY",
    201: b"CUDA_ERROR_INVALID_CONTEXT",
}
NO_ACCESS, READ_WRITE = 0, 3
SHARED, FIXED, ANONYMOUS_PRIVATE = 0x1, 0x10, 0x22

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class MappingDriver:
    """One process's driver of a node whose devices are all of one kind; `calls` says what was called.

    Its calls check the type of each argument and each byte of their structures, as `cuda.h` has them on a 64-bit machine.

    Args:
        index: Of the only device that may be used.
        fail_at: The call that fails, counted from 0; None: none does.
        error: How it fails.
    """

    def __init__(self, index: int = 0, fail_at: int | None = None, error: int = 2) -> None:
        self.index, self.fail_at, self.error = index, fail_at, error
        self.calls: list[str] = []
        self.contexts: list[int | None] = [None]
        """Those of the thread, the current one last; None: none."""
        self.retained = 0
        self.allocations: dict[int, int] = {}
        """Descriptors of memory by handle."""
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        """Sizes by address."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("cu"):
            raise AttributeError(name)
        return functools.partial(self._run, name)

    def _run(self, name: str, *arguments: Any) -> int:
        self.calls.append(name)
        if len(self.calls) - 1 == self.fail_at:
            return self.error
        found: int | None = getattr(self, f"_{name}")(*arguments)
        return found or 0

    def left_over(self) -> tuple[Any, ...]:
        """What was made and is not undone, nothing at all as an empty tuple."""
        contexts = () if self.contexts == [None] else (self.contexts,)
        counts = (self.retained, self.allocations, self.reserved, self.mapped)
        return (*contexts, *(each for each in counts if each))

    def cuGetErrorName(self, error: ctypes.c_int, name: Any) -> int:
        if error.value in NAMES:
            name._obj.value = NAMES[error.value]
        return 0 if error.value in NAMES else 1

    def _cuInit(self, flags: ctypes.c_uint) -> None:
        assert isinstance(flags, ctypes.c_uint)
        assert flags.value == 0

    def _cuDeviceGet(self, device: Any, ordinal: ctypes.c_int) -> int:
        if ordinal.value != self.index:
            return 101
        out(device, ctypes.c_int, ordinal.value)
        return 0

    def _cuDevicePrimaryCtxRetain(self, context: Any, device: ctypes.c_int) -> None:
        assert device.value == self.index
        out(context, ctypes.c_void_p, 77)
        self.retained += 1

    def _cuDevicePrimaryCtxRelease_v2(self, device: ctypes.c_int) -> None:
        assert device.value == self.index
        self.retained -= 1

    def _cuCtxPushCurrent_v2(self, context: ctypes.c_void_p) -> None:
        assert self.retained
        self.contexts.append(context.value)

    def _cuCtxPopCurrent_v2(self, context: Any) -> None:
        out(context, ctypes.c_void_p, self.contexts.pop())

    def _cuCtxSynchronize(self) -> None:
        self._check_context()

    def _check_context(self) -> None:
        assert self.contexts[-1] == 77, "the device's context is not that of this thread"

    def _check_properties(self, properties: Any) -> None:
        """Pinned, with a descriptor, on this device; no metadata, compression, RDMA or usage."""
        self._check_context()
        assert bytes(properties._obj) == struct.pack("=iiiiQBBH4x", 1, 1, 1, self.index, 0, 0, 0, 0)

    def _cuMemGetAllocationGranularity(
        self, unit: Any, properties: Any, option: ctypes.c_int
    ) -> None:
        self._check_properties(properties)
        assert isinstance(option, ctypes.c_int)
        assert option.value == 0
        out(unit, ctypes.c_size_t, UNIT)

    def _cuMemCreate(self, handle: Any, size: Any, properties: Any, flags: Any) -> None:
        self._check_properties(properties)
        check_longs(size, flags)
        assert flags.value == 0
        assert size.value % UNIT == 0
        memory = os.memfd_create("fake-gpu", os.MFD_CLOEXEC)
        os.ftruncate(memory, size.value)
        out(handle, ctypes.c_ulonglong, self._note_memory(memory))

    def _note_memory(self, memory: int) -> int:
        handle = (1 << 40) + memory  # more than 32 bits
        self.allocations[handle] = memory
        return handle

    def _cuMemExportToShareableHandle(
        self, shared: Any, handle: Any, kind: ctypes.c_int, flags: Any
    ) -> None:
        check_longs(handle, flags)
        assert (kind.value, flags.value) == (1, 0)
        made = os.dup(self.allocations[handle.value])
        os.set_inheritable(made, True)
        out(shared, ctypes.c_int, made)

    def _cuMemImportFromShareableHandle(
        self, handle: Any, shared: ctypes.c_void_p, kind: ctypes.c_int
    ) -> int:
        self._check_context()
        assert isinstance(shared, ctypes.c_void_p)
        assert kind.value == 1
        try:
            if "fake-gpu" not in os.readlink(f"/proc/self/fd/{shared.value or 0}"):
                return 1
        except OSError:
            return 1
        out(handle, ctypes.c_ulonglong, self._note_memory(os.dup(shared.value or 0)))
        return 0

    def _cuMemRelease(self, handle: Any) -> None:
        os.close(self.allocations.pop(handle.value))

    def _cuMemAddressReserve(
        self, address: Any, size: Any, alignment: Any, wanted: Any, flags: Any
    ) -> None:
        check_longs(size, alignment, wanted, flags)
        assert (alignment.value, wanted.value, flags.value) == (0, 0, 0)
        found = _libc.mmap(None, size.value, NO_ACCESS, ANONYMOUS_PRIVATE, -1, 0)
        out(address, ctypes.c_ulonglong, found)
        self.reserved[found] = size.value

    def _cuMemAddressFree(self, address: Any, size: Any) -> None:
        check_longs(address, size)
        assert address.value not in self.mapped, "freed while it is mapped"
        assert self.reserved.pop(address.value) == size.value
        assert _libc.munmap(address.value, size.value) == 0

    def _cuMemMap(self, address: Any, size: Any, offset: Any, handle: Any, flags: Any) -> int:
        check_longs(address, size, offset, handle, flags)
        assert (offset.value, flags.value) == (0, 0)
        assert self.reserved[address.value] == size.value
        memory = self.allocations[handle.value]
        if size.value > os.fstat(memory).st_size:
            return 1
        found = _libc.mmap(address.value, size.value, NO_ACCESS, SHARED | FIXED, memory, 0)
        assert found == address.value
        self.mapped[address.value] = size.value
        return 0

    def _cuMemSetAccess(self, address: Any, size: Any, access: Any, count: Any) -> None:
        check_longs(address, size, count)
        assert bytes(access._obj) == struct.pack("=iii", 1, self.index, 3)
        assert count.value == 1
        assert self.mapped[address.value] == size.value
        assert _libc.mprotect(address.value, size.value, READ_WRITE) == 0

    def _cuMemUnmap(self, address: Any, size: Any) -> None:
        self._check_context()
        assert self.mapped.pop(address.value) == size.value
        flags = ANONYMOUS_PRIVATE | FIXED
        assert _libc.mmap(address.value, size.value, NO_ACCESS, flags, -1, 0) == address.value


def out(argument: Any, kind: type[Any], value: int | None) -> None:
    """Write what a call returns; an argument of another type would be one of another size."""
    assert type(argument._obj) is kind
    argument._obj.value = value


def check_longs(*arguments: Any) -> None:
    """Numbers of 64 bits, which ctypes would pass as 32 without a type."""
    assert all(type(each) is ctypes.c_ulonglong for each in arguments), arguments
