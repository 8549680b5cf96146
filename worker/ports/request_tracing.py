"""Spans of requests; imported if this process sends spans, which OpenTelemetry has to be installed for."""

from __future__ import annotations

from typing import Any

from opentelemetry.trace import StatusCode

from rollout_common.tracing import open_span


class TraceRequests:
    """ASGI middleware: a span for each POST that the port's guard lets in, to the last byte of its answer.

    Looks are left out: state, health, readiness and metrics are asked for all the time.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve a request within its span."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        headers = {
            key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]
        }
        attributes = {"http.request.method": "POST", "url.path": scope["path"]}

        with open_span("POST", "server", parent=headers, attributes=attributes) as span:

            async def note_status(message: Any) -> None:
                if span is not None and message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    # Only 5xx are failures of a server: OpenTelemetry's conventions for HTTP.
                    if message["status"] >= 500:
                        span.set_status(StatusCode.ERROR)
                await send(message)

            try:
                await self._app(scope, receive, note_status)
            finally:
                route = getattr(scope.get("route"), "path", None)
                if span is not None and route is not None:
                    # A path may name a turn or be anybody's invention; routes are few.
                    span.update_name(f"POST {route}")
                    span.set_attribute("http.route", route)
