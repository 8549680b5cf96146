"""Leases on members: who waits for one, and which attempts are under way."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from rollout_client.discovery.members import Member
from rollout_client.errors import NoReplica, PoolClosed, RequestRefused

from .balancer import ANY, Balancer, Bounds

logger = logging.getLogger(__name__)

WARN_SECONDS = 10.0
"""Who waits so long for a replica says why, and again as often."""

AGAIN_SECONDS = 0.5
"""A waiting request looks again at least that often: some seats come back by time alone."""


class Lease:
    """A place of one attempt on a member."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.cut = ""
        """Why the attempt was cut off from here, if it was."""
        self.heard_at = time.monotonic()
        self._scope: asyncio.Timeout | None = None

    def watch(self, scope: asyncio.Timeout | None) -> None:
        """Say which timeout ends the attempt; None: it has ended."""
        self._scope = scope
        self.heard()

    def heard(self) -> None:
        """The worker sent something."""
        self.heard_at = time.monotonic()

    def cut_off(self, why: str) -> None:
        """End the attempt now."""
        if self._scope is not None and not self._scope.expired() and not self.cut:
            self.cut = why
            self._scope.reschedule(asyncio.get_running_loop().time())


class Router:
    """Gives members to requests; a request that finds none waits for a change.

    Args:
        balancer: Chooses.
        trouble: What discovery complains of.
        on_gone: Told the URL of a member that had left, when the last request on it has ended.
    """

    def __init__(
        self,
        balancer: Balancer,
        trouble: Callable[[], str] = lambda: "",
        on_gone: Callable[[str], None] = lambda url: None,
    ) -> None:
        self.balancer = balancer
        self._trouble = trouble
        self._on_gone = on_gone
        self.leases: set[Lease] = set()
        self.closed = False
        self._warned_at = 0.0
        self._wanted: dict[object, Bounds] = {}
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """Somebody may get a member now who could not before: all who wait look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def waiting_for(self) -> list[Bounds]:
        """Bounds of those who wait."""
        return list(self._wanted.values())

    def reasons(self, bounds: Bounds = ANY) -> str:
        """Return why nobody gets a request, and what discovery complains of."""
        known = self.balancer.reasons(time.monotonic(), bounds) or "discovery found no members"
        trouble = self._trouble()
        return f"{known}; {trouble}" if trouble else known

    def warn_since(self, began: float, bounds: Bounds = ANY) -> None:
        """Say why nobody serves one who waits since then, now and again, once for all who wait."""
        now = time.monotonic()
        if now - max(began, self._warned_at) >= WARN_SECONDS:
            self._warned_at = now
            why = self.reasons(bounds)
            logger.warning("waiting for a replica for %.0f s: %s", now - began, why)

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
            if member.url not in self.balancer.seats:
                self._on_gone(member.url)
            if self._wanted:
                self.changed()

    async def choose(
        self, key: str | None, until: float, bounds: Bounds = ANY, avoid: Collection[str] = ()
    ) -> Member:
        """Return a member for one attempt, counted at once: enter `lease` with it next.

        Raises:
            NoReplica: Nobody could take it until then.
            RequestRefused: The exact weights asked for are served no more.
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
            if self.balancer.out_of_reach(bounds):
                why = f"all replicas are beyond the exact version {bounds.exact_version}"
                raise RequestRefused(why, status=409, slug="version-not-met")
            if now >= until:
                why = self.reasons(bounds)
                raise NoReplica(f"no replica could take the request in time ({why})")
            self.warn_since(began, bounds)
            await self._wait(changed, min(AGAIN_SECONDS, until - now), bounds)

    async def _wait(self, changed: asyncio.Event, seconds: float, bounds: Bounds) -> None:
        token = object()
        self._wanted[token] = bounds
        try:
            async with asyncio.timeout(seconds):
                await changed.wait()
        except TimeoutError:
            pass
        finally:
            del self._wanted[token]
