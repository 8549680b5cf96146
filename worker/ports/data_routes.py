"""Routes of the data port: generate, info, health, readiness, metrics; with a token only if one is set."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import Headers
from starlette.types import Scope

from rollout_common import tracing, wire
from rollout_common.wire.event_frames import FRAMES_TYPE, encode_frame
from rollout_common.wire.problems import ProblemError
from rollout_worker.observe.worker_telemetry import CONTENT_TYPE
from rollout_worker.openai.model_text import ModelText
from rollout_worker.openai.openai_routes import add_openai_routes
from rollout_worker.ports.callers.auth import SEE_STATE, SharedToken
from rollout_worker.requests.http_answers import EVENTS_TYPE, EventStream, TimedAnswer
from rollout_worker.requests.http_requests import await_parts, finish_flights
from rollout_worker.requests.in_flight_requests import InFlightRequest
from rollout_worker.service import WorkerService, parser_names

from .port_app import PortGuard, new_app


def make_data_app(worker: WorkerService) -> FastAPI:
    """The application of the data port."""
    app = new_app(
        "rollout-worker data",
        "Token-in, token-out generation.",
        limits=worker.body_limits,
        refused=worker.count_refusal,
    )
    texts = ModelText(worker.model_folder, parsers=parser_names(worker.settings))
    _add_generate_route(app, worker)
    _add_info_routes(app, worker, texts)
    _add_probe_routes(app, worker)
    add_openai_routes(app, worker, texts)
    if worker.settings.data_token_file is not None:
        _require_token(app, worker, worker.settings.data_token_file)
    return app


OPEN_PATHS = ("/health", "/ready", "/metrics")
"""The kubelet and Prometheus call these, and have no token; none of them shows a prompt or output."""


def _require_token(app: FastAPI, worker: WorkerService, file: Path) -> None:
    token = SharedToken(file, flag="--data-token-file")

    async def check_token(scope: Scope, headers: Headers) -> None:
        if scope["path"] in OPEN_PATHS:
            return
        try:
            await token.check_caller(headers.get("authorization"), SEE_STATE)
        except ProblemError as error:
            worker.count_refusal(error.slug)
            raise _explain_data_token(error) from error

    app.add_middleware(PortGuard, check=check_token)


def _explain_data_token(error: ProblemError) -> ProblemError:
    """Add to an error where the caller gives the token of the data port."""
    if error.slug != "unauthenticated":
        return error
    return ProblemError(
        "unauthenticated",
        f"{error.problem.detail}; this data port needs the token of its --data-token-file: `data_token` of "
        "rollout_client's pools, the API key of OpenAI's clients",
    )


def _add_generate_route(app: FastAPI, worker: WorkerService) -> None:
    @app.post("/v1/generate", response_model=wire.GenerateResponse)
    async def generate(body: wire.GenerateRequest, request: Request) -> Response:
        """Sample continuations of one prompt; answers once all have ended, or streams events."""
        parts = await await_parts(request, body, worker.prepare_parts)
        flight = worker.submit_request(body, parts)
        framed = FRAMES_TYPE in request.headers.get("accept", "")
        seconds, encode = body.deadline_seconds, encode_frame if framed else _format_event
        if body.stream:
            return _stream_response(worker, flight, seconds, encode, framed=framed)
        await finish_flights(worker.flights, [flight], seconds, request)
        if framed:  # the same frames, in one go
            return _stream_response(worker, flight, seconds, encode, framed=True)
        _note_generation(flight)
        if flight.has_scores:
            return TimedAnswer(flight.response_pieces(), seconds)
        return Response(flight.to_response().model_dump_json(), media_type="application/json")


def _note_generation(flight: InFlightRequest) -> None:
    """Add to the request's span what was generated, in the words of OpenTelemetry's conventions where it has any."""
    if not (tracing.started and tracing.is_recording()):
        return
    done = flight.final_event()
    spans = [span for output in flight.outputs for span in output.spans]
    tracing.note_attributes(
        {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.usage.input_tokens": done.usage.prompt_tokens,
            "gen_ai.usage.output_tokens": done.usage.completion_tokens,
            "gen_ai.response.finish_reasons": [str(output.stop_reason) for output in done.outputs],
            "rollout.request_id": done.request_id,
            "rollout.queued_seconds": done.timing.queued_seconds,
            "rollout.first_token_seconds": done.timing.first_token_seconds or 0.0,
            "rollout.weights": sorted({f"{span.epoch}/{span.version}" for span in spans}),
        }
    )


EncodeEvent = Callable[[str, wire.Wire | wire.Problem], bytes]


def _stream_response(
    worker: WorkerService,
    flight: InFlightRequest,
    seconds: float,
    encode: EncodeEvent,
    *,
    framed: bool,
) -> EventStream:
    return EventStream(
        _stream_events(flight, seconds, encode),
        lambda error: encode("error", error.problem),
        worker.flights,
        [flight],
        seconds,
        media_type=FRAMES_TYPE if framed else EVENTS_TYPE,
    )


async def _stream_events(
    flight: InFlightRequest, seconds: float, encode: EncodeEvent
) -> AsyncGenerator[bytes, None]:
    first = flight.outputs[0]
    scores, routes = first.request.scored is None, first.request.routed_from is None
    async for delta in flight.stream_deltas(seconds):
        if not scores and first.prompt is not None:  # before the first token of its output
            scores = True
            async for event in _prompt_events("prompt_logprobs", flight.prompt_frames(), encode):
                yield event
        if not routes and first.routes is not None:
            routes = True
            async for event in _prompt_events("routed_experts", first.prompt_routes(), encode):
                yield event
        yield encode("delta", delta)
    if not scores:
        async for event in _prompt_events("prompt_logprobs", flight.prompt_frames(), encode):
            yield event
    _note_generation(flight)
    yield encode("done", flight.final_event())


async def _prompt_events(
    name: str, frames: Iterator[wire.Wire], encode: EncodeEvent
) -> AsyncGenerator[bytes, None]:
    for frame in frames:
        yield encode(name, frame)
        await asyncio.sleep(0)  # there may be hundreds


def _format_event(name: str, data: wire.Wire | wire.Problem) -> bytes:
    return f"event: {name}\ndata: {data.model_dump_json()}\n\n".encode()


def _add_info_routes(app: FastAPI, worker: WorkerService, texts: ModelText) -> None:
    @app.get("/v1/info")
    async def info() -> wire.WorkerInfo:
        """Return what is served and what the engine supports."""
        template = await texts.chat_template()
        return worker.worker_info(chat=bool(template), tool_parser=await texts.tool_parser())

    @app.get("/v1/weights")
    async def weights() -> wire.WeightsState:
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
