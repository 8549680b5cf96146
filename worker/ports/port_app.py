"""What all HTTP ports share: applications with bounded bodies that answer every error as a problem, and their guards."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from rollout_common import tracing
from rollout_common.wire import Problem
from rollout_common.wire.problems import MEDIA_TYPE, ProblemError, invalid_request_problem
from rollout_worker.engine import EngineCrashed, EngineError
from rollout_worker.openai.openai_errors import OPENAI_PATH, error_response
from rollout_worker.ports.callers.auth import AccessRight, Authorizer
from rollout_worker.requests.http_requests import BodyLimits, BodyReader, BodyRoute
from rollout_worker.settings_checks import is_loopback

RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": Problem, "description": "A problem (RFC 9457); its detail says what to do."},
    "5XX": {
        "model": Problem,
        "description": "A problem (RFC 9457); if there is a Retry-After header, retry after it.",
    },
}


def new_app(
    title: str,
    description: str,
    *,
    limits: Callable[[], BodyLimits],
    refused: Callable[[str], None] | None = None,
) -> FastAPI:
    """A FastAPI application without docs pages, whose errors are problems; see `BodyReader` for the last two."""
    app = FastAPI(
        title=title,
        description=description,
        version="v1",
        docs_url=None,
        redoc_url=None,
        responses=RESPONSES,
        # Newer releases send spans of their own, also for each GET; those that know no such argument keep it aside.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    for kind in (ProblemError, RequestValidationError, HTTPException, EngineError, Exception):
        app.add_exception_handler(kind, _answer_error)
    if tracing.started:
        from .request_tracing import TraceRequests  # it imports OpenTelemetry

        app.add_middleware(TraceRequests)
    app.state.bodies = BodyReader(limits, refused=refused)
    app.router.route_class = BodyRoute
    return app


def problem_response(error: ProblemError, scope: Scope) -> Response:
    """The response for an error of a request: a problem, or OpenAI's format where its clients ask."""
    if OPENAI_PATH.fullmatch(scope["path"]):
        answer = error_response(error, scope["path"])
    else:
        said, status = error.problem.model_dump_json(), error.problem.status
        answer = Response(said, status, media_type=MEDIA_TYPE)
    answer.headers.update(error.headers)
    if error.problem.status == 401:
        answer.headers["WWW-Authenticate"] = "Bearer"
    return answer


class PortGuard:
    """Checks each request before anything of its body is read, and answers a refusal as a problem."""

    def __init__(self, app: ASGIApp, check: Callable[[Scope, Headers], Awaitable[None]]) -> None:
        """`check` raises a ProblemError to refuse."""
        self._app = app
        self._check = check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it."""
        if scope["type"] == "http":
            try:
                await self._check(scope, Headers(scope=scope))
            except ProblemError as error:
                await problem_response(error, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def note_caller(
    authorizer: Authorizer, right: AccessRight, scope: Scope, headers: Headers
) -> None:
    """Authenticate and authorize a request; `request.state.caller` is the caller's name from then on.

    Raises:
        ProblemError: 401, 403 or 503.
    """
    address = (scope.get("client") or ("",))[0]
    caller = await authorizer.check_caller(headers.get("authorization"), right, address)
    scope.setdefault("state", {})["caller"] = caller


async def refuse_browser(scope: Scope, headers: Headers) -> None:
    """Refuse what a web page on this machine could have sent to a control port without authentication.

    A page may send requests to loopback, but not JSON as such to another origin, and not without an
    origin. The port has to be called by its address, for a page's host name may resolve to it.

    Raises:
        ProblemError: 403 or 415.
    """
    host = headers.get("host", "")
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if not is_loopback(name):
        raise ProblemError(
            "forbidden",
            f"Host {host[:80]!r} is not this machine: with --auth none, call 127.0.0.1 or localhost",
        )
    origin = headers.get("origin")
    if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
        raise ProblemError(
            "forbidden", f"Origin {origin[:80]!r} is a web page: use --auth token to let one in"
        )
    kind = headers.get("content-type")
    # `curl -X POST` and most clients send a call without a body so. A page's call has an Origin.
    empty = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
    media_type = (kind or "").partition(";")[0].strip().lower()
    if (
        scope["method"] == "POST"
        and media_type != "application/json"
        and not (kind is None and empty)
    ):
        raise ProblemError(
            "not-json",
            "with --auth none every body says that it is JSON: send Content-Type: application/json"
            " (curl --json '{}')",
        )


async def _answer_error(request: Request, error: Exception) -> Response:
    answer = problem_response(_problem_of(error, request), request.scope)
    if isinstance(error, HTTPException) and "Allow" in (error.headers or {}):
        answer.headers["Allow"] = (error.headers or {})["Allow"]
    return answer


def _problem_of(error: Exception, request: Request) -> ProblemError:
    """Return an error that no route handles as the problem that its caller is told."""
    match error:
        case ProblemError():
            return error
        case RequestValidationError():
            return invalid_request_problem(error.errors())
        case HTTPException():
            return _problem_of_http(error, request)
        case EngineCrashed():  # the supervisor replaces it
            why = f"the engine died and is being restarted: {error}"
            return ProblemError("failed", why, retry_after=5)
        case EngineError():
            return ProblemError("engine-refused", str(error), retry_after=5)
    # Starlette logs the traceback; the caller does not get to see it.
    detail = "internal error: the traceback is in the worker's log"
    return ProblemError("internal-error", detail)


def _problem_of_http(error: HTTPException, request: Request) -> ProblemError:
    path = request.url.path
    if error.status_code == 404:
        return ProblemError("not-found", f"no route {path}: /openapi.json lists all routes")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        detail = f"{path} does not allow {request.method}: use {allowed}"
        return ProblemError("method-not-allowed", detail)
    return ProblemError("http-error", str(error.detail), status=error.status_code)
