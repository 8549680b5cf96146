"""A worker's control port without a worker: it keeps the staging slot and does what a test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import torch
from aiohttp import web

from rollout_client.discovery.pool_members import Member
from rollout_client.settings import STATE_TIMEOUT_SECONDS
from rollout_client.steering.pushing.options import PushPlan
from rollout_client.steering.pushing.push import Push
from rollout_client.steering.pushing.pusher import Pusher
from rollout_client.steering.steering_protocol import Published
from rollout_common.wire.root_hash import HashedTensor, root_hash_of
from tests.support.loopback import Loopback, loopback
from tests.support.unit.digests import tensor_digest
from tests.support.unit.receiver import Receiver


class ScriptedControl:
    """Stages at once unless told otherwise, commits what is staged, holds what it is told to."""

    def __init__(self, server: Loopback, name: str) -> None:
        self.server = server
        self.member = Member(f"http://{name}:8000", name, server.url)
        self.active = (0, 0)
        self.slot: dict[str, Any] | None = None
        self.phase, self.root_hash = "Staged", "h"
        self.error: str | None = None
        self.resident = True
        self.empty = False
        """Its weights woke without values."""
        self.wakes_empty = True
        self.serving = True
        self.holds: list[str] = []
        self.holds_of_others: list[str] = []
        self.fence_epoch = 0
        self.required: dict[str, int] | None = None
        self.refuse: dict[str, tuple[int, str]] = {}
        """By verb: status and slug of the refusal."""
        self.busy: dict[str, list[tuple[int, str]]] = {}
        """The same, of the next calls only."""
        self.slow: dict[str, int] = {}
        """By verb: how many of the next calls get no answer while somebody waits for one."""
        self.waits: dict[str, Callable[[dict[str, Any]], Awaitable[object]]] = {}
        """By verb: what is awaited, with the body, before a call takes effect."""
        self.transfer: Callable[[], dict[str, Any]] | None = None
        """Set: how pushed bytes are taken; `phase` says then what `state` tells of them."""
        self.dtypes: dict[str, str] = {}
        """Of the model's checkpoint, by name of the tensor."""
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        for method, path in (
            ("GET", "state"),
            ("GET", "weights/dtypes"),
            *(("POST", f"weights/{verb}") for verb in ("stage", "commit", "discard", "offer")),
            *(("POST", verb) for verb in ("require", "pause", "resume", "sleep", "wake")),
        ):
            server.answers[method, f"/v1/{path}"] = self._answer

    @property
    def verbs(self) -> list[str]:
        """What was asked, beside the state."""
        return [verb for verb, _ in self.bodies if verb not in ("state", "dtypes")]

    def body(self, verb: str) -> dict[str, Any]:
        """Return the body of the last call of a verb."""
        return [body for each, body in self.bodies if each == verb][-1]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        verb = request.path.rpartition("/")[2]
        text = await request.text()
        self.bodies.append((verb, json.loads(text) if text else {}))
        if self.slow.get(verb):
            self.slow[verb] -= 1
            await asyncio.sleep(STATE_TIMEOUT_SECONDS + 0.5)
        if verb in self.waits:
            await self.waits[verb](self.bodies[-1][1])
        busy = self.busy.get(verb)
        if busy or verb in self.refuse:
            status, slug = busy.pop(0) if busy else self.refuse[verb]
            if not slug:
                return web.Response(status=status, text="the gateway's own page")
            problem = {"type": f"urn:rollout:problem:{slug}", "detail": f"no {verb}: {slug}"}
            return web.json_response({**problem, "title": "t", "status": status}, status=status)
        handler = getattr(self, f"_{verb}", self._state)
        return web.json_response(handler(self.bodies[-1][1]))

    def _weights(self) -> dict[str, Any]:
        epoch, version = self.active
        known = {"epoch": epoch, "version": version, "root_hash": "active"}
        active = None if self.empty else known
        slot = None
        if self.slot is not None:
            told = {"phase": self.phase, "root_hash": self.root_hash, "error": self.error}
            slot = {**self.slot, **told}
        fence = {"required": self.required, "fence_epoch": self.fence_epoch}
        return {"active": active, "staged": slot, "commit_seq": 1, **fence}

    def _state(self, body: dict[str, Any]) -> dict[str, Any]:
        return {
            "boot_id": "b",
            "engine": "hf",
            "lifecycle": "Active" if self.resident else "Asleep",
            "serving": self.serving,
            "weights": self._weights(),
            "resident": {"weights": self.resident, "kv_cache": self.resident},
            "holds": [
                *({"holder": "me", "state": state} for state in self.holds),
                *({"holder": "another", "state": state} for state in self.holds_of_others),
            ],
            "caller": "me",
            "wakes_empty": self.wakes_empty,
        }

    def _stage(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.active == (body["epoch"], body["version"]):
            known = self._weights()["active"] or {}
            return {**known, "source": body["source"], "phase": "Staged"}
        self.slot = {name: body[name] for name in ("epoch", "version", "source")}
        if "pushed" in body["source"]:
            self.slot["source"] = {"pushed": {}}
        transfer = {} if self.transfer is None else {"transfer": self.transfer()}
        return {**self.slot, "phase": "Staging", **transfer}

    def _dtypes(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"dtypes": self.dtypes}

    def _offer(self, body: dict[str, Any]) -> dict[str, Any]:
        about = {"layout_id": "xxh3_128:0", "bytes": 256, "root_hash": self.root_hash}
        return {"ticket": "f" * 32, "port": 8002, **about}

    def _discard(self, body: dict[str, Any]) -> dict[str, Any]:
        self.slot = None
        return {"outcome": "discarded"}

    def _commit(self, body: dict[str, Any]) -> dict[str, Any]:
        self.active = (body["epoch"], body["version"])
        self.slot, self.empty = None, False
        done = {"commit_seq": 2, "pause_seconds": 0.5, "finished": 0, "aborted": 0, "kept": 0}
        return {"active": self._weights()["active"], "previous": None, **done}

    def _require(self, body: dict[str, Any]) -> dict[str, Any]:
        self.fence_epoch = body["epoch"]
        return self._weights()

    def _sleep(self, body: dict[str, Any]) -> dict[str, Any]:
        self.holds, self.resident = ["Asleep"], False
        return self._state(body)

    def _pause(self, body: dict[str, Any]) -> dict[str, Any]:
        self.holds = ["Paused"]
        return self._state(body)

    def _resume(self, body: dict[str, Any]) -> dict[str, Any]:
        self.holds = []
        return self._state(body)

    def _wake(self, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("load", True):
            self.holds, self.empty = [], False
        else:
            self.empty = not self.resident
        self.resident = True
        return self._state(body)


PUSHED = {"a": torch.arange(7.0)}
PUSHED_HASH = root_hash_of(
    {"a": HashedTensor("F32", (7,), tensor_digest(PUSHED["a"].numpy().tobytes()))}
)


@asynccontextmanager
async def pushing(
    controls: Sequence[ScriptedControl], publish: Callable[[Push], Awaitable[Published]]
) -> AsyncIterator[tuple[list[Receiver], asyncio.Future[Published]]]:
    """Publish `PUSHED` to these; yield what each received, and the publish under way, all of it filled."""
    receivers = [Receiver(each.member.name) for each in controls]
    for control, receiver in zip(controls, receivers, strict=True):
        control.transfer, control.phase = receiver.transfer, "Staging"
    pusher = Pusher()
    push = pusher.begin(PUSHED, PushPlan())
    sending = asyncio.ensure_future(publish(push))
    await push.fill()
    try:
        yield receivers, sending
    finally:
        push.close()
        pusher.close()
        for each in receivers:
            each.close()


@asynccontextmanager
async def scripted_controls(count: int) -> AsyncIterator[list[ScriptedControl]]:
    """Yield so many control ports, called w0, w1, …"""
    async with AsyncExitStack() as stack:
        yield [
            ScriptedControl(await stack.enter_async_context(loopback()), f"w{index}")
            for index in range(count)
        ]
