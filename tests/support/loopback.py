"""A small HTTP server on loopback whose answers a test sets: to be cut off, slow or odd on purpose."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Loopback:
    """What came in, and what goes out."""

    url: str = ""
    requests: list[tuple[str, str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    answers: dict[tuple[str, str], Answer] = field(default_factory=dict)
    at_once: int = 0
    most_at_once: int = 0

    @property
    def address(self) -> str:
        """`host:port`."""
        return self.url.removeprefix("http://")

    def answer(self, method: str, path: str, body: Any, status: int = 200, **headers: str) -> None:
        """Answer this route with JSON (or with text, if the body is one)."""

        async def reply(request: web.Request) -> web.StreamResponse:
            if isinstance(body, str):
                return web.Response(text=body, status=status, headers=headers)
            return web.json_response(body, status=status, headers=headers)

        self.answers[method, path] = reply

    def delay(self, method: str, path: str, body: Any, seconds: float) -> None:
        """Answer this route with JSON after so many seconds."""

        async def reply(request: web.Request) -> web.StreamResponse:
            await asyncio.sleep(seconds)
            return web.json_response(body)

        self.answers[method, path] = reply

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        text = await request.text()
        self.requests.append((request.method, request.path_qs, text))
        self.headers.append(dict(request.headers))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            found = self.answers.get((request.method, request.path))
            if found is None:
                return web.Response(status=404, text="no such route")
            return await found(request)
        finally:
            self.at_once -= 1


def kubeconfig(
    folder: Path,
    url: str,
    token: str = "one",
    *,
    user: dict[str, Any] | None = None,
    cluster: dict[str, Any] | None = None,
    **more: Any,
) -> Path:
    """Write a kubeconfig for the server with a token, or another user; `cluster` and `more` are further fields."""
    path = folder / "kubeconfig"
    document = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": url, **(cluster or {})}}],
        "users": [{"name": "u", "user": user or {"token": token}}],
        **more,
    }
    path.write_text(json.dumps(document))  # JSON is YAML
    return path


@asynccontextmanager
async def loopback() -> AsyncIterator[Loopback]:
    """Yield a running server on a free port."""
    server = Loopback()
    app = web.Application(handler_args={"handler_cancellation": True})
    app.router.add_route("*", "/{path:.*}", server._handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()
