"""Routes that read their body themselves: bounded in size and time, and parsed off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from rollout_common.wire.body_decoding import MIB, BodyLimits, parse_body
from rollout_common.wire.problems import ProblemError, too_large_problem

from .settings import BODY_TIMEOUT_SECONDS

INLINE_PARSE_BYTES = 2**15
"""A shorter body is parsed at once: in a few milliseconds at worst, less than a thread's turn takes."""
BODY_BUDGET_BYTES = 512 * MIB
"""Of all bodies that a port has in memory before they are parsed."""


class BodyReader:
    """Reads the bodies of one port; one long one is parsed at a time, so few are in memory twice."""

    def __init__(
        self,
        limits: Callable[[], BodyLimits],
        seconds: float = BODY_TIMEOUT_SECONDS,
        refused: Callable[[str], None] | None = None,
    ) -> None:
        """`limits` says what a body may hold now, or refuses to read any; `refused` is told of a 429."""
        self._limits = limits
        self._seconds = seconds
        self._refused = refused
        self._held = 0
        self._thread = ThreadPoolExecutor(1, "bodies")

    async def read_body(self, request: Request, model: type[BaseModel]) -> Request:
        """Return the request with its body as a model, if it has a body.

        Raises:
            ProblemError: 408, 413, 422 or 429, or what `limits` refuses with.
        """
        limits = self._limits()
        declared = request.headers.get("content-length", "0")
        if declared.isascii() and declared.isdigit() and int(declared) > limits.size:
            raise too_large_problem(_size_words(limits))
        pieces: list[bytes] = []
        try:
            body = await self._receive_body(request, limits, pieces)
            value = await self._parse_body(model, body, limits) if body else None
            return _ParsedRequest(request, value)
        finally:
            self._held -= sum(map(len, pieces))

    async def _receive_body(
        self, request: Request, limits: BodyLimits, pieces: list[bytes]
    ) -> bytes:
        """`pieces` gets what is in memory, however this ends."""
        size = 0
        try:
            async with asyncio.timeout(self._seconds):
                async for piece in request.stream():
                    pieces.append(piece)
                    size += len(piece)
                    self._held += len(piece)
                    if size > limits.size:
                        raise too_large_problem(_size_words(limits))
                    if self._held > BODY_BUDGET_BYTES:
                        if self._refused is not None:
                            self._refused("queue-full")
                        detail = "too many bodies arrive at once: try again"
                        raise ProblemError("queue-full", detail, retry_after=1)
        except TimeoutError:
            detail = f"the body did not arrive within {self._seconds:g} s: send it again"
            raise ProblemError("body-timeout", detail) from None
        except ClientDisconnect:
            raise ProblemError("http-error", "the client left before its body ended") from None
        return b"".join(pieces)

    async def _parse_body(
        self, model: type[BaseModel], body: bytes, limits: BodyLimits
    ) -> BaseModel:
        if len(body) <= INLINE_PARSE_BYTES:
            return parse_body(model, body, limits)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, parse_body, model, body, limits)


class _ParsedRequest(Request):
    """A request whose JSON is a model already, which FastAPI then takes as it is."""

    def __init__(self, request: Request, value: BaseModel | None) -> None:
        # Every body is JSON, also those of `curl -d` and `kubectl create --raw`, which don't say so.
        kept = [(k, v) for k, v in request.scope["headers"] if k != b"content-type"]
        headers = [*kept, (b"content-type", b"application/json")]
        super().__init__({**request.scope, "headers": headers}, request.receive)
        self._value = value

    async def body(self) -> bytes:
        """Not the bytes, which are gone: only that there were some."""
        return b"" if self._value is None else b"parsed"

    async def json(self) -> Any:
        """The model."""
        return self._value


class BodyRoute(APIRoute):
    """A route whose body is read by the `BodyReader` of its application (`app.state.bodies`)."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        """Wrap the handler."""
        original = super().get_route_handler()
        models = [each.field_info.annotation for each in self.dependant.body_params]

        async def handle(request: Request) -> Response:
            for model in models:
                assert isinstance(model, type)
                request = await request.app.state.bodies.read_body(request, model)
            return await original(request)

        return handle


def _size_words(limits: BodyLimits) -> str:
    return f"more than {limits.size // MIB} MiB"
