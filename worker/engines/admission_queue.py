"""Requests that wait in front of an engine, which is given no more of them than it runs at once.

An engine that queued them itself would have fixed their order, and perhaps their weights: so the newest weights
serve a request that waits here, and the worker knows which requests run.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from rollout_worker.engine import EngineRequest


class QueuedRequest(Protocol):
    """A request in the queue; `arrival` numbers requests in the order in which they came."""

    request: EngineRequest
    arrival: int

    @property
    def done(self) -> bool:
        """Whether it has ended, so that it must not be started."""


QueuedRequestT = TypeVar("QueuedRequestT", bound=QueuedRequest)


class AdmissionQueue(Generic[QueuedRequestT]):
    """Starts requests by priority, then arrival. Not safe for use by several threads.

    Args:
        has_capacity: Returns whether the engine can run a request in addition to those that run.
        start: Hands a request to the engine.
    """

    def __init__(
        self,
        has_capacity: Callable[[QueuedRequestT], bool],
        start: Callable[[QueuedRequestT], None],
    ) -> None:
        self._has_capacity = has_capacity
        self._start = start
        self._waiting: list[tuple[int, int, QueuedRequestT]] = []
        self.is_open = True
        """Whether requests may be started at all."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def requests(self) -> list[QueuedRequestT]:
        """All requests that wait, in no particular order."""
        return [request for *_, request in self._waiting]

    def add_request(self, request: QueuedRequestT) -> None:
        """Queue a request. One that was started before has its old arrival, and so its old place."""
        heapq.heappush(self._waiting, (request.request.priority, request.arrival, request))

    def remove_done(self) -> None:
        """Remove requests that have ended."""
        self._waiting = [entry for entry in self._waiting if not entry[2].done]
        heapq.heapify(self._waiting)

    def admit_requests(self) -> None:
        """Start requests, in order, until the next one does not fit."""
        while self.is_open and self._waiting:
            request = self._waiting[0][2]
            if not (request.done or self._has_capacity(request)):
                return
            heapq.heappop(self._waiting)
            if not request.done:
                self._start(request)
