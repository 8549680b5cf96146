"""Gives members to attempts: which attempts run where, and who waits for a member."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from rollout_client.discovery.members import Member
from rollout_client.errors import NoReplica, PoolClosed, RequestRefused

from .balancer import Balancer
from .bounds import ANY, Bounds

logger = logging.getLogger(__name__)

WARN_SECONDS = 10.0
"""How often the log says why requests wait for a replica."""

LOOK_SECONDS = 0.5
"""A waiting request looks again at least this often: some exclusions end by time alone."""


class Lease:
    """One attempt that runs on a member."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.cut = ""
        """Why this client cut the attempt off, if it did."""
        self.heard_at = time.monotonic()
        self._scope: asyncio.Timeout | None = None

    def watch(self, scope: asyncio.Timeout | None) -> None:
        """Say which timeout ends the attempt; None: it has ended."""
        self._scope = scope
        self.heard()

    def heard(self) -> None:
        """Note that the worker sent something."""
        self.heard_at = time.monotonic()

    def cut_off(self, why: str) -> None:
        """End the attempt now."""
        if self._scope is not None and not self._scope.expired() and not self.cut:
            self.cut = why
            self._scope.reschedule(asyncio.get_running_loop().time())


class Router:
    """Gives members to requests; a request that finds none waits for a change.

    Args:
        balancer: Chooses the member.
        trouble: Returns what discovery has to complain about; empty if nothing.
        on_gone: Called with the URL of a member that had left, once the last request on it ended.
        look_seconds: How often a waiting request looks again by itself.
        refused: Whether discovery is refused to know the members, so that waiting does not help.
    """

    def __init__(
        self,
        balancer: Balancer,
        trouble: Callable[[], str] = lambda: "",
        on_gone: Callable[[str], None] = lambda url: None,
        *,
        look_seconds: float = LOOK_SECONDS,
        refused: Callable[[], bool] = lambda: False,
    ) -> None:
        self.balancer = balancer
        self._trouble = trouble
        self._refused = refused
        self._on_gone = on_gone
        self.leases: set[Lease] = set()
        self.closed = False
        self._look_seconds = look_seconds
        self._warned_at = 0.0
        self._waiting: dict[object, Bounds] = {}
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """Wake all who wait: one of them may get a member now who could not before."""
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def hopeless(self) -> bool:
        """Whether nobody is known and discovery may not find out who is there."""
        return self._refused() and not self.balancer.members()

    @property
    def waiting_for(self) -> list[Bounds]:
        """Bounds of the requests that wait for a member."""
        return list(self._waiting.values())

    def reasons(self, bounds: Bounds = ANY) -> str:
        """Return why no member takes a request, and what discovery has to complain about."""
        known = self.balancer.reasons(time.monotonic(), bounds) or "no members have been discovered"
        trouble = self._trouble()
        return f"{known}; {trouble}" if trouble else known

    def warn_since(self, began: float, bounds: Bounds = ANY) -> None:
        """Log from time to time, once for all, why a request that began then still waits."""
        now = time.monotonic()
        if now - max(began, self._warned_at) >= WARN_SECONDS:
            self._warned_at = now
            why = self.reasons(bounds)
            logger.warning("waited %.0f s for a replica so far: %s", now - began, why)

    @contextmanager
    def lease(self, member: Member) -> Iterator[Lease]:
        """Account for an attempt on a chosen member."""
        lease = Lease(member)
        self.leases.add(lease)
        try:
            yield lease
        finally:
            self.leases.discard(lease)
            self.balancer.release(member.url)
            if member.url not in self.balancer.records:
                self._on_gone(member.url)
            if self._waiting:
                self.changed()

    async def choose(
        self, key: str | None, until: float, bounds: Bounds = ANY, avoid: Collection[str] = ()
    ) -> Member:
        """Return a member for one attempt, counted at once: enter `lease` with it next.

        Raises:
            NoReplica: No member could take it by then, or discovery may not know the members.
            RequestRefused: No member serves the exact weights asked for any more.
            PoolClosed: The pool was closed.
        """
        began = time.monotonic()
        while True:
            changed = self._changed
            now = time.monotonic()
            if self.closed:
                raise PoolClosed("the pool was closed")
            member = self.balancer.choose(key, now, bounds, avoid)
            if member is not None:
                return member
            if self.balancer.all_beyond(bounds):
                why = f"all replicas are beyond the exact version {bounds.exact_version}"
                raise RequestRefused(why, status=409, slug="version-not-met")
            if now >= until or self.hopeless:
                why = self.reasons(bounds)
                raise NoReplica(f"no replica could take the request in time ({why})")
            self.warn_since(began, bounds)
            await self._wait(changed, min(self._look_seconds, until - now), bounds)

    async def _wait(self, changed: asyncio.Event, seconds: float, bounds: Bounds) -> None:
        token = object()
        self._waiting[token] = bounds
        try:
            async with asyncio.timeout(seconds):
                await changed.wait()
        except TimeoutError:
            pass
        finally:
            del self._waiting[token]
