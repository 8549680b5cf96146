"""How fast bytes may go out: one bucket of tokens for all connections that share a link."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

BURST_SECONDS = 0.05
"""What may be caught up after a pause, as time of the rate."""


class Pace:
    """Takes turns in the order of asking, so that no connection starves another one.

    Args:
        rate: Bytes a second.
        clock: Tells the seconds.
    """

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        if rate <= 0:
            raise ValueError("the rate must be more than 0 bytes a second")
        self.rate, self._clock = rate, clock
        self._lock = threading.Lock()
        self._free = clock()

    def wait_for(self, nbytes: int) -> float:
        """Reserve so many bytes; returns the seconds after which they may be sent."""
        with self._lock:
            now = self._clock()
            begin = max(self._free, now - BURST_SECONDS)
            self._free = begin + nbytes / self.rate
            return max(0.0, begin - now)


SLOW_RATE = 8 << 20
"""Bytes a second below which the first of several receivers holds up those behind it."""
SLOW_SECONDS = 5.0
"""Of waiting for it alone after which that is judged."""


class Haste:
    """Judges one receiver by the time that sends to it block: a limit of the sender's own is not its fault."""

    def __init__(self) -> None:
        self._bytes, self._seconds = 0, 0.0

    def took(self, nbytes: int, seconds: float) -> bool:
        """Note that it took so many bytes in so many seconds; returns whether it is fast enough."""
        self._bytes += nbytes
        self._seconds += seconds
        if self._seconds < SLOW_SECONDS:
            return True
        fast = self._bytes >= SLOW_RATE * self._seconds
        self._bytes, self._seconds = 0, 0.0
        return fast
