"""Map memory that processes of a machine share, and advise the kernel about it.

To map and unmap a gigabyte takes longer than to hash it, and a trainer writes two slots in turn. So a receiver keeps a
mapping that nothing reads now until the trainer fills that memory again. A mapping pins its memory, so at most one is
kept, and none once no sender is connected any more.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator
from typing import Any

POPULATE_READ, POPULATE_WRITE = 22, 23
"""MADV_POPULATE_* of Linux 5.14, which Python doesn't name."""


class SharedMemoryError(ValueError):
    """The memory does not exist, or one end can't rely on it."""


def map_private(handle: int, size: int) -> mmap.mmap:
    """Map memory of another process for libraries that want writable memory: pages are shared until this process writes them.

    All pages are mapped at once.

    Raises:
        SharedMemoryError: It is smaller than its sender said, or may shrink, which would end the reader by a signal.
    """
    _check_shared(handle, size)
    mapped = mmap.mmap(handle, size, flags=mmap.MAP_PRIVATE)
    map_all_pages(mapped)
    return mapped


def advise_kernel(mapped: mmap.mmap | ctypes.Array[Any], advice: int) -> None:
    """Advise the kernel about a writable mapping; ignore advice that it does not support.

    By ctypes, so that other threads run: `mmap.madvise` stops them for a tenth of a second per gigabyte.
    """
    first = ctypes.c_char.from_buffer(mapped)
    address, size = ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(mapped))
    ctypes.CDLL(None).madvise(address, size, advice)


def map_all_pages(mapped: mmap.mmap | ctypes.Array[Any]) -> None:
    """Map all pages of shared memory at once, as large pages where the memory has them."""
    advise_kernel(mapped, mmap.MADV_HUGEPAGE)
    advise_kernel(mapped, POPULATE_READ)


def _check_shared(handle: int, size: int) -> None:
    there = os.fstat(handle).st_size
    if not 0 < size <= there:
        raise SharedMemoryError(f"the memory has {there} bytes, not {size} as was said")
    try:
        seals = fcntl.fcntl(handle, fcntl.F_GET_SEALS)
    except OSError as error:
        raise SharedMemoryError(f"this memory can't be sealed: {error}") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise SharedMemoryError("this memory may shrink while it is read: its owner must seal it")


class MappingCache:
    """At most one spare mapping of a sender's memory; safe for several threads."""

    def __init__(self) -> None:
        # The garbage collector may free a mapping at any point, also inside this lock.
        self._lock = threading.RLock()
        self._senders = 0
        self._spare: tuple[tuple[int, int], mmap.mmap] | None = None

    @contextlib.contextmanager
    def keep_mapping(self) -> Iterator[None]:
        """Keep a spare mapping as long as at least one caller is inside this block."""
        with self._lock:
            self._senders += 1
        try:
            yield
        finally:
            with self._lock:
                self._senders -= 1
                gone = None if self._senders else self._swap_spare(None)
            _unmap_memory(gone)

    def take_mapping(self, handle: int, size: int) -> mmap.mmap:
        """Return a private mapping of this memory: writes to it don't change the memory.

        Raises:
            SharedMemoryError: It can't be relied on, or the kernel does not map it.
        """
        with self._lock:
            if self._spare is not None and self._spare[0] == _memory_identity(handle):
                found = self._swap_spare(None)
                if found is not None and len(found) == size:
                    return found
                _unmap_memory(found)
        try:
            return map_private(handle, size)
        except OSError as error:
            why = f"{size} bytes of the sender's memory can't be mapped: {error}"
            raise SharedMemoryError(
                f"{why}; give this process more memory, or publish over TCP"
            ) from error

    def give_mapping(self, handle: int, mapped: mmap.mmap) -> None:
        """Take back a mapping of this memory that nothing reads any more."""
        with self._lock:
            gone = self._swap_spare((_memory_identity(handle), mapped)) if self._senders else mapped
        _unmap_memory(gone)

    def _swap_spare(self, spare: tuple[tuple[int, int], mmap.mmap] | None) -> mmap.mmap | None:
        former, self._spare = self._spare, spare
        return None if former is None else former[1]


def _memory_identity(handle: int) -> tuple[int, int]:
    """Return what identifies this memory among all memory that exists now."""
    found = os.fstat(handle)
    return found.st_dev, found.st_ino


def _unmap_memory(mapped: mmap.mmap | None) -> None:
    if mapped is not None:
        # A view that still exists, as in an error's frames, keeps the pages until it is gone.
        with contextlib.suppress(BufferError):
            mapped.close()
