"""Routes of the data port: generate, info, health, readiness, metrics. A token only if one is set."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from rollout_worker.observe.telemetry import CONTENT_TYPE
from rollout_worker.openai.routes import add_openai
from rollout_worker.openai.text import Texts
from rollout_worker.openai.tool_calls import parser_of
from rollout_worker.requests.disconnects import EventStream, drop, finish
from rollout_worker.requests.flights import Flight
from rollout_worker.schemas import (
    GenerateRequest,
    GenerateResponse,
    Problem,
    WeightsState,
    Wire,
    WorkerInfo,
)
from rollout_worker.service import Worker
from rollout_worker.wire.problems import ProblemError

from .access import SEE, unauthenticated
from .app import new_app, problem_response
from .auth import BearerToken

logger = logging.getLogger(__name__)


def data_app(worker: Worker) -> FastAPI:
    """The application of the data port."""
    app = new_app(
        "rollout-worker data",
        "Token-in, token-out generation.",
        limits=worker.body_limits,
        refused=worker.count_refusal,
    )
    texts = Texts(worker.model_folder)
    _add_generate(app, worker)
    _add_facts(app, worker, texts)
    _add_probes(app, worker)
    add_openai(app, worker, texts)
    file = worker.settings.data_token_file
    if file is not None:
        token = BearerToken(file, flag="--data-token-file")
        app.add_middleware(TokenGuard, token=token, refused=worker.count_refusal)
    return app


OPEN = ("/health", "/ready", "/metrics")
"""For the kubelet and Prometheus, which are not given the token; none of them shows a prompt or output."""


class TokenGuard:
    """Lets requests with the data port's token through; answers others before it reads their bodies."""

    def __init__(self, app: ASGIApp, token: BearerToken, refused: Callable[[str], None]) -> None:
        self._app = app
        self._token = token
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, or what else the server tells."""
        if scope["type"] == "http" and scope["path"] not in OPEN:
            try:
                await self._token.check(Headers(scope=scope).get("authorization"), SEE)
            except ProblemError as error:
                self._refused(error.slug)
                await problem_response(_with_fix(error))(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _with_fix(error: ProblemError) -> ProblemError:
    """Say where the data port's token goes."""
    if error.slug != "unauthenticated":
        return error
    return unauthenticated(
        f"{error.problem.detail}; this data port wants the token of its --data-token-file: `data_token` of "
        "rollout_client's pools, the API key of OpenAI's clients"
    )


def _add_generate(app: FastAPI, worker: Worker) -> None:
    @app.post("/v1/generate", response_model=GenerateResponse)
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Sample continuations of one prompt; answers once all have ended, or streams events."""
        flight = worker.submit(body)
        if body.stream:
            events = _events(worker, flight, body.deadline_seconds)
            return EventStream(events, body.deadline_seconds)
        await finish(worker.flights, [flight], body.deadline_seconds, request)
        return Response(flight.response().model_dump_json(), media_type="application/json")


async def _events(worker: Worker, flight: Flight, seconds: float) -> AsyncGenerator[bytes, None]:
    """Server-sent events `delta`, then `done`, or `error` if something fails after the 200."""
    try:
        async for delta in flight.stream(seconds):
            yield _event("delta", delta)
        yield _event("done", flight.stream_done())
    except ProblemError as error:
        yield _problem(error)
    except Exception:
        # The status line is already sent: only an event can report the error.
        logger.exception("a stream failed", extra={"request": flight.request_id})
        yield _problem(
            ProblemError(
                "internal-error", "the stream failed; the traceback is in the worker's log"
            )
        )
    finally:
        # Also runs when the client disconnects, which closes the generator.
        if not flight.done.is_set():
            await asyncio.shield(drop(worker.flights, [flight]))


def _problem(error: ProblemError) -> bytes:
    return _event("error", error.problem)


def _event(name: str, data: Wire | Problem) -> bytes:
    return f"event: {name}\ndata: {data.model_dump_json()}\n\n".encode()


def _add_facts(app: FastAPI, worker: Worker, texts: Texts) -> None:
    @app.get("/v1/info")
    async def info() -> WorkerInfo:
        """Return what is served and what the engine supports."""
        template = await texts.template()
        return worker.info(chat=bool(template), tool_parser=parser_of(template))

    @app.get("/v1/weights")
    async def weights() -> WeightsState:
        """Return the active, previous, staged and required weights."""
        return worker.updates.view()


def _add_probes(app: FastAPI, worker: Worker) -> None:
    @app.get("/health")
    async def health() -> JSONResponse:
        """200 while the supervisor makes progress, even while the engine restarts."""
        wrong = worker.supervisor.health()
        if wrong is not None:
            raise ProblemError("internal-error", f"{wrong}: restart the worker", status=503)
        return JSONResponse({"status": "ok", "lifecycle": worker.runtime.lifecycle.state.value})

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """200 only while the worker accepts requests."""
        refusal = worker.readiness()
        if refusal is not None:
            raise refusal
        return JSONResponse({"status": "ready"})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Return metrics in the Prometheus text format, including the engine's own."""
        await worker.measure()
        return Response(worker.metrics(), media_type=CONTENT_TYPE)
