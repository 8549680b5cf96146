"""Routes of the data port: generate, info, health, readiness, metrics. A token only if one is set."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from rollout_common.wire import (
    GenerateRequest,
    GenerateResponse,
    Problem,
    WeightsState,
    Wire,
    WorkerInfo,
)
from rollout_common.wire.problems import ProblemError
from rollout_worker.observe.worker_telemetry import CONTENT_TYPE
from rollout_worker.openai.model_text import ModelText
from rollout_worker.openai.openai_routes import add_openai_routes
from rollout_worker.openai.tool_calls import tool_parser_of
from rollout_worker.requests.disconnects import EventStream, abort_abandoned, finish_flights
from rollout_worker.requests.in_flight_requests import InFlightRequest
from rollout_worker.service import WorkerService

from .access_rights import SEE_STATE, unauthenticated_problem
from .auth import SharedToken
from .port_app import new_app, problem_response

logger = logging.getLogger(__name__)


def make_data_app(worker: WorkerService) -> FastAPI:
    """The application of the data port."""
    app = new_app(
        "rollout-worker data",
        "Token-in, token-out generation.",
        limits=worker.body_limits,
        refused=worker.count_refusal,
    )
    texts = ModelText(worker.model_folder)
    _add_generate_route(app, worker)
    _add_info_routes(app, worker, texts)
    _add_probe_routes(app, worker)
    add_openai_routes(app, worker, texts)
    file = worker.settings.data_token_file
    if file is not None:
        token = SharedToken(file, flag="--data-token-file")
        app.add_middleware(TokenGuard, token=token, refused=worker.count_refusal)
    return app


OPEN_PATHS = ("/health", "/ready", "/metrics")
"""For the kubelet and Prometheus, which are not given the token; none of them shows a prompt or output."""


class TokenGuard:
    """Lets requests with the data port's token through; answers others before it reads their bodies."""

    def __init__(self, app: ASGIApp, token: SharedToken, refused: Callable[[str], None]) -> None:
        self._app = app
        self._token = token
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, or what else the server tells."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                await self._token.check_caller(Headers(scope=scope).get("authorization"), SEE_STATE)
            except ProblemError as error:
                self._refused(error.slug)
                await problem_response(_explain_data_token(error))(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _explain_data_token(error: ProblemError) -> ProblemError:
    """Say where the data port's token goes."""
    if error.slug != "unauthenticated":
        return error
    return unauthenticated_problem(
        f"{error.problem.detail}; this data port wants the token of its --data-token-file: `data_token` of "
        "rollout_client's pools, the API key of OpenAI's clients"
    )


def _add_generate_route(app: FastAPI, worker: WorkerService) -> None:
    @app.post("/v1/generate", response_model=GenerateResponse)
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Sample continuations of one prompt; answers once all have ended, or streams events."""
        flight = worker.submit_request(body)
        if body.stream:
            events = _stream_events(worker, flight, body.deadline_seconds)
            return EventStream(events, body.deadline_seconds)
        await finish_flights(worker.flights, [flight], body.deadline_seconds, request)
        return Response(flight.to_response().model_dump_json(), media_type="application/json")


async def _stream_events(
    worker: WorkerService, flight: InFlightRequest, seconds: float
) -> AsyncGenerator[bytes, None]:
    """Server-sent events `delta`, then `done`, or `error` if something fails after the 200."""
    try:
        async for delta in flight.stream_deltas(seconds):
            yield _format_event("delta", delta)
        yield _format_event("done", flight.final_event())
    except ProblemError as error:
        yield _problem_event(error)
    except Exception:
        # The status line is already sent: only an event can report the error.
        logger.exception("a stream failed", extra={"request": flight.request_id})
        yield _problem_event(
            ProblemError(
                "internal-error", "the stream failed; the traceback is in the worker's log"
            )
        )
    finally:
        # Also runs when the client disconnects, which closes the generator.
        if not flight.done.is_set():
            await asyncio.shield(abort_abandoned(worker.flights, [flight]))


def _problem_event(error: ProblemError) -> bytes:
    return _format_event("error", error.problem)


def _format_event(name: str, data: Wire | Problem) -> bytes:
    return f"event: {name}\ndata: {data.model_dump_json()}\n\n".encode()


def _add_info_routes(app: FastAPI, worker: WorkerService, texts: ModelText) -> None:
    @app.get("/v1/info")
    async def info() -> WorkerInfo:
        """Return what is served and what the engine supports."""
        template = await texts.chat_template()
        return worker.worker_info(chat=bool(template), tool_parser=tool_parser_of(template))

    @app.get("/v1/weights")
    async def weights() -> WeightsState:
        """Return the active, previous, staged and required weights."""
        return worker.updates.to_view()


def _add_probe_routes(app: FastAPI, worker: WorkerService) -> None:
    @app.get("/health")
    async def health() -> JSONResponse:
        """200 while the supervisor makes progress, even while the engine restarts."""
        wrong = worker.supervisor.health_problem()
        if wrong is not None:
            raise ProblemError("internal-error", f"{wrong}: restart the worker", status=503)
        return JSONResponse(
            {"status": "ok", "lifecycle": worker.runtime.lifecycle.current_state.value}
        )

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """200 only while the worker accepts requests."""
        refusal = worker.readiness_problem()
        if refusal is not None:
            raise refusal
        return JSONResponse({"status": "ready"})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Return metrics in the Prometheus text format, including the engine's own."""
        await worker.update_measurements()
        return Response(worker.render_metrics(), media_type=CONTENT_TYPE)
