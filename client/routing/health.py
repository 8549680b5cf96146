"""Watches over members by asking them: those that are out, those too old, those that went silent.

Only members that gave cause are asked. `GET /ready` decides whether one serves, `GET /v1/weights`
what it serves, and `GET /health` whether a silent one lives.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import httpx
from pydantic import ValidationError

from rollout_worker.schemas import WeightsId, WeightsState

from .balancer import Seat
from .connections import Connections
from .router import Lease, Router

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.1
PROBE_SECONDS = 5.0
FIRST_PAUSE = 0.2
LONGEST_PAUSE = 3.0
AGE_PAUSE = 0.5
"""Between two looks at the weights of a member that somebody finds too old."""

SILENT_SECONDS = 20.0
GONE_SECONDS = 10.0
"""What an attempt on a member that discovery lost gets to end: a dead node sends no reset."""


class Health:
    """See the module. `run` it beside the requests."""

    def __init__(
        self,
        router: Router,
        connections: Connections,
        *,
        silent_seconds: float = SILENT_SECONDS,
        gone_seconds: float = GONE_SECONDS,
    ) -> None:
        self._router = router
        self._connections = connections
        self._silent = silent_seconds
        self._gone = gone_seconds
        self._asking: dict[object, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Look around until cancelled."""
        try:
            while True:
                self._look(time.monotonic())
                await asyncio.sleep(TICK_SECONDS)
        finally:
            for task in self._asking.values():
                task.cancel()

    def _look(self, now: float) -> None:
        for url, seat in self._router.balancer.seats.items():
            if seat.present and now >= seat.probe_at and self._wants_probe(seat):
                self._start(url, partial(self._probe, seat))
        suspects: dict[str, list[Lease]] = {}
        for lease in self._router.leases:
            silent = now - lease.heard_at
            if silent < min(self._silent, self._gone):
                continue
            lost = self._router.balancer.seats.get(lease.member.url)
            if (lost is None or not lost.present) and silent >= self._gone:
                lease.cut_off("its replica is gone")
            elif silent >= self._silent:
                suspects.setdefault(lease.member.url, []).append(lease)
        for url, leases in suspects.items():
            self._start(("silent", url), partial(self._ask_silent, url, leases))

    def _wants_probe(self, seat: Seat) -> bool:
        if seat.out:
            return seat.out_until is None
        return any(not bounds.admits(seat.active) for bounds in self._router.waiting_for)

    def _start(self, what: object, ask: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if what in self._asking:
            return
        task = asyncio.create_task(ask())
        self._asking[what] = task
        task.add_done_callback(lambda _: self._asking.pop(what, None))

    async def _probe(self, seat: Seat) -> None:
        balancer, url = self._router.balancer, seat.member.url
        why = await self._why_not(url)
        now = time.monotonic()
        if balancer.seats.get(url) is not seat:
            return
        seat.active = await self._weights(url) if not why else seat.active
        if why:
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(seat.failures, 10))
            seat.probe_at = now + pause * random.uniform(0.7, 1.0)
            seat.failures += 1
            seat.out = why
            return
        if seat.out:
            logger.info("%s serves again", seat.member.name, extra={"replica": seat.member.name})
        balancer.bring_back(url)
        seat.probe_at = now + AGE_PAUSE
        self._router.changed()

    async def _why_not(self, url: str) -> str:
        """Why a member does not serve; empty if it does."""
        try:
            answer = await self._get(url, "/ready")
        except httpx.HTTPError as error:
            return f"{type(error).__name__}: {error}".rstrip(": ")
        if answer.status_code == 200:
            return ""
        try:
            return str(answer.json()["detail"])[:200]
        except (ValueError, KeyError, TypeError):
            return f"GET /ready: {answer.status_code}"

    async def _weights(self, url: str) -> WeightsId | None:
        try:
            answer = await self._get(url, "/v1/weights")
            state = WeightsState.model_validate_json(answer.content, extra="ignore")
        except (httpx.HTTPError, ValidationError):
            return None
        return None if state.active is None else state.active.identity

    async def _ask_silent(self, url: str, leases: Sequence[Lease]) -> None:
        """Ask once whether a member lives on which all of these heard nothing."""
        try:
            answer = await self._get(url, "/health")
            alive = answer.status_code == 200
            why = f"GET /health: {answer.status_code}"
        except httpx.HTTPError as error:
            alive, why = False, f"{type(error).__name__}: {error}".rstrip(": ")
        for lease in leases:
            if alive:
                lease.heard()
            elif time.monotonic() - lease.heard_at >= self._silent:
                lease.cut_off(f"silent for {self._silent:g} s, and then {why}")

    async def _get(self, url: str, path: str) -> httpx.Response:
        with self._connections.to(url) as client:
            return await client.get(path, timeout=PROBE_SECONDS)
