"""How long another worker has been silent."""

from __future__ import annotations

import time
from collections.abc import Callable

from .settings import MAX_GAP_SECONDS


class SilenceTimer:
    """Adds up the time in which nothing was heard, from one call to the next."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._read_at = clock()
        self._quiet = 0.0

    def note_heard(self) -> None:
        """Start from zero."""
        self._read_at, self._quiet = self._clock(), 0.0

    def silent_seconds(self) -> float:
        """Return how long nothing has been heard; a long gap between calls counts only in part."""
        now = self._clock()
        self._quiet += min(now - self._read_at, MAX_GAP_SECONDS)
        self._read_at = now
        return self._quiet
