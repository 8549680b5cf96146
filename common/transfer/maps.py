"""A mapping of a trainer's memory that nobody reads just now, for when the trainer fills it again.

To map a gigabyte and to unmap it takes longer than to hash it, and a trainer writes two slots in turn.
A mapping pins that memory, so at most one is kept, and none once no sender is connected any more.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Iterator

from .arena import ArenaError, map_private


class Maps:
    """See the module; may be used by several threads."""

    def __init__(self) -> None:
        # What is freed may be freed wherever Python collects garbage: in here, too.
        self._lock = threading.RLock()
        self._senders = 0
        self._spare: tuple[tuple[int, int], mmap.mmap] | None = None

    @contextlib.contextmanager
    def sender(self) -> Iterator[None]:
        """Keep a mapping as long as somebody is inside of such a block."""
        with self._lock:
            self._senders += 1
        try:
            yield
        finally:
            with self._lock:
                self._senders -= 1
                gone = None if self._senders else self._swap(None)
            _unmap(gone)

    def take(self, handle: int, size: int) -> mmap.mmap:
        """Return a mapping of this memory: writing to it changes nothing there.

        Raises:
            ArenaError: It can't be relied on, or the kernel does not map it.
        """
        with self._lock:
            if self._spare is not None and self._spare[0] == _named(handle):
                found = self._swap(None)
                if found is not None and len(found) == size:
                    return found
                _unmap(found)
        try:
            return map_private(handle, size)
        except OSError as error:
            why = f"{size} bytes of the sender's memory can't be mapped: {error}"
            raise ArenaError(
                f"{why}; give this process more memory, or publish over TCP"
            ) from error

    def give(self, handle: int, mapped: mmap.mmap) -> None:
        """Take back a mapping of this memory that nobody reads any more."""
        with self._lock:
            gone = self._swap((_named(handle), mapped)) if self._senders else mapped
        _unmap(gone)

    def _swap(self, spare: tuple[tuple[int, int], mmap.mmap] | None) -> mmap.mmap | None:
        former, self._spare = self._spare, spare
        return None if former is None else former[1]


def _named(handle: int) -> tuple[int, int]:
    """Return what tells memory that exists from other such memory."""
    found = os.fstat(handle)
    return found.st_dev, found.st_ino


def _unmap(mapped: mmap.mmap | None) -> None:
    if mapped is not None:
        # Who still has a view, as an error's frames may, keeps the pages until it is gone.
        with contextlib.suppress(BufferError):
            mapped.close()
