"""What both ports share: applications with bounded bodies that answer every error as a problem."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from rollout_common.wire import Problem
from rollout_common.wire.body_decoding import BodyLimits
from rollout_common.wire.problems import MEDIA_TYPE, ProblemError
from rollout_common.wire.validation import invalid_request_problem
from rollout_worker.engine import EngineCrashed, EngineError
from rollout_worker.requests.body_routes import BodyReader, BodyRoute

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
    """A FastAPI application without docs pages, whose errors are problems.

    `limits` says what a body may hold now, or refuses to read any; `refused` is told the problem of
    a body for which there is no room.
    """
    app = FastAPI(
        title=title,
        description=description,
        version="v1",
        docs_url=None,
        redoc_url=None,
        responses=RESPONSES,
    )
    app.add_exception_handler(ProblemError, _answer_problem)
    app.add_exception_handler(RequestValidationError, _answer_invalid_request)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(EngineError, _answer_engine_error)
    app.add_exception_handler(Exception, _answer_internal_error)
    app.state.bodies = BodyReader(limits, refused=refused)
    app.router.route_class = BodyRoute
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


async def _answer_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, ProblemError)
    return problem_response(error)


async def _answer_invalid_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return problem_response(invalid_request_problem(error.errors()))


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        found = ProblemError(
            "not-found", f"no route {request.url.path}: /openapi.json lists all routes"
        )
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        detail = f"{request.url.path} does not allow {request.method}: use {allowed}"
        found = ProblemError("method-not-allowed", detail)
    else:
        found = ProblemError("http-error", str(error.detail), status=error.status_code)
    answer = problem_response(found)
    if "Allow" in (error.headers or {}):
        answer.headers["Allow"] = (error.headers or {})["Allow"]
    return answer


async def _answer_engine_error(request: Request, error: Exception) -> Response:
    """What no route has an answer of its own for; a dead engine is the supervisor's to replace."""
    if isinstance(error, EngineCrashed):
        why = f"the engine died and is being restarted: {error}"
        return problem_response(ProblemError("failed", why, retry_after=5))
    return problem_response(ProblemError("engine-refused", str(error), retry_after=5))


async def _answer_internal_error(request: Request, error: Exception) -> Response:
    # Starlette logs the traceback; the caller does not get to see it.
    return problem_response(
        ProblemError("internal-error", "internal error: the traceback is in the worker's log")
    )
