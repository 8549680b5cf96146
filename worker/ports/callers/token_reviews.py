"""Answers of an API server about callers: cached, asked for once, and by few at a time.

A caller that invents many tokens delays only itself: accepted answers are cached apart from denied ones
and renewed before they expire, and each address has few places in the queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Final, Generic, TypeVar

from rollout_common.wire.problems import ProblemError
from rollout_worker.ports.settings import (
    ACCEPTED_SECONDS,
    DENIED_SECONDS,
    RENEW_SECONDS,
    REVIEW_SECONDS,
)

MAX_CACHED: Final = 1024
MAX_ASKED: Final = 8
"""Reviews that run at once."""
MAX_WAITING: Final = 64
MAX_WAITING_EACH: Final = 16
"""Reviews that wait on behalf of one address."""
MAX_SHARING: Final = 256
"""Calls that share one review."""

T = TypeVar("T")


class ReviewCache(Generic[T]):
    """Answers that each have an expiry; beyond `MAX_CACHED` the oldest are dropped."""

    def __init__(self) -> None:
        self._entries: OrderedDict[Hashable, tuple[float, T]] = OrderedDict()

    def get(self, key: Hashable, now: float) -> tuple[float, T] | None:
        """The seconds until the answer expires, and the answer; None if there is none."""
        entry = self._entries.get(key)
        if entry is None or entry[0] <= now:
            return None
        return entry[0] - now, entry[1]

    def put(self, key: Hashable, value: T, expires: float) -> None:
        """Keep an answer until `expires`."""
        self.drop_answer(key)
        self._entries[key] = (expires, value)
        while len(self._entries) > MAX_CACHED:
            self._entries.popitem(last=False)

    def drop_answer(self, key: Hashable) -> None:
        """Drop an answer, if there is one."""
        self._entries.pop(key, None)


class ReviewQueue:
    """The queue that reviews of every kind wait in."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(MAX_ASKED)
        self._places: Counter[str] = Counter()

    def join_queue(self, address: str) -> None:
        """Take a place.

        Raises:
            ProblemError: 503 if there is none.
        """
        waiting = self._places.total()
        if waiting >= MAX_WAITING or self._places[address] >= MAX_WAITING_EACH:
            raise _queue_full_problem()
        self._places[address] += 1

    async def ask_in_turn(self, address: str, question: Callable[[], Awaitable[T]]) -> T:
        """Ask once few enough others do, and leave the place.

        Raises:
            ProblemError: 503 if it took too long.
        """
        try:
            async with asyncio.timeout(REVIEW_SECONDS), self._turns:
                return await question()
        except TimeoutError:
            raise _queue_full_problem() from None
        finally:
            self._places[address] -= 1
            self._places += Counter()  # drops addresses without a place


def _queue_full_problem() -> ProblemError:
    detail = "too many callers wait to be checked: try again"
    return ProblemError("auth-unavailable", detail, retry_after=1)


class TokenReviews(Generic[T]):
    """All answers to one kind of question; each key is asked for once at a time."""

    def __init__(
        self,
        queue: ReviewQueue,
        accepts: Callable[[T], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`accepts` says whether an answer admits its caller."""
        self._queue = queue
        self._accepts = accepts
        self._clock = clock
        self._accepted: ReviewCache[T] = ReviewCache()
        self._denied: ReviewCache[T] = ReviewCache()
        self._asked: dict[Hashable, asyncio.Task[T]] = {}
        self._sharing: Counter[Hashable] = Counter()

    async def get(self, key: Hashable, address: str, question: Callable[[], Awaitable[T]]) -> T:
        """Return the cached answer, or ask.

        Raises:
            ProblemError: 503 if too many wait, or what the question raises.
        """
        now = self._clock()
        known = self._accepted.get(key, now)
        if known is not None:
            if known[0] < RENEW_SECONDS and key not in self._asked:
                with contextlib.suppress(ProblemError):
                    self._begin_review(key, address, question)
            return known[1]
        denied = self._denied.get(key, now)
        if denied is not None:
            return denied[1]
        asked = self._asked.get(key) or self._begin_review(key, address, question)
        if self._sharing[key] >= MAX_SHARING:
            raise _queue_full_problem()
        self._sharing[key] += 1
        return await asyncio.shield(asked)

    def _begin_review(
        self, key: Hashable, address: str, question: Callable[[], Awaitable[T]]
    ) -> asyncio.Task[T]:
        self._queue.join_queue(address)
        asked = self._asked[key] = asyncio.create_task(self._run_review(key, address, question))
        asked.add_done_callback(lambda done: done.cancelled() or done.exception())
        return asked

    async def _run_review(
        self, key: Hashable, address: str, question: Callable[[], Awaitable[T]]
    ) -> T:
        try:
            answer = await self._queue.ask_in_turn(address, question)
        finally:
            del self._asked[key]
            del self._sharing[key]
        now = self._clock()
        if self._accepts(answer):
            self._accepted.put(key, answer, now + ACCEPTED_SECONDS)
        else:
            self._accepted.drop_answer(key)
            self._denied.put(key, answer, now + DENIED_SECONDS)
        return answer
