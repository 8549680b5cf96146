"""Arrival times of the tokens of concurrent requests, and the longest gap."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field

from tests.support.waiting import until_sync

CALL_SECONDS = 300.0


@dataclass(slots=True)
class Streams:
    """Requests that are always running: another one replaces a request that ends.

    `arrivals`: when the deltas of each request arrived, requests in the order in which they began;
    guarded by `lock`.
    """

    arrivals: list[list[float]] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def open(self) -> list[float]:
        with self.lock:
            self.arrivals.append([])
            return self.arrivals[-1]

    def seen(self, since: float = 0.0) -> list[list[float]]:
        """Return the arrivals after `since` by request, leaving out requests that had none."""
        with self.lock:
            kept = [[at for at in each if at > since] for each in self.arrivals]
        return [each for each in kept if each]

    def usual(self, until: float) -> list[float]:
        """Return the seconds between consecutive deltas of each request, before `until`."""
        each = [[at for at in some if at < until] for some in self.seen()]
        return [late - early for some in each for early, late in itertools.pairwise(some)]

    def await_running(self, count: int, since: float) -> None:
        """Wait until `count` requests have had a token since then."""
        until_sync(
            lambda: len(self.seen(since)) >= count, CALL_SECONDS, what="all requests to run again"
        )

    def longest(self, since: float, until: float) -> float:
        """Return the longest time between `since` and `until` in which no delta arrived."""
        marks = [at for some in self.seen(since) for at in some if at < until]
        ordered = [since, *sorted(marks), until]
        return max(b - a for a, b in itertools.pairwise(ordered))
