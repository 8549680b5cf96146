"""A colocated pool of one worker behind an API server: both played, the locks are real."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from rollout_common.turn import Turn
from tests.support.loopback import Loopback, loopback

PODS = "/api/v1/namespaces/default/pods"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"
_POOLS = "/apis/rollout.dev/v1alpha1/namespaces/default/rolloutreplicas"
_ENDPOINTS = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
GPUS = ("gpu.example.com/node-1/gpu-9", "gpu.example.com/node-1/gpu-10")
"""What the worker shares with the trainer, in natural order."""


class PlayedPool:
    """The RolloutReplica `math`, its operator and its worker, which has the turn while it is awake."""

    def __init__(self, server: Loopback, directory: Path) -> None:
        self.server = server
        self.directory = directory
        self.worker = Turn(directory, GPUS, "math-0-0")
        self.worker.take(10)
        self.deaf: set[str] = set()
        """States that the operator does not hear of."""
        self.refuses: int | None = None
        """Status that the API server answers to each change, if it refuses them."""
        self.away = False
        """Whether the API server answers nothing but 503."""
        self.asked: list[str] = []
        """States that were asked for, in order."""
        self.overruled: list[str] = []
        """States that somebody asks for right after a trainer asked for another one."""
        self.after_read: Callable[[], None] = lambda: None
        """Called once the object was shown."""
        self.reached = "Active"
        """The state that the operator tells of."""
        self.epoch = 0
        self._generation = 1
        self._task: asyncio.Task[None] | None = None
        server.answers["GET", f"{_POOLS}/math"] = self._read
        server.answers["PATCH", f"{_POOLS}/math"] = self._write
        server.answers["GET", _ENDPOINTS] = self._slices

    @property
    def state(self) -> str:
        """What spec asks for."""
        return self.asked[-1] if self.asked else "Active"

    def somebody_asks(self, state: str) -> None:
        """Change the spec as a person would."""
        self.asked.append(state)
        self._generation += 1
        self._obey()

    def _obey(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.create_task(self._move(self.state))

    async def _move(self, state: str) -> None:
        if state in self.deaf:
            return
        if state == "Asleep":
            self.worker.give()
        else:
            await self.worker.take_async()
        self.reached = state

    def _pool(self) -> dict[str, Any]:
        observed = self._generation
        ready = 1 if self.reached == self.state == "Active" else 0
        return {
            "metadata": {
                "name": "math",
                "resourceVersion": str(self._generation),
                "generation": self._generation,
                "annotations": {"rollout.dev/trainer-epoch": str(self.epoch)},
            },
            "spec": {"state": self.state, "mode": "Colocated"},
            "status": {
                "observedGeneration": observed,
                "readyReplicas": ready,
                "message": f"the worker is {self.reached}",
                "lastTransition": {"to": self.reached, "completedAt": "2026-01-01T00:00:00Z"},
            },
        }

    async def _read(self, request: web.Request) -> web.StreamResponse:
        if self.away:
            return web.json_response({"message": "overloaded"}, status=503)
        shown = self._pool()
        self.after_read()
        return web.json_response(shown)

    async def _write(self, request: web.Request) -> web.StreamResponse:
        if self.refuses is not None:
            return web.json_response({"message": "no"}, status=self.refuses)
        if self.away:
            return web.json_response({"message": "overloaded"}, status=503)
        body = await request.json()
        if body["metadata"]["resourceVersion"] != str(self._generation):
            return web.json_response({"message": "it was changed"}, status=409)
        self.somebody_asks(body["spec"]["state"])
        if self.overruled:
            self.somebody_asks(self.overruled.pop(0))
        return web.json_response(self._pool())

    async def _slices(self, request: web.Request) -> web.StreamResponse:
        if "watch" in request.query:
            await asyncio.sleep(60)
        endpoint = {"addresses": ["127.0.0.1"], "targetRef": {"name": "math-0-0"}}
        item = {"metadata": {"name": "math-1"}, "endpoints": [endpoint]}
        return web.json_response({"metadata": {"resourceVersion": "1"}, "items": [item]})

    async def end(self) -> None:
        """The worker goes."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.worker.give()


def pod(*entries: dict[str, Any], **status: Any) -> dict[str, Any]:
    """Return a pod with entries of spec.resourceClaims."""
    return {
        "metadata": {"name": "trainer-0"},
        "spec": {"resourceClaims": [*entries]},
        "status": status,
    }


def claim(*devices: str) -> dict[str, Any]:
    """Return a ResourceClaim that was given devices of `gpu.example.com` on `node-1`."""
    given = [{"driver": "gpu.example.com", "pool": "node-1", "device": each} for each in devices]
    return {"status": {"allocation": {"devices": {"results": given}}}}


@asynccontextmanager
async def played_pool(directory: Path) -> AsyncIterator[PlayedPool]:
    """Yield a pool that is awake."""
    async with loopback() as server:
        made = PlayedPool(server, directory)
        try:
            yield made
        finally:
            await made.end()
