"""What both ports share: applications that answer every error as a problem, and bounded bodies."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout_worker.schemas import Problem
from rollout_worker.wire.problems import MEDIA_TYPE, ProblemError, too_large
from rollout_worker.wire.validation import invalid_request

logger = logging.getLogger(__name__)

MIB = 2**20

RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": Problem, "description": "A problem (RFC 9457); its detail says what to do."},
    "5XX": {
        "model": Problem,
        "description": "A problem (RFC 9457); if there is a Retry-After header, retry after it.",
    },
}


def new_app(title: str, description: str, *, max_body_bytes: int) -> FastAPI:
    """A FastAPI application without docs pages, whose errors are problems."""
    app = FastAPI(
        title=title,
        description=description,
        version="v1",
        docs_url=None,
        redoc_url=None,
        responses=RESPONSES,
    )
    app.add_exception_handler(ProblemError, _on_problem)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_defect)
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    app.add_middleware(JsonBody)
    return app


def problem_response(error: ProblemError) -> Response:
    """The response for an error."""
    headers = error.headers
    if error.problem.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(
        error.problem.model_dump_json(),
        status_code=error.problem.status,
        media_type=MEDIA_TYPE,
        headers=headers,
    )


async def _on_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, ProblemError)
    return problem_response(error)


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return problem_response(invalid_request(error.errors()))


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        found = ProblemError(
            "not-found", f"no route {request.url.path}: /openapi.json lists all routes"
        )
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        detail = f"{request.url.path} does not allow {request.method}: use {allowed}"
        found = ProblemError("method-not-allowed", detail)
    elif error.status_code == 413:
        found = too_large()
    elif error.status_code == 400:
        found = ProblemError(
            "invalid-request",
            "body: not valid UTF-8 JSON, or nested too deeply, or a number too long",
        )
    else:
        found = ProblemError("http-error", str(error.detail), status=error.status_code)
    answer = problem_response(found)
    if "Allow" in (error.headers or {}):
        answer.headers["Allow"] = (error.headers or {})["Allow"]
    return answer


async def _on_defect(request: Request, error: Exception) -> Response:
    # Starlette logs the traceback; the caller does not get to see it.
    return problem_response(
        ProblemError("internal-error", "internal error: the traceback is in the worker's log")
    )


class JsonBody:
    """Treats every body as JSON: `curl -d` and `kubectl create --raw` don't declare it as such."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with a content type that FastAPI parses."""
        if scope["type"] == "http" and scope["method"] == "POST":
            kept = [(k, v) for k, v in scope["headers"] if k != b"content-type"]
            scope = {**scope, "headers": [*kept, (b"content-type", b"application/json")]}
        await self._app(scope, receive, send)


class BodyLimit:
    """Refuses bodies above `max_bytes`, whether or not they declare their length."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, counting its bytes."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._max_bytes:
            await problem_response(too_large())(scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_bytes:
                # The only exception that FastAPI lets through while it reads a body.
                raise HTTPException(413)
            return message

        await self._app(scope, counted, send)
