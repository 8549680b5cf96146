"""Received memory that nothing reads any more, kept for the next version: its pages are allocated already."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from .slot import Slot


@dataclass(frozen=True, slots=True)
class Used:
    """A slot that was used before.

    Attributes:
        slot: The memory.
        root_hash: Of the version that it holds; None: it may hold anything.
    """

    slot: Slot
    root_hash: str | None


class SpareMemory:
    """At most one slot that waits for the next version; safe for several threads.

    It takes no lock, since the garbage collector may call it at any point.
    """

    def __init__(self) -> None:
        self._there: deque[Used] = deque()

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that it holds."""
        return sum(used.slot.size for used in tuple(self._there))

    def keep_memory(self, used: Used) -> None:
        """Keep memory that nothing reads or writes any more, and free what was kept before."""
        self._there.append(used)
        while len(self._there) > 1:
            self._drop_oldest()

    def take_memory(self, size: int) -> Used | None:
        """Return the kept memory if it has exactly this size; else free it and return None."""
        used = self._take_oldest()
        if used is None or used.slot.size == size:
            return used
        used.slot.close()
        return None

    def drop_memory(self) -> None:
        """Free the kept memory."""
        while self._there:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        used = self._take_oldest()
        if used is not None:
            used.slot.close()

    def _take_oldest(self) -> Used | None:
        try:
            return self._there.popleft()
        except IndexError:  # another thread was faster
            return None
