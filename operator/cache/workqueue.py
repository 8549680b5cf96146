"""The queue of keys to look at: each waits at most once and is handed to one worker at a time.

An event says only *which object to look at*, so a key that is added again before its turn costs
nothing: the earliest due time wins. A key that is added while it is being worked on runs once more
afterwards. Failing keys come back with an exponential delay of their own; one slow or failing key
never delays another.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from .settings import BASE_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS

K = TypeVar("K", bound=Hashable)

BACKOFF_JITTER = 0.2
"""A delay is stretched by up to this share, so that keys that failed together come back one by one."""


class QueueClosed(Exception):
    """No more keys are handed out."""


class WorkQueue(Generic[K]):
    """Keys by due time. All methods belong to one event loop.

    `clock` must go at the loop's own pace where `get` is used; `rand` returns [0, 1) for the jitter. `on_wait` is called
    with the seconds that a key waited beyond its due time.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        rand: Callable[[], float] = random.random,
        on_wait: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._clock = clock
        self._rand = rand
        self._on_wait = on_wait
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._ticket = 0
        self._busy: set[K] = set()
        self._failures: dict[K, int] = {}
        self._waiters: deque[asyncio.Future[K]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._closed = False

    def add(self, key: K, delay: float = 0.0, *, rate_limited: bool = False) -> None:
        """Ask for a look at `key` in `delay` seconds, or earlier if one was asked for already.

        With `rate_limited` this counts as a failure of the key: the delay is at least its back-off.
        """
        if rate_limited:
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            delay = max(delay, self._backoff_delay(failures))
        due = self._clock() + max(0.0, delay)
        if key in self._due and self._due[key] <= due:
            return
        self._due[key] = due
        if key not in self._busy:
            self._push_due(key, due)
        self._dispatch_due()

    async def get(self) -> K:
        """Wait for a key that is due and take it; `done` must follow.

        Raises:
            QueueClosed: The queue was closed.
        """
        if self._closed:
            raise QueueClosed
        if not self._waiters:
            key = self.get_due()
            if key is not None:
                return key
        waiter: asyncio.Future[K] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._dispatch_due()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._busy.discard(waiter.result())  # handed over, but nobody is there to take it
                self.add(waiter.result())
            raise

    def get_due(self) -> K | None:
        """Take a key that is due now, or return None; `done` must follow."""
        head = self._earliest_entry()
        now = self._clock()
        if head is None or head[0] > now:
            return None
        due, _, key = heapq.heappop(self._heap)
        del self._due[key]
        self._busy.add(key)
        self._on_wait(now - due)
        return key

    def mark_done(self, key: K) -> None:
        """Say that the look at `key` has ended, well or not."""
        self._busy.discard(key)
        due = self._due.get(key)
        if due is not None:
            self._push_due(key, due)
            self._dispatch_due()

    def failure_count(self, key: K) -> int:
        """Return how often the key was added with `rate_limited` since `forget`."""
        return self._failures.get(key, 0)

    def reset_backoff(self, key: K) -> None:
        """Reset the key's back-off, because it went well or is gone."""
        self._failures.pop(key, None)

    def due_count(self) -> int:
        """Return how many keys are due and waiting for a worker."""
        now = self._clock()
        return sum(due <= now and key not in self._busy for key, due in self._due.items())

    def oldest_age(self) -> float:
        """Return for how many seconds the longest waiting key has been due."""
        head = self._earliest_entry()
        return max(0.0, self._clock() - head[0]) if head else 0.0

    def busy_count(self) -> int:
        """Return how many keys are being worked on."""
        return len(self._busy)

    def close(self) -> None:
        """Hand out nothing any more: waiting and later calls of `get` raise `QueueClosed`."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(QueueClosed())
        self._waiters.clear()

    def _backoff_delay(self, failures: int) -> float:
        # 2**20 is far above the maximum; the bound keeps the power from overflowing.
        delay = min(MAX_BACKOFF_SECONDS, BASE_BACKOFF_SECONDS * 2.0 ** min(failures - 1, 20))
        return delay * (1 + BACKOFF_JITTER * self._rand())

    def _push_due(self, key: K, due: float) -> None:
        self._ticket += 1
        heapq.heappush(self._heap, (due, self._ticket, key))

    def _earliest_entry(self) -> tuple[float, int, K] | None:
        """Return the earliest entry that still counts; drop those before it that don't."""
        while self._heap:
            due, _, key = self._heap[0]
            if key not in self._busy and self._due.get(key) == due:
                return self._heap[0]
            heapq.heappop(self._heap)
        return None

    def _dispatch_due(self) -> None:
        """Hand due keys to waiting workers and set the timer for the next one."""
        while self._waiters and not self._closed:
            if self._waiters[0].done():
                self._waiters.popleft()
                continue
            key = self.get_due()
            if key is None:
                break
            self._waiters.popleft().set_result(key)
        self._arm_timer()

    def _arm_timer(self) -> None:
        head = self._earliest_entry()
        if head is None or not self._waiters or self._closed:
            return
        if self._timer is not None:
            if self._timer_due <= head[0]:
                return  # it comes early, finds nothing due, and is set again: that costs less than to set it each time
            self._timer.cancel()
        self._timer_due = head[0]
        delay = max(0.0, head[0] - self._clock())
        self._timer = asyncio.get_running_loop().call_later(delay, self._ring_timer)

    def _ring_timer(self) -> None:
        self._timer = None
        self._dispatch_due()
