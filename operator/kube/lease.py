"""One process at a time may write to the pools of a shard: the holder of its Lease (`shard_lease`)."""

from __future__ import annotations

import asyncio
import logging
import random
import zlib
from collections.abc import Callable

from typing_extensions import override

from rollout_common.kube.errors import Forbidden, KubeError, LoginFailed, NotFound
from rollout_operator.api.objects import PoolKey
from rollout_operator.settings import MAX_SHARDS

from .kube_client import KubeClient
from .settings import (
    LAYOUT_RETRY_SECONDS,
    LEASE_REQUEST_SECONDS,
    RENEW_INTERVAL_SECONDS,
    STANDBY_POLL_SECONDS,
)
from .shard_lease import ShardLease, boot_clock

logger = logging.getLogger(__name__)


class OtherLayout(Exception):
    """An operator that divides the pools into another number of shards still leads."""


class Leadership:
    """One of the operator's shards, the first whose Lease is free: this process acts on its pools alone.

    Every Lease names the number of shards that its holder divides pools into. Holders of another number would share
    pools with this process, so it leads only while there are none. It looks before it takes a Lease, since it would
    take and release it again and again, and once more after that: of two processes that take Leases at the same time
    at least one sees the other's.

    The first shard's Lease is called `name`, the others `<name>-1`, `<name>-2` …; there are at most `MAX_SHARDS`.
    `identity` is the unique name of this process. Requests for Leases are not fenced.
    """

    def __init__(
        self,
        kube: KubeClient,
        *,
        namespace: str,
        name: str,
        identity: str,
        shards: int = 1,
        clock: Callable[[], float] = boot_clock,
    ) -> None:
        self._identity, self._clock, self.shards = identity, clock, shards
        names = [name, *(f"{name}-{number}" for number in range(1, MAX_SHARDS))]
        self._leases = [
            ShardLease(
                kube, namespace=namespace, name=each, identity=identity, shards=shards, clock=clock
            )
            for each in names
        ]
        self._ours: ShardLease | None = None
        self.shard = 0
        """The number of the shard that this process leads; 0 until then."""
        self._tried_at = clock()
        self.standby_problem: str | None = None
        """Why this process could not lead even if nobody else did: it may not use Leases, or has no login."""

    def has_lease(self) -> bool:
        """Return whether a Lease is ours as far as we know (we may be fenced right now)."""
        return self._ours is not None and self._ours.has_lease()

    def write_seconds(self) -> float:
        """Return for how long a write may last; 0 or less: none may be sent."""
        return 0.0 if self._ours is None else self._ours.write_seconds()

    def may_write(self) -> bool:
        """Return whether writes are allowed now."""
        return self.write_seconds() > 0

    def silent_seconds(self) -> float:
        """Return how long ago the last attempt at a Lease ended, successful or not."""
        return self._clock() - self._tried_at

    def covers_pool(self, key: PoolKey) -> bool:
        """Return whether a pool is of the shard that this process leads."""
        return shard_of(key, self.shards) == self.shard

    async def acquire_lease(self) -> None:
        """Return once a Lease is ours; wait out errors of the API server."""
        complained = ""
        while True:
            trouble, wait, is_lasting = "", STANDBY_POLL_SECONDS, False
            try:
                async with asyncio.timeout(2 * LEASE_REQUEST_SECONDS):
                    if await self._take_free_lease():
                        more = {"identity": self._identity, "shard": self.shard}
                        logger.info("this operator leads", extra=more)
                        return
            except OtherLayout as error:
                # Not at the same time again as another process that found this one.
                trouble, wait = str(error), random.uniform(1, 2) * LAYOUT_RETRY_SECONDS
            except (KubeError, TimeoutError) as error:
                trouble = f"can't acquire the Lease: {str(error) or 'no answer in time'}"
                is_lasting = isinstance(error, Forbidden | LoginFailed | NotFound)
            self.standby_problem = trouble if is_lasting else None
            if trouble:
                (logger.debug if complained == trouble else logger.warning)("%s", trouble)
            complained = trouble
            self._tried_at = self._clock()
            await asyncio.sleep(wait)

    async def _take_free_lease(self) -> bool:
        first = random.randrange(self.shards)
        for number in (*range(first, self.shards), *range(first)):
            lease = self._leases[number]
            if not await lease.read_lease():
                continue
            await self._check_layouts()
            if not await lease.take_lease():
                continue  # another standby was faster
            try:
                await self._check_layouts()
            except BaseException:
                await lease.release_lease()
                raise
            # Not before: until here a process with another number of shards may lead.
            self._ours, self.shard = lease, number
            return True
        return False

    async def _check_layouts(self) -> None:
        """Look at the holders of all Leases.

        Raises:
            OtherLayout: One divides the pools otherwise.
        """
        found = await asyncio.gather(*(each.other_layout() for each in self._leases))
        for lease, shards in zip(self._leases, found, strict=True):
            if shards is not None:
                raise OtherLayout(
                    f"{lease} is held by an operator with --shards={shards}, this one has {self.shards}:"
                    " waiting for its end"
                )

    async def hold_lease(self) -> None:
        """Renew forever.

        Raises:
            LeadershipLost: Somebody else has, or has had, the Lease.
        """
        assert self._ours is not None, "acquire_lease comes first"
        complained = False
        while True:
            await asyncio.sleep(RENEW_INTERVAL_SECONDS)
            try:
                await self._ours.renew_lease()
                complained = False
            except (KubeError, TimeoutError) as error:
                log = logger.debug if complained else logger.warning
                log("can't renew the Lease: %s", str(error) or "no answer in time")
                complained = True
            self._tried_at = self._clock()

    async def release_lease(self) -> None:
        """Give the Lease back, so that a standby takes it at once; errors are logged."""
        if self._ours is not None:
            await self._ours.release_lease()


def shard_of(key: PoolKey, shards: int) -> int:
    """Return the number of the shard that a pool belongs to: the same in every process and release."""
    return zlib.crc32(f"{key.namespace}/{key.name}".encode()) % shards


class SoleLeader(Leadership):
    """Leads without a Lease, under `--no-leader-elect`: this process always may write, to all pools."""

    @override
    def has_lease(self) -> bool:
        return True

    @override
    def write_seconds(self) -> float:
        return float("inf")

    @override
    def silent_seconds(self) -> float:
        return 0.0  # there is nothing to try

    @override
    async def acquire_lease(self) -> None:
        return

    @override
    async def hold_lease(self) -> None:
        await asyncio.Event().wait()
