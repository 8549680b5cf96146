"""A server whose collections can be listed and watched, as the API server's."""

from __future__ import annotations

import asyncio
import json

from aiohttp import web

from rollout_operator.api.objects import Obj
from tests.support.loopback import Loopback


class WatchedServer:
    """Collections that a server lists, empty ones to begin with, and the events that it sends to watches."""

    def __init__(self, server: Loopback, *paths: str) -> None:
        self.items: dict[str, list[Obj]] = {path: [] for path in paths}
        self.events: dict[str, asyncio.Queue[str | None]] = {p: asyncio.Queue() for p in self.items}
        """Lines of the stream; None ends it."""
        self.lists = 0
        """Each is ten versions after the one before."""
        self.watches: list[dict[str, str]] = []
        self._server = server
        for path in self.items:
            server.answers["GET", path] = self._answer

    def add_path(self, path: str) -> None:
        self.items[path], self.events[path] = [], asyncio.Queue()
        self._server.answers["GET", path] = self._answer

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            self.lists += 1
            meta = {"resourceVersion": str(10 * self.lists)}
            return web.json_response({"metadata": meta, "items": self.items[request.path]})
        self.watches.append({"path": request.path, **request.query})
        stream = web.StreamResponse()
        await stream.prepare(request)
        while (line := await self.events[request.path].get()) is not None:
            await stream.write(line.encode())
        return stream

    def send(self, path: str, kind: str, found: Obj) -> None:
        """Send an event, in two pieces, as networks do."""
        line = json.dumps({"type": kind, "object": found}) + "\n"
        self.events[path].put_nowait(line[:9])
        self.events[path].put_nowait(line[9:])

    def end(self, path: str) -> None:
        """End the stream of whoever watches."""
        self.events[path].put_nowait(None)
