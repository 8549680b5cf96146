"""Asks members whether they serve: excluded ones, outdated ones, and silent ones.

`GET /ready` says whether a member serves, `GET /v1/weights` with which weights, `GET /health`
whether a silent one is alive. `GET /v1/info`, once while requests run there, says which ids end
outputs: the id that ended one output says nothing about others.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
from pydantic import ValidationError

from rollout_client.http_clients import MemberClients, describe_error
from rollout_common.wire import WeightsId, WeightsState, WorkerInfo

from . import settings
from .member_records import MemberRecord
from .router import AttemptLease, RequestRouter

logger = logging.getLogger(__name__)


def probe_pause_after(failures: int) -> float:
    """Return the pause before the next probe of a member that has failed this often."""
    return min(settings.MAX_PROBE_SECONDS, settings.FIRST_PROBE_SECONDS * 2.0 ** min(failures, 10))


@dataclass(eq=False, repr=False)
class HealthChecker:
    """Asks members whether they serve, if there is a reason to."""

    router: RequestRouter
    connections: MemberClients
    silent_seconds: float = settings.SILENCE_LIMIT_SECONDS
    """How long a worker may send nothing to a request before it is asked."""
    gone_seconds: float = settings.GONE_LIMIT_SECONDS
    """How long a request may hear nothing from a member that discovery lost."""

    def __post_init__(self) -> None:
        self._asking: dict[object, asyncio.Task[None]] = {}

    async def run_checks(self) -> None:
        """Check all members at intervals until cancelled."""
        try:
            while True:
                self._check_members(time.monotonic())
                await asyncio.sleep(settings.HEALTH_TICK_SECONDS)
        finally:
            asking = list(self._asking.values())
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    def _check_members(self, now: float) -> None:
        for url, record in self.router.balancer.records.items():
            if record.present and now >= record.probe_at and self._wants_probe(record, now):
                self._start_check(url, partial(self._probe_member, record))
        self._check_passed_over(now)
        suspects: dict[str, list[AttemptLease]] = {}
        for lease in self.router.leases:
            url, silent = lease.member.url, now - lease.heard_at
            known = self.router.balancer.records.get(url)
            present = known is not None and known.present
            if known and present and known.info is None and now >= known.info_at:
                self._start_check(("info", url), partial(self._ask_info, known))
            if not present and silent >= self.gone_seconds:
                lease.cut_off("its replica is gone")
            elif silent >= self.silent_seconds and not lease.cut:
                suspects.setdefault(url, []).append(lease)
        for url, leases in suspects.items():
            self._start_check(("silent", url), partial(self._ask_silent, url, leases))

    def _check_passed_over(self, now: float) -> None:
        """Ask members without which requests did, because of their weights: else they would stay idle as long as others serve."""
        before = now - settings.PASSED_OVER_SECONDS
        due = [
            record
            for record in self.router.balancer.records.values()
            if record.passed_over and record.is_usable(now) and record.probe_at <= before
        ]
        few = heapq.nsmallest(settings.PASSED_OVER_PER_TICK, due, key=lambda each: each.probe_at)
        for record in few:
            self._start_check(record.member.url, partial(self._probe_member, record))

    def _wants_probe(self, record: MemberRecord, now: float) -> bool:
        if record.exclusion_reason(now):
            return record.excluded_until is None
        return any(not bounds.admits(record.active) for bounds in self.router.waiting_bounds)

    def _start_check(self, what: object, ask: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if what in self._asking:
            return
        task = asyncio.create_task(ask())
        self._asking[what] = task
        task.add_done_callback(lambda _: self._asking.pop(what, None))

    async def _probe_member(self, record: MemberRecord) -> None:
        url = record.member.url
        why = await self._not_serving_reason(url)
        now = time.monotonic()
        if self.router.balancer.records.get(url) is not record:
            return
        if why:
            pause = probe_pause_after(record.failures) * random.uniform(0.7, 1.0)
            record.exclude_until(why, now + pause)
            return
        record.active, record.passed_over = await self._get_weights(url), False
        if record.exclusion_reason(now):
            name = record.member.name
            logger.info("%s serves again", name, extra={"replica": name})
        record.admit_again()
        record.probe_at = now + settings.WEIGHTS_PROBE_SECONDS
        self.router.notify_waiting()

    async def _not_serving_reason(self, url: str) -> str:
        """Return why a member does not serve; empty if it does."""
        try:
            answer = await self._get_path(url, "/ready")
        except httpx.HTTPError as error:
            return describe_error(error)
        if answer.status_code == 200:
            return ""
        try:
            return str(answer.json()["detail"])[:200]
        except (ValueError, KeyError, TypeError):
            return f"GET /ready: {answer.status_code}"

    async def _get_weights(self, url: str) -> WeightsId | None:
        try:
            answer = await self._get_path(url, "/v1/weights")
            state = WeightsState.model_validate_json(answer.content, extra="ignore")
        except (httpx.HTTPError, ValidationError):
            return None
        return None if state.active is None else state.active.identity

    async def _ask_info(self, record: MemberRecord) -> None:
        """Ask a worker to describe itself; an older one lacks fields that this client needs."""
        asked_at = time.monotonic()
        try:
            answer = await self._get_path(record.member.url, "/v1/info")
            info = WorkerInfo.model_validate_json(answer.content, extra="ignore")
        except (httpx.HTTPError, ValidationError):
            record.info_at = time.monotonic() + settings.MAX_PROBE_SECONDS
            return
        if record.info_at <= asked_at:
            record.info = info

    async def _ask_silent(self, url: str, leases: Sequence[AttemptLease]) -> None:
        """Ask a member once whether it is alive, for all attempts that heard nothing from it."""
        try:
            answer = await self._get_path(url, "/health")
            alive = answer.status_code == 200
            why = f"GET /health: {answer.status_code}"
        except httpx.HTTPError as error:
            alive, why = False, describe_error(error)
        for lease in leases:
            if alive:
                lease.note_heard()
            elif time.monotonic() - lease.heard_at >= self.silent_seconds:
                lease.cut_off(f"silent for {self.silent_seconds:g} s, and then {why}")

    async def _get_path(self, url: str, path: str) -> httpx.Response:
        with self.connections.client_for(url) as client:
            return await client.get(path, timeout=settings.PROBE_TIMEOUT_SECONDS)
