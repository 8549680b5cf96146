"""What somebody who waits for a turn does now and then: tell who holds it, and mind the time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from rollout_common.turn.errors import TurnTimeout

from .settings import FIRST_POLL_SECONDS, HOLDER_POLL_SECONDS, OPEN_GRACE_SECONDS

Waiting = Callable[[Mapping[str, str]], None]


class Look:
    """What somebody who waits does now and then: tell who holds the turn, and mind the time."""

    def __init__(
        self,
        blocked_by: Callable[[], Mapping[str, str]],
        timeout: float | None,
        waiting: Waiting | None,
    ) -> None:
        self._blocked_by = blocked_by
        self._timeout = timeout
        self._waiting = waiting
        self._start = time.monotonic()
        self._told: Mapping[str, str] = {}
        self._every = FIRST_POLL_SECONDS

    def seconds(self) -> float:
        """Return how long to wait until the next look."""
        if self._timeout is None:
            return self._every
        left = self._timeout - (time.monotonic() - self._start)
        return max(0.001, min(self._every, left))

    def __call__(self) -> None:
        """Tell who holds the turn if that has changed.

        Raises:
            TurnTimeout: the time is up.
        """
        blocked_by = self._blocked_by()
        if blocked_by != self._told and blocked_by:
            self._told = blocked_by
            if self._waiting is not None:
                self._waiting(blocked_by)
        waited = time.monotonic() - self._start
        self._every = HOLDER_POLL_SECONDS if waited >= FIRST_POLL_SECONDS else FIRST_POLL_SECONDS
        if self._timeout is None:
            return
        # A free turn whose files are being opened is had in a moment: then nobody holds it.
        if waited >= self._timeout + (0.0 if blocked_by else OPEN_GRACE_SECONDS):
            raise TurnTimeout(self._timeout, blocked_by)
