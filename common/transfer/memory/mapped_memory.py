"""Map memory that processes of a machine share, and advise the kernel about it."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
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
