"""`/metrics`, `/healthz` and `/readyz`, on a server of our own.

kopf's own liveness endpoint answers 200 even when a task has died. *Healthy* here means that this
process can work once the cluster lets it: a stuck event loop or a dead task makes it unhealthy, an
unreachable API server does not. *Ready* means that it works now; a standby is ready once it is up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from aiohttp import web

from rollout_common.listening_sockets import open_listening_socket

from .operator_telemetry import OperatorTelemetry
from .settings import LAG_PERIOD_SECONDS, LAG_WINDOW_SECONDS, MAX_LAG_SECONDS

logger = logging.getLogger(__name__)

LISTEN_BACKLOG = 128

HealthCheck = Callable[[], str | None]
"""Returns None, or a sentence on what is wrong."""


class LoopLag:
    """Measures how late the event loop runs its timers."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._worst: deque[tuple[float, float]] = deque()

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            before = self._clock()
            await asyncio.sleep(LAG_PERIOD_SECONDS)
            self.note_lag(self._clock() - before - LAG_PERIOD_SECONDS)

    def note_lag(self, lag: float) -> None:
        """Take one measurement."""
        now = self._clock()
        while self._worst and self._worst[-1][1] <= lag:
            self._worst.pop()
        self._worst.append((now, max(0.0, lag)))
        self._drop_old_lags(now)

    def worst_lag(self) -> float:
        """Return the worst lag of the last 30 seconds."""
        self._drop_old_lags(self._clock())
        return self._worst[0][1] if self._worst else 0.0

    def check_lag(self) -> str | None:
        """Return what is wrong if the loop was blocked."""
        worst = self.worst_lag()
        if worst > MAX_LAG_SECONDS:
            return f"the event loop was blocked for {worst:.1f} s"
        return None

    def _drop_old_lags(self, now: float) -> None:
        while self._worst and now - self._worst[0][0] > LAG_WINDOW_SECONDS:
            self._worst.popleft()


class ProbeServer:
    """The HTTP server; see the module.

    `/readyz` runs the checks `ready` in addition to those of `/healthz`; `refresh` is called before metrics are rendered.
    """

    def __init__(
        self,
        telemetry: OperatorTelemetry,
        *,
        healthy: list[HealthCheck],
        ready: list[HealthCheck],
        refresh: Callable[[], None] = lambda: None,
    ) -> None:
        self._telemetry = telemetry
        self._healthy = healthy
        self._ready = ready
        self._refresh = refresh
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port (a free one if 0 was asked for)."""
        app = web.Application()
        app.router.add_get("/metrics", self._serve_metrics)
        app.router.add_get("/healthz", self._serve_healthz)
        app.router.add_get("/readyz", self._serve_readyz)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        listener = open_listening_socket(host, port, LISTEN_BACKLOG)
        await web.SockSite(self._runner, listener).start()
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Stop listening; running requests get a moment to finish."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _serve_metrics(self, request: web.Request) -> web.Response:
        self._refresh()
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        # A thousand pools take more than half a second to render.
        page = await asyncio.to_thread(self._telemetry.render_page)
        return web.Response(body=page, headers=headers)

    async def _serve_healthz(self, request: web.Request) -> web.Response:
        return _checks_response(self._healthy)

    async def _serve_readyz(self, request: web.Request) -> web.Response:
        return _checks_response([*self._healthy, *self._ready])


def _checks_response(checks: list[HealthCheck]) -> web.Response:
    wrong = [text for check in checks if (text := check()) is not None]
    if wrong:
        return web.Response(status=503, text="\n".join(wrong) + "\n")
    return web.Response(text="ok\n")
