"""Gives members to attempts, and knows which attempts run and which requests wait."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rollout_client.discovery.pool_members import Member
from rollout_client.errors import NoReplica, PoolClosed, RequestRefused

from .balancer import LoadBalancer
from .member_records import ANY_WEIGHTS, WeightsBounds
from .settings import WAIT_POLL_SECONDS, WAIT_WARNING_SECONDS

logger = logging.getLogger(__name__)


class AttemptLease:
    """One attempt that runs on a member."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.cut = ""
        """Why this client cut the attempt off, if it did."""
        self.heard_at = time.monotonic()
        self._scope: asyncio.Timeout | None = None

    def watch_timeout(self, scope: asyncio.Timeout | None) -> None:
        """Set the timeout that ends the attempt; None: it has ended."""
        self._scope = scope
        self.note_heard()

    def note_heard(self) -> None:
        """Note that the worker sent something."""
        self.heard_at = time.monotonic()

    def cut_off(self, why: str) -> None:
        """End the attempt now."""
        if self._scope is not None and not self._scope.expired() and not self.cut:
            self.cut = why
            self._scope.reschedule(asyncio.get_running_loop().time())


@dataclass(eq=False, repr=False)
class RequestRouter:
    """Gives members to requests; a request that finds none waits for a change."""

    balancer: LoadBalancer
    trouble: Callable[[], str] = lambda: ""
    """Returns the errors of discovery; empty: none."""
    on_gone: Callable[[str], None] = lambda url: None
    """Called with the URL of a member that has left, once the last request on it ended."""
    look_seconds: float = field(default=WAIT_POLL_SECONDS, kw_only=True)
    """How often a waiting request looks again by itself."""
    refused: Callable[[], bool] = field(default=lambda: False, kw_only=True)
    """Whether discovery may not list the members, so that waiting does not help."""

    def __post_init__(self) -> None:
        self.leases: set[AttemptLease] = set()
        self.closed = False
        self._warned_at = 0.0
        self._waiting: dict[object, WeightsBounds] = {}
        self._changed = asyncio.Event()

    def notify_waiting(self) -> None:
        """Wake all waiting requests: a member may take one of them now."""
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def next_change(self) -> asyncio.Event:
        """The event of the next change: take it before looking at the members, wait for it afterwards."""
        return self._changed

    @property
    def is_hopeless(self) -> bool:
        """Whether no member is known and discovery may not list any."""
        return self.refused() and not self.balancer.present_members()

    @property
    def waiting_bounds(self) -> list[WeightsBounds]:
        """Bounds of the requests that wait for a member."""
        return list(self._waiting.values())

    def refusal_reasons(self, bounds: WeightsBounds = ANY_WEIGHTS) -> str:
        """Return why no member takes a request, and the errors of discovery."""
        known = (
            self.balancer.exclusion_reasons(time.monotonic(), bounds)
            or "no members have been discovered"
        )
        trouble = self.trouble()
        return f"{known}; {trouble}" if trouble else known

    def warn_if_waiting(self, began: float, bounds: WeightsBounds = ANY_WEIGHTS) -> None:
        """Log at intervals, once for all requests, why one that began then still waits."""
        now = time.monotonic()
        if now - max(began, self._warned_at) >= WAIT_WARNING_SECONDS:
            self._warned_at = now
            why = self.refusal_reasons(bounds)
            logger.warning("waited %.0f s for a replica so far: %s", now - began, why)

    @contextmanager
    def lease_member(self, member: Member) -> Iterator[AttemptLease]:
        """Account for an attempt on a chosen member."""
        lease = AttemptLease(member)
        self.leases.add(lease)
        try:
            yield lease
        finally:
            self.leases.discard(lease)
            self.balancer.release_member(member.url)
            if member.url not in self.balancer.records:
                self.on_gone(member.url)
            if self._waiting:
                self.notify_waiting()

    async def choose_member(
        self,
        key: str | None,
        until: float,
        bounds: WeightsBounds = ANY_WEIGHTS,
        avoid: Collection[str] = (),
        *,
        may_move: bool = False,
    ) -> Member:
        """Return a member for one attempt, counted at once: enter `lease_member` with it next.

        With `may_move`, the output can go on with other weights, so it does not wait for members that don't serve.

        Raises:
            NoReplica: No member could take it by then, or discovery may not list the members.
            RequestRefused: No member serves the exact weights asked for any more.
            PoolClosed: The pool was closed.
        """
        began = time.monotonic()
        while True:
            changed = self.next_change
            now = time.monotonic()
            if self.closed:
                raise PoolClosed("the pool was closed")
            member = self.balancer.choose_member(key, now, bounds, avoid)
            if member is not None:
                return member
            if self.balancer.all_beyond(bounds, serving=may_move):
                why = f"all replicas are beyond the exact version {bounds.exact_version}"
                raise RequestRefused(why, status=409, slug="version-not-met")
            if now >= until or self.is_hopeless:
                why = self.refusal_reasons(bounds)
                raise NoReplica(f"no replica could take the request in time ({why})")
            self.warn_if_waiting(began, bounds)
            await self.wait_for_change(changed, min(self.look_seconds, until - now), bounds)

    async def wait_for_change(
        self, changed: asyncio.Event, seconds: float, bounds: WeightsBounds
    ) -> None:
        """Wait until members change, at most for so long; until then members with other weights are asked for theirs."""
        token = object()
        self._waiting[token] = bounds
        try:
            async with asyncio.timeout(seconds):
                await changed.wait()
        except TimeoutError:
            pass
        finally:
            del self._waiting[token]
