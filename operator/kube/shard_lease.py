"""One `coordination.k8s.io/Lease`: the process that holds it renews it, and may write for so long.

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
import time
from collections.abc import Callable

from rollout_common.kube.errors import AlreadyExists, Conflict, KubeError, NotFound
from rollout_operator.api.names import ANNOTATION_SHARDS
from rollout_operator.api.objects import Obj

from .kube_client import KubeClient
from .settings import (
    LEASE_DURATION_SECONDS,
    LEASE_REQUEST_SECONDS,
    RENEW_DEADLINE_SECONDS,
)

logger = logging.getLogger(__name__)


class LeadershipLost(Exception):
    """Somebody else holds the Lease: stop at once."""


def boot_clock() -> float:
    """Return monotonic seconds that include suspension of the machine."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)


class ShardLease:
    """The Lease of one shard; see the module. It is given what `Leadership` is, and a name of its own."""

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


def _micro_time() -> str:
    now = datetime.datetime.now(datetime.UTC)
    return now.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
