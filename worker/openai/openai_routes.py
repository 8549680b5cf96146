"""OpenAI's routes, for clients without token ids, by the same requests in flight as `/v1/generate`.

Errors have OpenAI's format (`openai_errors`) and our status codes. `X-Weights-Version` names the oldest weights that
produced a token of the answer, or the active ones if it has no tokens; a stream that begins before its first token has none.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from typing import Annotated, Any

from fastapi import FastAPI, Header, Request
from fastapi.responses import Response

from rollout_common.wire import MAX_IDENTITY, StreamDelta
from rollout_common.wire.problems import ProblemError
from rollout_worker.requests.admission_checks import PreparedParts, check_prompt_length
from rollout_worker.requests.http_answers import EventStream
from rollout_worker.requests.http_requests import (
    abort_abandoned,
    await_parts,
    await_unless_disconnected,
    finish_flights,
)
from rollout_worker.requests.in_flight_requests import InFlightRequest
from rollout_worker.requests.settings import COMMENT_INTERVAL_SECONDS
from rollout_worker.service import WorkerService

from .answer_formats import FORMATS, CallFormat
from .model_text import ModelText
from .openai_errors import error_body, identity_headers, unsupported_field
from .openai_models import ChatRequest, CompletionRequest
from .openai_responses import ChatReading, OpenAIExchange, StreamedChunks
from .openai_structured import (
    forced_functions,
    rename_structured_error,
    response_structure,
    tool_call_structure,
)

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default `max_tokens` for completions; chats default to the maximum length."""
MAX_PROMPTS = 256
STREAM_END = b"data: [DONE]\n\n"

MinVersion = Annotated[int | None, Header(alias="X-Rollout-Min-Version", ge=0, le=MAX_IDENTITY)]


def add_openai_routes(app: FastAPI, worker: WorkerService, texts: ModelText) -> None:
    """Add the routes."""
    _add_models_route(app, worker)
    _add_completions_route(app, worker, texts)
    _add_chat_route(app, worker, texts)


def _add_completions_route(app: FastAPI, worker: WorkerService, texts: ModelText) -> None:
    @app.post("/v1/completions")
    async def completions(
        body: CompletionRequest, request: Request, min_version: MinVersion = None
    ) -> Response:
        """Complete one or more prompts, given as text or token ids."""
        body.check_fields(_served_names(worker))
        if (body.logprobs or 0) > 1:
            raise unsupported_field("logprobs", "only sampled tokens have logprobs: use 0 or 1")
        worker.check_serving()
        _check_batch(len(body.all_prompts), body.n or 1, worker.settings.max_queue)
        special, most = body.add_special_tokens is not False, worker.max_model_length
        call = _OpenAICall(worker, texts, request, body, min_version)
        prompts = [
            each
            if isinstance(each, list)
            else await await_unless_disconnected(
                request, texts.encode_prompt(each, special=special, max_length=most)
            )
            for each in body.all_prompts
        ]
        limit = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        return await call.answer_request("cmpl", prompts, limit, logprobs=body.logprobs is not None)


def _add_chat_route(app: FastAPI, worker: WorkerService, texts: ModelText) -> None:
    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request, min_version: MinVersion = None) -> Response:
        """Continue a conversation; tool calls are parsed if the chat template defines them."""
        body.check_fields(_served_names(worker))
        worker.check_serving()
        call = _OpenAICall(worker, texts, request, body, min_version)
        rendering = texts.render_conversation(
            body.messages,
            body.offered_tools,
            body.chat_template_kwargs or {},
            special=bool(body.add_special_tokens),
            max_length=worker.max_model_length,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
        )
        ids = await await_unless_disconnected(request, rendering)
        if functions := forced_functions(body):
            call.structured_by = "tools"
            call.structured = tool_call_structure(
                await _format_to_force(texts),
                functions,
                await texts.special_tokens(),
                several=body.tool_choice == "required" and body.parallel_tool_calls is not False,
            )
        reader = await texts.answer_reader()
        if reader is not None:
            reading = ChatReading(reader, body, thinks=call.structured is None)
            call.reading = reading if reading.first_marks else None
        return await call.answer_request(
            "chatcmpl", [ids], body.token_limit, logprobs=bool(body.logprobs)
        )


async def _format_to_force(texts: ModelText) -> CallFormat:
    """Return the format of forced calls, or refuse `tool_choice` if there is none."""
    parser = await texts.tool_parser()
    if parser is None:
        raise unsupported_field(
            "tool_choice", "the model's chat template has no known format of calls: use 'auto'"
        )
    form = FORMATS.get(parser)
    if form is None or not form.can_force:
        raise unsupported_field(
            "tool_choice", f"calls that the parser {parser!r} reads can't be forced: use 'auto'"
        )
    return form


def _add_models_route(app: FastAPI, worker: WorkerService) -> None:
    started = int(time.time())

    def describe_model(name: str) -> dict[str, Any]:
        info, base = worker.runtime.info, worker.settings.served_name
        return {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "rollout",
            "max_model_len": None if info is None else info.max_length,
            **({} if name == base else {"parent": base}),
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The served model, and the adapters of the active weights."""
        return {"object": "list", "data": [describe_model(name) for name in _served_names(worker)]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        """The served model, or an adapter, by name."""
        if model not in _served_names(worker):
            raise ProblemError("not-found", f"model {model!r} is not served here")
        return describe_model(model)


def _served_names(worker: WorkerService) -> tuple[str, ...]:
    """Return what `model` may name: the served model, and the adapters of the active weights."""
    active = worker.updates.active
    adapters = () if active is None else active.adapters
    base = worker.settings.served_name
    return (base, *(adapter.name for adapter in adapters if adapter.name != base))


def _check_batch(prompts: int, n: int, max_queue: int) -> None:
    """Refuse several prompts at once that never fit into the queue."""
    if not 0 < prompts <= MAX_PROMPTS:
        raise unsupported_field("prompt", f"send between 1 and {MAX_PROMPTS} prompts")
    if prompts > 1 and prompts * n > max_queue:
        raise unsupported_field(
            "prompt",
            f"{prompts} prompts with n = {n} never fit into the queue (--max-queue {max_queue}):"
            " send fewer",
        )


class _OpenAICall:
    """One request on its way through the worker."""

    def __init__(
        self,
        worker: WorkerService,
        texts: ModelText,
        request: Request,
        body: ChatRequest | CompletionRequest,
        min_version: int | None,
    ) -> None:
        self._worker, self._request, self._body = worker, request, body
        self._texts = texts
        self._min_version = min_version
        self._ends_at = time.monotonic() + body.deadline_seconds
        """The deadline counts from here: texts of many clients wait for each other."""
        base = worker.settings.served_name
        self._adapter = None if body.model in (None, base) else body.model
        self.reading: ChatReading | None = None
        self.structured = response_structure(body.response_format)
        self.structured_by = "response_format"

    async def answer_request(
        self, kind: str, prompts: Sequence[list[int]], max_tokens: int | None, *, logprobs: bool
    ) -> Response:
        """Generate and answer, in one response or as a stream."""
        for ids in prompts:
            check_prompt_length(len(ids), self._worker.max_model_length)
        decode = await self._texts.make_decoder()
        name = f"{kind}-{uuid.uuid4().hex}"
        flights: list[InFlightRequest] = []
        parts: PreparedParts | None = None
        try:
            for number, ids in enumerate(prompts):
                asked = self._body.to_generate_request(
                    name if len(prompts) == 1 else f"{name}-{number}",
                    ids,
                    logprobs=logprobs,
                    max_tokens=max_tokens,
                    structured=self.structured,
                ).model_copy(update={"min_version": self._min_version, "adapter": self._adapter})
                # All prompts have the same grammar.
                parts = parts or await await_parts(self._request, asked, self._worker.prepare_parts)
                left = {"deadline_seconds": max(0.0, self._ends_at - time.monotonic())}
                flights.append(self._worker.submit_request(asked.model_copy(update=left), parts))
        except ProblemError as error:
            await abort_abandoned(self._worker.flights, flights)
            raise rename_structured_error(error, self.structured_by) from error
        served = self._adapter or self._worker.settings.served_name
        exchange = OpenAIExchange(name, served, self._body, flights, decode, self.reading)
        if self._body.stream:
            return await self._stream_response(exchange)
        seconds = self._body.deadline_seconds
        await finish_flights(self._worker.flights, flights, seconds, self._request)
        # In a thread: texts and logprobs of many tokens take seconds.
        said = await asyncio.to_thread(lambda: _encode_json(exchange.full_answer()))
        return Response(
            said, media_type="application/json", headers=self._weights_headers(exchange)
        )

    def _weights_headers(self, exchange: OpenAIExchange) -> dict[str, str]:
        found = exchange.oldest_weights() or self._worker.updates.active_identity
        return {} if found is None else identity_headers(found)

    async def _stream_response(self, exchange: OpenAIExchange) -> Response:
        """Wait for the first token before the headers, which name its weights, unless it takes long."""
        pieces = _merge_deltas(exchange.flights, self._body.deadline_seconds)
        first = asyncio.ensure_future(anext(pieces, None))
        # Nobody may ask for its end: asyncio must not log an error of a stream whose client is gone.
        first.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            wait = asyncio.wait({first}, timeout=COMMENT_INTERVAL_SECONDS)
            come, _ = await await_unless_disconnected(self._request, wait)
            if come:
                first.result()  # or its error, which is the answer
        except BaseException:
            first.cancel()
            await asyncio.shield(abort_abandoned(self._worker.flights, exchange.flights))
            raise
        chat = exchange.is_chat
        return EventStream(
            _stream_events(exchange, first, pieces),
            lambda error: _format_event(error_body(error, chat=chat)) + STREAM_END,
            self._worker.flights,
            exchange.flights,
            self._body.deadline_seconds,
            self._weights_headers(exchange) if come else None,
        )


async def _merge_deltas(
    flights: Sequence[InFlightRequest], seconds: float
) -> AsyncIterator[tuple[InFlightRequest, StreamDelta]]:
    """Yield the deltas of all flights as they arrive, no faster than they are read."""
    ready: asyncio.Queue[tuple[InFlightRequest, StreamDelta] | None] = asyncio.Queue(1)

    async def pump(flight: InFlightRequest) -> None:
        async for delta in flight.stream_deltas(seconds):
            await ready.put((flight, delta))

    async def pump_all() -> None:
        ends = await asyncio.gather(*map(pump, flights), return_exceptions=True)
        await ready.put(None)
        for error in filter(None, ends):
            raise error

    pumping = asyncio.create_task(pump_all())
    try:
        while (piece := await ready.get()) is not None:
            yield piece
        await pumping
    finally:
        pumping.cancel()


async def _stream_events(
    exchange: OpenAIExchange,
    first: Awaitable[tuple[InFlightRequest, StreamDelta] | None],
    pieces: AsyncIterator[tuple[InFlightRequest, StreamDelta]],
) -> AsyncGenerator[bytes, None]:
    chunks = StreamedChunks(exchange)
    for chunk in chunks.first_chunks():
        yield _format_event(chunk)
    if (piece := await first) is not None:
        yield _format_event(chunks.delta_chunk(*piece))
        async for flight, delta in pieces:
            yield _format_event(chunks.delta_chunk(flight, delta))
    # In a thread: what is held back until the end is parsed there.
    for chunk in await asyncio.to_thread(lambda: list(chunks.closing_chunks())):
        yield _format_event(chunk)
    yield STREAM_END


def _encode_json(answer: dict[str, Any]) -> bytes:
    # In steps: written at once, C code would hold Python's lock until the end.
    writer = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return "".join(writer.iterencode(answer)).encode()


def _format_event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()
