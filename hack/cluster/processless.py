#!/usr/bin/env python3
"""Control ports of pods that have no process: one HTTP server answers for all of them.

    python hack/cluster/processless.py [--port 8001]

kwok runs pods as objects only, and the operator trusts only the answers of workers. To let hundreds
of pools become Ready, this server implements the wire models of the control port: the address that a
request was sent to identifies the pod, and each pod has its own fence, holds and weights. There are no
engines: models load, stage and commit at once. `GET /counts` on 127.0.0.1 shows the calls of each route,
`GET /committed` the versions that were ever committed, `POST /push?epoch=1&version=2&nth=2` gives every second pod
the bytes that a trainer would have pushed, and `POST /restart?address=10.1.128.1` restarts the process of one pod.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import signal
import socket
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from rollout_worker.schemas import (
    ActiveWeights,
    CommitRequest,
    CommitResponse,
    DiscardRequest,
    DiscardResponse,
    Hold,
    Lifecycle,
    PauseRequest,
    Problem,
    Pushed,
    ReleaseRequest,
    RequireRequest,
    Resident,
    SleepRequest,
    StagedWeights,
    StageRequest,
    WakeRequest,
    WeightsId,
    WeightsSource,
    WeightsState,
    WorkerState,
)

CALLER = "operator"
BACKLOG = 1024
Body = TypeVar("Body", bound=BaseModel)


class Refused(Exception):
    """A 409 with the problem's slug."""

    def __init__(self, slug: str, detail: str) -> None:
        super().__init__(detail)
        self.slug = slug
        self.detail = detail


@dataclass(slots=True)
class PodState:
    """What one pod answers."""

    boot_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    hold: Hold | None = None
    generation: int | None = None
    weights: WeightsState = field(
        default_factory=lambda: WeightsState(
            active=ActiveWeights(epoch=0, version=0, root_hash="checkpoint")
        )
    )
    page: bytes | None = None
    """The answer of `/v1/state`, until something changes."""

    @property
    def serving(self) -> bool:
        return self.hold is None and self.weights.required is not None

    def state(self) -> bytes:
        if self.page is None:
            self.page = self._state().model_dump_json().encode()
        return self.page

    def _state(self) -> WorkerState:
        lifecycle = Lifecycle(self.hold.state) if self.hold else Lifecycle.ACTIVE
        awake = lifecycle is not Lifecycle.ASLEEP
        return WorkerState(
            boot_id=self.boot_id,
            engine="hf",
            lifecycle=lifecycle,
            serving=self.serving,
            weights=self.weights,
            resident=Resident(weights=awake, kv_cache=awake),
            holds=(self.hold,) if self.hold else (),
            caller=CALLER,
            generation=self.generation,
        )

    def change(self, **weights: Any) -> None:
        self.weights = self.weights.model_copy(update=weights)
        self.page = None

    def held(self, state: str | None, generation: int | None) -> None:
        self.hold = Hold(holder=CALLER, state=state) if state else None
        self.generation = generation if generation is not None else self.generation
        self.page = None


def pause(pod: PodState, body: PauseRequest) -> bytes:
    pod.held("Paused", body.generation)
    return pod.state()


def sleep(pod: PodState, body: SleepRequest) -> bytes:
    pod.held("Asleep", body.generation)
    return pod.state()


def release(pod: PodState, body: ReleaseRequest | WakeRequest) -> bytes:
    pod.held(None, body.generation)
    return pod.state()


def require(pod: PodState, body: RequireRequest) -> bytes:
    changes: dict[str, Any] = {"fence_epoch": max(pod.weights.fence_epoch, body.epoch)}
    if body.min_version is not None:
        changes["required"] = WeightsId(epoch=body.epoch, version=body.min_version)
    pod.change(**changes)
    return pod.weights.model_dump_json().encode()


def stage(pod: PodState, body: StageRequest) -> bytes:
    if body.epoch < pod.weights.fence_epoch:
        raise Refused("stale-epoch", f"epoch {body.epoch} is below {pod.weights.fence_epoch}")
    source = body.source.without_bytes.model_dump_json().encode()
    staged = StagedWeights(
        epoch=body.epoch,
        version=body.version,
        source=body.source.without_bytes,
        phase="Staged",
        root_hash=hashlib.sha256(source).hexdigest(),
        labels=body.labels,
    )
    pod.change(staged=staged)
    return staged.model_dump_json().encode()


def push(pod: PodState, epoch: int, version: int) -> None:
    """Hold a version that a trainer has pushed, as `stage` would for a checkpoint."""
    stage(pod, StageRequest(epoch=epoch, version=version, source=WeightsSource(pushed=Pushed())))


def commit(pod: PodState, body: CommitRequest) -> bytes:
    staged, wanted = pod.weights.staged, (body.epoch, body.version)
    active = pod.weights.active
    if active is None or active.identity.as_tuple() != wanted:
        if staged is None or (staged.epoch, staged.version) != wanted:
            raise Refused("not-staged", f"{wanted} is not staged: stage it first")
        fresh = ActiveWeights(**staged.model_dump(include={"epoch", "version", "root_hash"}))
        sequence = pod.weights.commit_seq + 1
        pod.change(active=fresh, previous=active, staged=None, commit_seq=sequence)
    now = pod.weights
    assert now.active is not None
    answer = CommitResponse(
        active=now.active,
        previous=now.previous,
        commit_seq=now.commit_seq,
        pause_seconds=0,
        finished=0,
        aborted=0,
        kept=0,
    )
    return answer.model_dump_json().encode()


def discard(pod: PodState, body: DiscardRequest) -> bytes:
    staged = pod.weights.staged
    found = staged is not None and (staged.epoch, staged.version) == (body.epoch, body.version)
    if found:
        pod.change(staged=None)
    return DiscardResponse(outcome="discarded" if found else "unchanged").model_dump_json().encode()


class Server:
    """The routes of all pods."""

    def __init__(self) -> None:
        self.pods: dict[str, PodState] = {}
        """By address."""
        self._counts: Counter[str] = Counter()
        self._committed: set[tuple[int, int]] = set()

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/state", self._state)
        app.router.add_get("/counts", self._show_counts)
        app.router.add_get("/committed", self._show_committed)
        app.router.add_post("/push", self._push)
        app.router.add_post("/restart", self._restart)
        self._post(app, "/v1/pause", PauseRequest, pause)
        self._post(app, "/v1/resume", ReleaseRequest, release)
        self._post(app, "/v1/sleep", SleepRequest, sleep)
        self._post(app, "/v1/wake", WakeRequest, release)
        self._post(app, "/v1/require", RequireRequest, require)
        self._post(app, "/v1/weights/stage", StageRequest, stage)
        self._post(app, "/v1/weights/commit", CommitRequest, self._commit)
        self._post(app, "/v1/weights/discard", DiscardRequest, discard)
        return app

    def _pod(self, request: web.Request) -> PodState:
        self._counts[request.path] += 1
        assert request.transport is not None, "a request that is handled has a connection"
        address: str = request.transport.get_extra_info("sockname")[0]
        return self.pods.setdefault(address, PodState())

    async def _state(self, request: web.Request) -> web.Response:
        return _json(self._pod(request).state())

    async def _show_counts(self, _: web.Request) -> web.Response:
        return web.json_response({"pods": len(self.pods), **self._counts})

    async def _show_committed(self, _: web.Request) -> web.Response:
        return web.json_response(sorted(self._committed))

    async def _restart(self, request: web.Request) -> web.Response:
        self.pods.pop(request.query["address"], None)
        return web.json_response({})

    def _commit(self, pod: PodState, body: CommitRequest) -> bytes:
        answer = commit(pod, body)
        self._committed.add((body.epoch, body.version))
        return answer

    async def _push(self, request: web.Request) -> web.Response:
        epoch, version, nth = (int(request.query[name]) for name in ("epoch", "version", "nth"))
        for pod in list(self.pods.values())[::nth]:
            push(pod, epoch, version)
        return web.json_response({})

    def _post(
        self,
        app: web.Application,
        path: str,
        model: type[Body],
        verb: Callable[[PodState, Body], bytes],
    ) -> None:
        async def handle(request: web.Request) -> web.Response:
            try:
                body = model.model_validate_json(await request.read() or b"{}")
                return _json(verb(self._pod(request), body))
            except ValidationError as error:
                return _problem(422, "invalid-request", str(error))
            except Refused as refusal:
                return _problem(409, refusal.slug, refusal.detail)

        app.router.add_post(path, handle)


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def _problem(status: int, slug: str, detail: str) -> web.Response:
    problem = Problem(type=f"urn:rollout:problem:{slug}", title=slug, status=status, detail=detail)
    return web.Response(
        body=problem.model_dump_json().encode(),
        status=status,
        content_type="application/problem+json",
    )


def listener(port: int) -> socket.socket:
    """Return a socket on every address of this machine that only this machine reaches."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")
    try:
        sock.bind(("0.0.0.0", port))
    except OSError as error:
        raise SystemExit(f"port {port} of loopback can't be used: {error}") from error
    return sock


async def serve(port: int) -> None:
    ended = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, ended.set)
    runner = web.AppRunner(Server().app(), access_log=None, keepalive_timeout=300)
    await runner.setup()
    await web.SockSite(runner, listener(port), backlog=BACKLOG).start()
    await ended.wait()
    await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--port", type=int, default=8001, help="default: %(default)s")
    asyncio.run(serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
