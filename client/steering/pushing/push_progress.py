"""The progress and outcome of a push for each replica; senders write it, the pool's loop reads it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class ReplicaProgress:
    """The progress of one replica.

    Attributes:
        bytes_done: How many bytes it has, by its last report.
        root_hash: Of the version that it staged; None: it has not staged it.
        why: Why the replica or the connection to it failed; None: no failure so far.
        whole_at: When it had all bytes, on the monotonic clock.
        settled_at: When it had staged them, or failed.
    """

    bytes_done: int = 0
    root_hash: str | None = None
    why: str | None = None
    whole_at: float | None = None
    settled_at: float | None = None


class PushProgress:
    """The progress of all replicas of a push, each of which has to get `nbytes`.

    `news` is called, from any thread, whenever it changes.
    """

    def __init__(self, names: Iterable[str], nbytes: int, news: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._standings = {name: ReplicaProgress() for name in names}
        self._nbytes, self._news = nbytes, news

    def of(self, name: str) -> ReplicaProgress:
        """Return the progress of a replica."""
        return self._standings[name]

    def settled(self, name: str) -> bool:
        """Whether a replica has staged the version, or failed."""
        return self._standings[name].settled_at is not None

    def failures(self) -> dict[str, str]:
        """Return by name why replicas have failed so far."""
        return {name: each.why for name, each in self._standings.items() if each.why is not None}

    @property
    def bytes_done(self) -> int:
        """How many bytes all replicas have together."""
        return sum(each.bytes_done for each in self._standings.values())

    def note_bytes(self, name: str, bytes_done: int) -> None:
        """Note how many bytes a replica has."""
        with self._lock:
            each = self._standings[name]
            each.bytes_done = max(each.bytes_done, min(bytes_done, self._nbytes))
            if each.bytes_done == self._nbytes and each.whole_at is None:
                each.whole_at = time.monotonic()
        self._news()

    def staged(self, name: str, root_hash: str) -> None:
        """Note that a replica has staged and verified the version."""
        self.note_bytes(name, self._nbytes)
        self._settle(name, root_hash, None)

    def failed(self, name: str, why: str) -> None:
        """Note that a replica can't use the version, or can't be reached."""
        self._settle(name, None, why)

    def _settle(self, name: str, root_hash: str | None, why: str | None) -> None:
        with self._lock:
            each = self._standings[name]
            if each.settled_at is None:
                each.root_hash, each.why = root_hash, why
                each.settled_at = time.monotonic()
        self._news()
