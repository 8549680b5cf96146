"""A program: the control ports of pods that have no process, all answered by one HTTP server.

    python -m tests.support.cluster.processless [--port 8001]

kwok runs pods as objects only, and the operator trusts only the answers of workers. To let hundreds of pools become
Ready, the address that a request was sent to identifies the pod, and each pod has a `SimWorker`. There are no engines:
models load, stage and commit at once. `GET /counts` on 127.0.0.1 shows the calls of each route, `GET /committed` the
versions that were ever committed, `POST /push?epoch=1&version=2&nth=2` gives every second pod the bytes that a trainer
would have pushed, and `POST /restart?address=10.1.128.1` restarts the process of one pod.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import uuid
from collections import Counter

from aiohttp import web
from pydantic import ValidationError

from rollout_worker.schemas import Problem, WeightsId
from tests.support.unit.simanswers import answer_call
from tests.support.unit.simworker import SimWorker

BACKLOG = 1024


class Server:
    """The routes of all pods."""

    def __init__(self) -> None:
        self.pods: dict[str, SimWorker] = {}
        """By address."""
        self._states: dict[str, bytes] = {}
        """By address: the answer to `GET /v1/state`, until something changes."""
        self._counts: Counter[str] = Counter()
        self._committed: set[tuple[int, int]] = set()

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/state", self._state)
        app.router.add_post("/v1/{verb}", self._call)
        app.router.add_post("/v1/weights/{verb}", self._call)
        app.router.add_get("/counts", self._show_counts)
        app.router.add_get("/committed", self._show_committed)
        app.router.add_post("/push", self._push)
        app.router.add_post("/restart", self._restart)
        return app

    def _pod(self, request: web.Request) -> tuple[str, SimWorker]:
        self._counts[request.path] += 1
        assert request.transport is not None, "a request that is handled has a connection"
        address: str = request.transport.get_extra_info("sockname")[0]
        if address not in self.pods:
            # Its weights come back with the rest, so that one call wakes it.
            made = SimWorker(boot=uuid.uuid4().hex, loading=False, wakes_empty=False)
            self.pods[address] = made
        return address, self.pods[address]

    async def _state(self, request: web.Request) -> web.Response:
        address, worker = self._pod(request)
        if address not in self._states:
            self._states[address] = worker.state().model_dump_json().encode()
        return _json(200, self._states[address])

    async def _call(self, request: web.Request) -> web.Response:
        address, worker = self._pod(request)
        verb = request.match_info["verb"]
        try:
            status, body = answer_call(worker, verb, await request.read())
        except ValidationError as error:
            return problem(422, "invalid-request", str(error))
        self._states.pop(address, None)
        if verb == "commit" and status == 200:
            self._committed.add(worker.active.as_tuple())
        return _json(status, body)

    async def _show_counts(self, _: web.Request) -> web.Response:
        return web.json_response({"pods": len(self.pods), **self._counts})

    async def _show_committed(self, _: web.Request) -> web.Response:
        return web.json_response(sorted(self._committed))

    async def _restart(self, request: web.Request) -> web.Response:
        for known in (self.pods, self._states):
            known.pop(request.query["address"], None)
        return web.json_response({})

    async def _push(self, request: web.Request) -> web.Response:
        epoch, version, nth = (int(request.query[name]) for name in ("epoch", "version", "nth"))
        for worker in list(self.pods.values())[::nth]:
            worker.push(WeightsId(epoch=epoch, version=version))
        self._states.clear()
        return web.json_response({})


def _json(status: int, body: bytes) -> web.Response:
    return web.Response(status=status, body=body, content_type="application/json")


def problem(status: int, slug: str, detail: str) -> web.Response:
    told = Problem(type=f"urn:rollout:problem:{slug}", title=slug, status=status, detail=detail)
    return _json(status, told.model_dump_json().encode())


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
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=int, default=8001, help="default: %(default)s")
    asyncio.run(serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
