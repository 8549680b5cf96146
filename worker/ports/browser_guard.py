"""What a control port without authentication demands, so that no web page on this machine can use it.

A page may send requests to loopback, but not what a page can't: JSON as such to another origin, without
an origin, and to the address itself, not to a name that somebody else resolves to it.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from rollout_common.wire.problems import ProblemError
from rollout_worker.settings import is_loopback

from .port_app import problem_response


class BrowserGuard:
    """Refuses what a browser could have sent for a page from elsewhere."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 403 or 415."""
        if scope["type"] == "http":
            refusal = _browser_refusal(scope["method"], Headers(scope=scope))
            if refusal is not None:
                await problem_response(refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _browser_refusal(method: str, headers: Headers) -> ProblemError | None:
    host = headers.get("host", "")
    if not is_loopback(_host_name(host)):
        return ProblemError(
            "forbidden",
            f"Host {host[:80]!r} is not this machine: with --auth none, call 127.0.0.1 or localhost",
        )
    origin = headers.get("origin")
    if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
        return ProblemError(
            "forbidden",
            f"Origin {origin[:80]!r} is a web page: use --auth token to let one in",
        )
    kind = headers.get("content-type")
    nothing = kind is None and _has_no_body(headers)  # whose Origin no page can leave out
    if method == "POST" and not nothing and _media_type(kind or "") != "application/json":
        return ProblemError(
            "not-json",
            "with --auth none every body says that it is JSON: send Content-Type: application/json"
            " (curl --json '{}')",
        )
    return None


def _has_no_body(headers: Headers) -> bool:
    """Whether no body follows, as `curl -X POST` and most clients without one have it."""
    return headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers


def _media_type(kind: str) -> str:
    """`application/json; charset=utf-8` → `application/json`."""
    return kind.partition(";")[0].strip().lower()


def _host_name(host: str) -> str:
    """`[::1]:8001` → `::1`."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
