"""One process at a time may write to the pools of a shard: the holder of its `coordination.k8s.io/Lease`.

The holder renews every two seconds. Its permission to write ends `RENEW_DEADLINE_SECONDS` after the
last successful renewal was *sent*, five seconds before anybody else may take the Lease, and every
write's deadline lies before that moment. While the API server is away the holder is fenced but stays.
Its next update carries the resourceVersion that it wrote last: if nobody else has held the Lease since
then, it continues with all it knows; otherwise this process exits.

Time is the boot clock, which also runs while the machine sleeps; other machines' clocks are never
compared with ours. A standby counts from when it last saw the Lease change itself, and from when it
first saw that a Lease was deleted: its holder may write for as long as if it were there.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import random
import time
import zlib
from collections.abc import Callable

from rollout_common.kube.errors import AlreadyExists, Conflict, KubeError, NotFound
from rollout_operator.api.names import ANNOTATION_SHARDS
from rollout_operator.api.objects import Obj, PoolKey
from rollout_operator.settings import MAX_SHARDS

from .kube_client import KubeClient
from .settings import (
    LAYOUT_RETRY_SECONDS,
    LEASE_DURATION_SECONDS,
    LEASE_REQUEST_SECONDS,
    RENEW_DEADLINE_SECONDS,
    RENEW_INTERVAL_SECONDS,
    STANDBY_POLL_SECONDS,
)

logger = logging.getLogger(__name__)


class LeadershipLost(Exception):
    """Somebody else holds the Lease: stop at once."""


class OtherLayout(Exception):
    """An operator that divides the pools into another number of shards still leads."""


def boot_clock() -> float:
    """Return monotonic seconds that include suspension of the machine."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)


class ShardLease:
    """The Lease of one shard; see the module.

    Args:
        kube: The client; requests for Leases are not fenced.
        namespace: Where the Lease is.
        name: Its name.
        identity: Name of this process, unique.
        shards: How many shards this process divides the pools into.
        clock: `boot_clock`, or a test's.
    """

    def __init__(
        self,
        kube: KubeClient,
        *,
        namespace: str,
        name: str,
        identity: str,
        shards: int,
        clock: Callable[[], float] = boot_clock,
    ) -> None:
        self._kube = kube
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._shards = shards
        self._clock = clock
        self._found: Obj | None = None
        """The Lease as it was last read; None: there was none."""
        self._is_free = False
        """Whether nobody held it then."""
        self._seen_shards = shards
        """The number that its last known holder named."""
        self._held = False
        self._renewed_at = 0.0
        self._version = ""
        self._transitions = 0
        self._acquired: str | None = None
        self._seen_version = ""
        self._seen_at = 0.0
        self._missed_at: float | None = None
        """When the Lease that had been there was first seen to be gone."""

    def has_lease(self) -> bool:
        """Return whether the Lease is ours as far as we know (we may be fenced right now)."""
        return self._held

    def write_seconds(self) -> float:
        """Return for how long a write may last; 0 or less: none may be sent."""
        if not self._held:
            return 0.0
        now = self._clock()
        if now - self._renewed_at > RENEW_DEADLINE_SECONDS:
            return 0.0
        return self._renewed_at + LEASE_DURATION_SECONDS - 1 - now

    def may_write(self) -> bool:
        """Return whether writes are allowed now."""
        return self.write_seconds() > 0

    def __str__(self) -> str:
        return f"the Lease {self._namespace}/{self._name}"

    async def release_lease(self) -> None:
        """Give the Lease back, so that a standby takes it at once; errors are logged."""
        if not self._held:
            return
        self._held = False  # from here on nothing is written
        try:
            async with asyncio.timeout(LEASE_REQUEST_SECONDS):
                await self._write_lease(self._lease_spec(holder="", seconds=1))
        except (KubeError, TimeoutError) as error:
            logger.warning("can't release the Lease: %s", str(error) or "no answer in time")

    async def read_lease(self) -> bool:
        """Read the Lease; return whether nobody holds it."""
        sent = self._clock()
        try:
            self._found = await self._kube.get("leases", self._namespace, self._name)
        except NotFound:
            self._found = None
            self._is_free = not self._was_just_deleted(sent)
            return self._is_free
        self._missed_at = None
        # Releases before shards name none.
        named = (self._found["metadata"].get("annotations") or {}).get(ANNOTATION_SHARDS, "1")
        self._seen_shards = int(named) if named.isdecimal() else 0
        self._is_free = self._has_expired(self._found, sent)
        return self._is_free

    async def other_layout(self) -> int | None:
        """Return the number of shards of another process that holds the Lease; None: it is ours, or nobody holds it."""
        if self._held or await self.read_lease() or self._seen_shards == self._shards:
            return None
        return self._seen_shards

    async def take_lease(self) -> bool:
        """Take the Lease if it was free when it was last read; return whether it is ours now."""
        if not self._is_free:
            return False
        sent = self._clock()
        if self._found is None:
            return await self._create_lease(sent)
        spec = self._found.get("spec") or {}
        self._transitions = int(spec.get("leaseTransitions") or 0) + 1
        self._version = self._found["metadata"]["resourceVersion"]
        self._acquired = _micro_time()
        try:
            await self._write_lease(self._lease_spec())
        except (Conflict, NotFound):
            return False  # another standby was faster
        self._held, self._renewed_at = True, sent
        return True

    def _was_just_deleted(self, now: float) -> bool:
        """Return whether its holder may still write, and create it again; a new process has seen none."""
        if not self._seen_version:
            return False
        self._missed_at = now if self._missed_at is None else self._missed_at
        return now - self._missed_at <= LEASE_DURATION_SECONDS

    def _has_expired(self, lease: Obj, now: float) -> bool:
        spec = lease.get("spec") or {}
        version = lease["metadata"]["resourceVersion"]
        if version != self._seen_version:
            self._seen_version, self._seen_at = version, now
        if not spec.get("holderIdentity"):
            return True
        seconds = float(spec.get("leaseDurationSeconds") or LEASE_DURATION_SECONDS)
        return now - self._seen_at > seconds

    async def _create_lease(self, sent: float) -> bool:
        self._acquired = _micro_time()
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {
                "namespace": self._namespace,
                "name": self._name,
                "annotations": self._layout(),
            },
            "spec": self._lease_spec(),
        }
        try:
            lease = await self._kube.create("leases", body)
        except AlreadyExists:
            return False
        self._version = lease["metadata"]["resourceVersion"]
        self._held, self._renewed_at = True, sent
        return True

    async def renew_lease(self) -> None:
        """Renew it once.

        Raises:
            LeadershipLost: Somebody else has, or has had, the Lease.
        """
        try:
            async with asyncio.timeout(LEASE_REQUEST_SECONDS):
                await self._renew_lease()
        except LeadershipLost:
            self._held = False
            raise

    async def _renew_lease(self) -> None:
        sent = self._clock()
        try:
            await self._write_lease(self._lease_spec())
        except Conflict:
            await self._reread_lease()
            return
        except NotFound:
            logger.warning("the Lease was deleted: creating it again")
            if not await self._create_lease(sent):
                raise LeadershipLost("somebody else recreated the deleted Lease") from None
            return
        self._renewed_at = sent

    async def _reread_lease(self) -> None:
        """Continue if the Lease still names us although somebody wrote it, for example by `kubectl edit`."""
        lease = await self._kube.get("leases", self._namespace, self._name)
        holder = (lease.get("spec") or {}).get("holderIdentity")
        if holder != self._identity:
            raise LeadershipLost(f"the Lease is held by {holder or 'nobody'!r}")
        self._version = lease["metadata"]["resourceVersion"]

    async def _write_lease(self, spec: Obj) -> None:
        about = {"resourceVersion": self._version, "annotations": self._layout()}
        body = {"metadata": about, "spec": spec}
        lease = await self._kube.patch("leases", self._namespace, self._name, body)
        self._version = lease["metadata"]["resourceVersion"]

    def _layout(self) -> dict[str, str]:
        return {ANNOTATION_SHARDS: str(self._shards)}

    def _lease_spec(self, holder: str | None = None, seconds: int = LEASE_DURATION_SECONDS) -> Obj:
        return {
            "holderIdentity": self._identity if holder is None else holder,
            "leaseDurationSeconds": seconds,
            "acquireTime": self._acquired,
            "renewTime": _micro_time(),
            "leaseTransitions": self._transitions,
        }


class Leadership:
    """One of the operator's shards, the first whose Lease is free: this process acts on its pools alone.

    Every Lease names the number of shards that its holder divides pools into. Holders of another number would share
    pools with this process, so it leads only while there are none. It looks before it takes a Lease, since it would
    take and release it again and again, and once more after that: of two processes that take Leases at the same time
    at least one sees the other's.

    Args:
        kube: The client; requests for Leases are not fenced.
        namespace: Where the Leases are.
        name: Of the first shard's Lease; the others are `<name>-1`, `<name>-2` …
        identity: Name of this process, unique.
        shards: How many shards there are, at most `MAX_SHARDS`.
        clock: `boot_clock`, or a test's.
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
            trouble, wait = "", STANDBY_POLL_SECONDS
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
            self._ours, self.shard = lease, number
            try:
                await self._check_layouts()
            except BaseException:
                self._ours = None
                await lease.release_lease()
                raise
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


class SoleLeader:
    """Stands in for `Leadership` under `--no-leader-elect`: this process always may write."""

    shards = 1

    def has_lease(self) -> bool:
        """Return True."""
        return True

    def write_seconds(self) -> float:
        """Return infinity."""
        return float("inf")

    def may_write(self) -> bool:
        """Return True."""
        return True

    def silent_seconds(self) -> float:
        """Return 0: there is nothing to try."""
        return 0.0

    def covers_pool(self, key: PoolKey) -> bool:
        """Return True."""
        return True

    async def acquire_lease(self) -> None:
        """Return at once."""

    async def hold_lease(self) -> None:
        """Wait forever."""
        await asyncio.Event().wait()

    async def release_lease(self) -> None:
        """Do nothing."""


def _micro_time() -> str:
    now = datetime.datetime.now(datetime.UTC)
    return now.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
