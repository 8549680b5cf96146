"""How long somebody has been silent."""

from __future__ import annotations

import time
from collections.abc import Callable

from .settings import MAX_GAP_SECONDS


class SilenceTimer:
    """Adds up the time in which nothing was heard, look by look."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked = clock()
        self._quiet = 0.0

    def note_heard(self) -> None:
        """Begin anew."""
        self._looked, self._quiet = self._clock(), 0.0

    def silent_seconds(self) -> float:
        """Look, and return how long nothing has been heard."""
        now = self._clock()
        self._quiet += min(now - self._looked, MAX_GAP_SECONDS)
        self._looked = now
        return self._quiet
