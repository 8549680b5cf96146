"""Received memory that nobody reads any more, kept for the next version: its pages are there already."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from .arena import Slot


@dataclass(frozen=True, slots=True)
class Used:
    """Memory that was used before.

    Attributes:
        slot: The memory.
        root_hash: Of the version that it holds; None: it may hold anything.
    """

    slot: Slot
    root_hash: str | None


class Spare:
    """See the module: at most one slot. Any thread may use it.

    It takes no lock, for what is freed may be freed wherever Python collects garbage.
    """

    def __init__(self) -> None:
        self._there: deque[Used] = deque()

    @property
    def nbytes(self) -> int:
        """Memory that it holds."""
        return sum(used.slot.size for used in tuple(self._there))

    def put(self, used: Used) -> None:
        """Keep memory that nobody reads or writes any more, in the place of what was kept."""
        self._there.append(used)
        while len(self._there) > 1:
            self._pop()

    def take(self, size: int) -> Used | None:
        """Return memory of this very size, if there is some; other memory is given up."""
        used = self._next()
        if used is None or used.slot.size == size:
            return used
        used.slot.close()
        return None

    def drop(self) -> None:
        """Give it up."""
        while self._there:
            self._pop()

    def _pop(self) -> None:
        used = self._next()
        if used is not None:
            used.slot.close()

    def _next(self) -> Used | None:
        try:
            return self._there.popleft()
        except IndexError:  # another thread was faster
            return None
