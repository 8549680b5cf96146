"""The members of a pool, and which of them serve."""

from __future__ import annotations

import time

import httpx
from pydantic import ValidationError

from rollout_client.discovery.pool_members import Member
from rollout_client.errors import NoReplica
from rollout_client.generating.generating_verbs import GeneratingVerbs
from rollout_client.http_clients import MemberClients, describe_error
from rollout_client.routing.member_records import WeightsBounds
from rollout_client.routing.router import RequestRouter
from rollout_common.wire import WorkerInfo

from .settings import INFO_TIMEOUT_SECONDS, SERVING_LOOK_SECONDS


class MemberVerbs(GeneratingVerbs):
    """The verbs of `AsyncRolloutPool` that report its members, next to those that send prompts."""

    @property
    def _router(self) -> RequestRouter:
        return self._shared.router

    @property
    def _connections(self) -> MemberClients:
        return self._shared.connections

    @property
    def members(self) -> list[Member]:
        """Members that discovery has found; `serving` says which of them get requests."""
        return self._router.balancer.present_members()

    def serving(self) -> list[Member]:
        """Return the members that get requests without bounds of their own now; one with older weights gets none."""
        now, bounds = time.monotonic(), WeightsBounds.at_least(self._lowest_weights())
        records = self._router.balancer.records.values()
        return [record.member for record in records if not record.unusable_reason(now, bounds)]

    def load(self) -> dict[str, int]:
        """Return the requests of this pool in flight, by member name."""
        records = self._router.balancer.records.values()
        return {record.member.name: record.in_flight for record in records}

    async def wait_serving(self, count: int = 1, *, seconds: float = 600) -> list[Member]:
        """Wait until this many members serve.

        Raises:
            NoReplica: Fewer did within these seconds, or discovery may not list the members.
        """
        self._start_discovery()
        began = time.monotonic()
        until = began + seconds
        while True:
            changed = self._router.next_change
            bounds = WeightsBounds.at_least(self._lowest_weights())
            if len(found := self.serving()) >= count:
                return found
            now = time.monotonic()
            if now >= until or self._router.is_hopeless:
                why = self._router.refusal_reasons(bounds)
                raise NoReplica(f"{len(found)} of {count} replicas serve ({why})")
            self._router.warn_if_waiting(began, bounds)
            left = min(SERVING_LOOK_SECONDS, until - now)
            await self._router.wait_for_change(changed, left, bounds)

    async def info(self, *, seconds: float = 30) -> WorkerInfo:
        """Return how a replica describes its model, lengths and capabilities.

        If one fails to answer, another one is asked.

        Raises:
            NoReplica: No member serves and answers within these seconds.
        """
        until = time.monotonic() + seconds
        while True:
            left = max(0.0, until - time.monotonic())
            member = (await self.wait_serving(seconds=left))[0]
            try:
                with self._connections.client_for(member.url) as client:
                    answer = await client.get("/v1/info", timeout=INFO_TIMEOUT_SECONDS)
                answer.raise_for_status()
                return WorkerInfo.model_validate_json(answer.content, extra="ignore")
            except (httpx.HTTPError, ValidationError) as error:
                why = f"GET /v1/info: {describe_error(error).splitlines()[0]}"
                now = time.monotonic()
                if (record := self._router.balancer.records.get(member.url)) is not None:
                    record.exclude_until(why, now)
                if now >= until:
                    raise NoReplica(why, replica=member.name) from None
