"""Files on the disk alone, or in the page cache, as a measurement of reading wants them."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import Literal

Where = Literal["disk", "page cache"]


def place(file: Path, where: Where) -> None:
    """Have the file on the disk alone, or all of it in the page cache."""
    if where == "disk":
        forget(file)
    else:
        with file.open("rb") as opened:
            while opened.read(1 << 24):
                pass


def forget(file: Path) -> None:
    """Drop a file from the page cache.

    Raises:
        RuntimeError: some of it stays, because a process maps it.
    """
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    share = cached(file)
    if share > 0.01:
        raise RuntimeError(f"{share:.0%} of {file} stays in the page cache: a process maps it")


def cached(file: Path) -> float:
    """Return the share of a file that is in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = file.stat().st_size
    pages = -(-size // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), size, mmap.MAP_PRIVATE) as mapped:
        start = ctypes.c_char.from_buffer(mapped)
        failed = libc.mincore(ctypes.byref(start), ctypes.c_size_t(size), found)
        del start
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(byte & 1 for byte in found) / pages
