"""Who is in a pool, and who of them serves."""

from __future__ import annotations

import asyncio
import time

from rollout_client.discovery.members import Member
from rollout_client.errors import NoReplica
from rollout_client.routing.connections import Connections
from rollout_client.routing.router import Router
from rollout_worker.schemas import WorkerInfo


class Presence:
    """Answers for `AsyncRolloutPool` who is there.

    Args:
        router: Knows the members.
        connections: To them.
    """

    def __init__(self, router: Router, connections: Connections) -> None:
        self._router = router
        self._connections = connections

    def _start(self) -> None:
        """Begin to look for members."""
        raise NotImplementedError

    @property
    def members(self) -> list[Member]:
        """Members that discovery has found; `serving` says which of them get requests."""
        return self._router.balancer.members()

    def serving(self) -> list[Member]:
        """Members that may get requests now."""
        now = time.monotonic()
        records = self._router.balancer.records.values()
        return [record.member for record in records if record.usable(now)]

    def load(self) -> dict[str, int]:
        """Requests of this pool in flight, by member name."""
        records = self._router.balancer.records.values()
        return {record.member.name: record.in_flight for record in records}

    async def wait_serving(self, count: int = 1, *, seconds: float = 600) -> list[Member]:
        """Wait until so many members serve.

        Raises:
            NoReplica: Fewer did within these seconds, or discovery may not know the members.
        """
        self._start()
        began = time.monotonic()
        until = began + seconds
        while len(found := self.serving()) < count:
            now = time.monotonic()
            if now >= until or self._router.hopeless:
                why = self._router.reasons()
                raise NoReplica(f"{len(found)} of {count} replicas serve ({why})")
            self._router.warn_since(began)
            await asyncio.sleep(min(0.05, until - now))
        return found

    async def info(self, *, seconds: float = 30) -> WorkerInfo:
        """Return what a replica says about its model, lengths and capabilities.

        Raises:
            NoReplica: None serves within these seconds.
        """
        member = (await self.wait_serving(seconds=seconds))[0]
        with self._connections.to(member.url) as client:
            answer = await client.get("/v1/info", timeout=seconds)
        answer.raise_for_status()
        return WorkerInfo.model_validate_json(answer.content, extra="ignore")
