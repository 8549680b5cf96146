"""Limits how fast bytes go out: one token bucket for all connections that share a link."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rollout_common.transfer.settings import BURST_SECONDS


class RateLimit:
    """Serves requests in the order in which they come, so that no connection starves another one.

    Args:
        rate: Bytes a second.
        clock: Returns the time in seconds.
    """

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        if rate <= 0:
            raise ValueError("the rate must be more than 0 bytes a second")
        self.rate, self._clock = rate, clock
        self._lock = threading.Lock()
        self._free = clock()

    def wait_for(self, nbytes: int) -> float:
        """Reserve so many bytes; return after how many seconds they may be sent."""
        with self._lock:
            now = self._clock()
            begin = max(self._free, now - BURST_SECONDS)
            self._free = begin + nbytes / self.rate
            return max(0.0, begin - now)
