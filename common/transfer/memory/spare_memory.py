"""Received memory that nothing reads any more, kept for the next version: its pages are allocated already."""

from __future__ import annotations

from collections import deque

from .slot import Slot


class SpareMemory:
    """At most one slot that waits for the next version; safe for several threads.

    It takes no lock, since the garbage collector may call it at any point.
    """

    def __init__(self) -> None:
        self._there: deque[Slot] = deque()

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that it holds."""
        return sum(slot.size for slot in tuple(self._there))

    def keep_memory(self, slot: Slot) -> None:
        """Keep memory that nothing reads or writes any more, and free what was kept before."""
        self._there.append(slot)
        while len(self._there) > 1:
            self._drop_oldest()

    def take_memory(self, size: int, *, writable: bool = False) -> Slot | None:
        """Return the kept memory if it has exactly this size, and others may write it as asked; else free it, and return None."""
        slot = self._take_oldest()
        if slot is None or (slot.size, slot.writable) == (size, writable):
            return slot
        slot.close()
        return None

    def drop_memory(self) -> None:
        """Free the kept memory."""
        while self._there:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        slot = self._take_oldest()
        if slot is not None:
            slot.close()

    def _take_oldest(self) -> Slot | None:
        try:
            return self._there.popleft()
        except IndexError:  # another thread was faster
            return None
