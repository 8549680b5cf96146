"""What both ports share: applications whose every error is a problem, and bounded bodies."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .problems import MEDIA_TYPE, ProblemError
from .schemas import Problem

logger = logging.getLogger(__name__)

MIB = 2**20

MAX_ERRORS = 16

RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": Problem, "description": "A problem (RFC 9457); the detail says what to do."},
    "5XX": {"model": Problem, "description": "A problem (RFC 9457); retry after Retry-After."},
}


def new_app(title: str, description: str, *, max_body_bytes: int) -> FastAPI:
    """An application without pages of its own, whose errors are problems."""
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
    """The answer that an error becomes."""
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


def invalid_request(said_of: Sequence[Mapping[str, Any]]) -> ProblemError:
    """The problem of what pydantic says of a body or a header."""
    found = [(_location(each), each) for each in said_of]
    # A list that lost its bad items is too short as well: the item is what to mend.
    inner = [(loc, each) for loc, each in found if not any(_below(o, loc) for o, _ in found)]
    errors = [
        {"field": field_path(loc), "message": _message(each)} for loc, each in inner[:MAX_ERRORS]
    ]
    said = "; ".join(f"{each['field'] or 'body'}: {each['message']}" for each in errors)
    return ProblemError("invalid-request", said, errors=errors)


def _location(error: Mapping[str, Any]) -> tuple[int | str, ...]:
    # Of what is no JSON the location is a character's.
    return () if error["type"] == "json_invalid" else tuple(error["loc"])


def _below(location: tuple[int | str, ...], other: tuple[int | str, ...]) -> bool:
    return len(location) > len(other) and location[: len(other)] == other


def _message(error: Mapping[str, Any]) -> str:
    """What is wrong, in the words of JSON."""
    context = error.get("ctx", {})
    match error["type"]:
        case "json_invalid":
            return f"not JSON at character {error['loc'][-1]}: {context['error']}"
        case "tuple_type":
            return "must be a list"
        case "dict_type" | "model_type" | "model_attributes_type" | "mapping_type":
            return "must be an object"
        case "extra_forbidden":
            return "unknown field: correct its name or leave it out; /openapi.json lists all"
        case "too_short":
            return f"needs at least {context['min_length']} item(s)"
        case "value_error":
            return str(context["error"])
    return str(error["msg"])


def field_path(location: Sequence[int | str]) -> str:
    """`('body', 'sampling', 'top_p')` → `sampling.top_p`, as the client wrote it."""
    parts = location[1:] if location[:1] == ("body",) else location
    return ".".join(str(part) for part in parts)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        found = ProblemError(
            "not-found", f"there is no route {request.url.path}: see /openapi.json"
        )
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        detail = f"{request.url.path} does not take {request.method}: use {allowed}"
        found = ProblemError("method-not-allowed", detail)
    elif error.status_code == 413:
        found = too_large()
    elif error.status_code == 400:
        found = ProblemError("invalid-request", "body: not JSON in UTF-8, or one beyond all bounds")
    else:
        found = ProblemError("http-error", str(error.detail), status=error.status_code)
    answer = problem_response(found)
    if "Allow" in (error.headers or {}):
        answer.headers["Allow"] = (error.headers or {})["Allow"]
    return answer


async def _on_defect(request: Request, error: Exception) -> Response:
    # Starlette logs the traceback; the caller gets nothing of it.
    return problem_response(
        ProblemError("internal-error", "a defect of the worker; its log has the traceback")
    )


class JsonBody:
    """Takes every body for JSON: `curl -d` and `kubectl create --raw` name another type or none."""

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
                # FastAPI lets no other exception out of the reading of a body.
                raise HTTPException(413)
            return message

        await self._app(scope, counted, send)


def too_large() -> ProblemError:
    """The problem of a body beyond the limit."""
    return ProblemError(
        "body-too-large",
        "send less: prompts of millions of tokens and control bodies above 1 MiB are mistakes",
    )
