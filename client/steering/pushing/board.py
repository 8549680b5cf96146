"""What has come of a push for each replica; written by senders' threads, read by the pool's loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class Standing:
    """How far one replica is.

    Attributes:
        bytes_done: What it has, as it said last.
        root_hash: Of what it staged; None: it has not.
        why: It failed, or the way to it did; None: not so far.
        whole_at: When it had all bytes, on the monotonic clock.
        settled_at: When it had staged them, or failed.
    """

    bytes_done: int = 0
    root_hash: str | None = None
    why: str | None = None
    whole_at: float | None = None
    settled_at: float | None = None


class Board:
    """See the module.

    Args:
        names: Of all replicas.
        nbytes: What each has to get.
        news: Called, from any thread, whenever there is something to see.
    """

    def __init__(self, names: Iterable[str], nbytes: int, news: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._standings = {name: Standing() for name in names}
        self._nbytes, self._news = nbytes, news

    def of(self, name: str) -> Standing:
        """Return how far a replica is."""
        return self._standings[name]

    def settled(self, name: str) -> bool:
        """Whether nothing more is to be expected of a replica."""
        return self._standings[name].settled_at is not None

    @property
    def bytes_done(self) -> int:
        """What all replicas have."""
        return sum(each.bytes_done for each in self._standings.values())

    def progress(self, name: str, bytes_done: int) -> None:
        """Note how many bytes a replica has."""
        with self._lock:
            each = self._standings[name]
            each.bytes_done = max(each.bytes_done, min(bytes_done, self._nbytes))
            if each.bytes_done == self._nbytes and each.whole_at is None:
                each.whole_at = time.monotonic()
        self._news()

    def staged(self, name: str, root_hash: str) -> None:
        """Note that a replica has staged and verified what it got."""
        self.progress(name, self._nbytes)
        self._settle(name, root_hash, None)

    def failed(self, name: str, why: str) -> None:
        """Note that a replica can't use it, or can't be reached."""
        self._settle(name, None, why)

    def _settle(self, name: str, root_hash: str | None, why: str | None) -> None:
        with self._lock:
            each = self._standings[name]
            if each.settled_at is None:
                each.root_hash, each.why = root_hash, why
                each.settled_at = time.monotonic()
        self._news()
