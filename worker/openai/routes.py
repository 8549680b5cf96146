"""OpenAI's routes, for clients without token ids, over the same flights as `/v1/generate`.

Errors have OpenAI's format and our status codes. `X-Weights-Version` names the oldest weights that
produced a token of the answer, or the active ones if there are no tokens.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Annotated, Any

from fastapi import FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRouter

from rollout_worker.requests.admission import check_prompt
from rollout_worker.requests.bodies import BodyRoute
from rollout_worker.requests.disconnects import ClientGone, EventStream, drop, finish, unless_gone
from rollout_worker.requests.flights import Flight
from rollout_worker.schemas import MAX_IDENTITY, StreamDelta
from rollout_worker.service import Worker
from rollout_worker.wire.problems import ProblemError
from rollout_worker.wire.validation import invalid_request

from .answers import Chunks, Exchange
from .fields import unable
from .models import ChatRequest, CompletionRequest, in_openais_words
from .text import Texts
from .tool_calls import parser_of

logger = logging.getLogger(__name__)

DEADLINE_SECONDS = 600.0
COMPLETION_TOKENS = 16
"""OpenAI's default `max_tokens` for completions; chats default to the maximum length."""
MAX_PROMPTS = 256
CHAT = "/v1/chat/completions"

MinVersion = Annotated[int | None, Header(alias="X-Rollout-Min-Version", ge=0, le=MAX_IDENTITY)]


class OpenAIRoute(BodyRoute):
    """A route with errors in OpenAI's format."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        """Wrap the handler."""
        original = super().get_route_handler()
        chat = self.path == CHAT

        async def handle(request: Request) -> Response:
            try:
                return await original(request)
            except ProblemError as error:
                return error_response(error, chat=chat)
            except RequestValidationError as error:
                return error_response(invalid_request(error.errors()), chat=chat)
            except ClientGone:
                return Response(status_code=499)  # the client is gone: nobody will read this

        return handle


def error_body(error: ProblemError, *, chat: bool) -> dict[str, Any]:
    """A problem in OpenAI's format, under the names of the route's own fields."""
    problem = error.problem
    detail, field = in_openais_words(problem, "messages" if chat else "prompt")
    return {
        "error": {
            "message": detail,
            "type": "invalid_request_error" if problem.status < 500 else "server_error",
            "param": field,
            "code": error.slug,
        }
    }


def error_response(error: ProblemError, *, chat: bool) -> Response:
    """The response for an error."""
    return JSONResponse(error_body(error, chat=chat), error.problem.status, headers=error.headers)


def add_openai(app: FastAPI, worker: Worker, texts: Texts) -> None:
    """Add the routes."""
    router = APIRouter(route_class=OpenAIRoute)
    _add_models(router, worker)

    @router.post("/v1/completions")
    async def completions(
        body: CompletionRequest, request: Request, min_version: MinVersion = None
    ) -> Response:
        """Complete one or more prompts, given as text or token ids."""
        body.check(worker.settings.served_name)
        if (body.logprobs or 0) > 1:
            raise unable("logprobs", "only sampled tokens have logprobs: use 0 or 1")
        worker.check_serving()
        _check_batch(len(body.prompts), body.n or 1, worker.settings.max_queue)
        special = body.add_special_tokens is not False
        prompts = [
            each if isinstance(each, list) else await texts.encode(each, special=special)
            for each in body.prompts
        ]
        limit = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        call = _Call(worker, texts, request, body, min_version)
        return await call.answer("cmpl", prompts, limit, logprobs=body.logprobs is not None)

    @router.post(CHAT)
    async def chat(body: ChatRequest, request: Request, min_version: MinVersion = None) -> Response:
        """Continue a conversation; tool calls are parsed if the chat template defines them."""
        body.check(worker.settings.served_name)
        worker.check_serving()
        ids = await texts.render(
            body.messages,
            body.offered,
            body.chat_template_kwargs or {},
            special=bool(body.add_special_tokens),
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
        )
        call = _Call(worker, texts, request, body, min_version)
        call.tools = body.may_call_tools and parser_of(await texts.template()) is not None
        return await call.answer("chatcmpl", [ids], body.limit, logprobs=bool(body.logprobs))

    app.include_router(router)


def _add_models(router: APIRouter, worker: Worker) -> None:
    started = int(time.time())

    def served() -> dict[str, Any]:
        info = worker.runtime.info
        return {
            "id": worker.settings.served_name,
            "object": "model",
            "created": started,
            "owned_by": "rollout",
            "max_model_len": None if info is None else info.max_length,
        }

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The served model, as a list of one."""
        return {"object": "list", "data": [served()]}

    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        """The served model, by name."""
        if model != worker.settings.served_name:
            raise ProblemError("not-found", f"model {model!r} is not served here")
        return served()


def _check_batch(prompts: int, n: int, max_queue: int) -> None:
    """Refuse several prompts at once that never fit into the queue.

    Raises:
        ProblemError: 422 that names the field.
    """
    if not 0 < prompts <= MAX_PROMPTS:
        raise unable("prompt", f"send between 1 and {MAX_PROMPTS} prompts")
    if prompts > 1 and prompts * n > max_queue:
        raise unable(
            "prompt",
            f"{prompts} prompts with n = {n} never fit into the queue (--max-queue {max_queue}):"
            " send fewer",
        )


class _Call:
    """One request on its way through the worker."""

    def __init__(
        self,
        worker: Worker,
        texts: Texts,
        request: Request,
        body: ChatRequest | CompletionRequest,
        min_version: int | None,
    ) -> None:
        self._worker, self._request, self._body = worker, request, body
        self._texts = texts
        self._min_version = min_version
        self.tools = False

    async def answer(
        self, kind: str, prompts: Sequence[list[int]], max_tokens: int | None, *, logprobs: bool
    ) -> Response:
        """Generate and answer, in one response or as a stream."""
        for ids in prompts:
            check_prompt(len(ids), self._worker.max_length)
        decode = await self._texts.decoder()
        name = f"{kind}-{uuid.uuid4().hex}"
        flights: list[Flight] = []
        try:
            for number, ids in enumerate(prompts):
                asked = self._body.generate(
                    name if len(prompts) == 1 else f"{name}-{number}",
                    ids,
                    logprobs=logprobs,
                    max_tokens=max_tokens,
                ).model_copy(update={"min_version": self._min_version})
                flights.append(self._worker.submit(asked))
        except ProblemError:
            await drop(self._worker.flights, flights)
            raise
        served = self._worker.settings.served_name
        exchange = Exchange(name, served, self._body, flights, decode, self.tools)
        if self._body.stream:
            return await self._stream(exchange)
        await finish(self._worker.flights, flights, DEADLINE_SECONDS, self._request)
        # In a thread: texts and logprobs of many tokens take seconds.
        said = await asyncio.to_thread(lambda: _written(exchange.answer()))
        return Response(said, media_type="application/json", headers=self._headers(exchange))

    def _headers(self, exchange: Exchange) -> dict[str, str]:
        found = exchange.oldest() or self._worker.updates.identity
        if found is None:
            return {}
        return {"X-Weights-Epoch": str(found.epoch), "X-Weights-Version": str(found.version)}

    async def _stream(self, exchange: Exchange) -> Response:
        """Wait for the first token before the headers, which name its weights."""
        pieces = _merged(exchange.flights)
        first: tuple[Flight, StreamDelta] | None = None
        try:
            first = await unless_gone(self._request, anext(pieces, None))
        except BaseException:
            await asyncio.shield(drop(self._worker.flights, exchange.flights))
            raise
        events = _events(self._worker, exchange, first, pieces)
        return EventStream(events, DEADLINE_SECONDS, self._headers(exchange))


async def _merged(flights: Sequence[Flight]) -> AsyncIterator[tuple[Flight, StreamDelta]]:
    """Yield the deltas of all flights as they arrive, no faster than they are read."""
    ready: asyncio.Queue[tuple[Flight, StreamDelta] | None] = asyncio.Queue(1)

    async def pump(flight: Flight) -> None:
        async for delta in flight.stream(DEADLINE_SECONDS):
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


async def _events(
    worker: Worker,
    exchange: Exchange,
    first: tuple[Flight, StreamDelta] | None,
    pieces: AsyncIterator[tuple[Flight, StreamDelta]],
) -> AsyncGenerator[bytes, None]:
    chunks = Chunks(exchange)
    try:
        for chunk in chunks.first():
            yield _event(chunk)
        if first is not None:
            yield _event(chunks.delta(*first))
            async for flight, delta in pieces:
                yield _event(chunks.delta(flight, delta))
        for chunk in chunks.ends():
            yield _event(chunk)
    except ProblemError as error:
        yield _event(error_body(error, chat=exchange.chat))
    except Exception:
        # The status line is already sent: only an event can report the error.
        logger.exception("a stream failed", extra={"request": exchange.id})
        broken = ProblemError(
            "internal-error", "the stream failed; the traceback is in the worker's log"
        )
        yield _event(error_body(broken, chat=exchange.chat))
    finally:
        await asyncio.shield(drop(worker.flights, exchange.flights))
    yield b"data: [DONE]\n\n"


def _written(answer: dict[str, Any]) -> bytes:
    """JSON, written in steps: in one, C would hold Python's lock until the end."""
    writer = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return "".join(writer.iterencode(answer)).encode()


def _event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()
