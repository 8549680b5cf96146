"""The HTTP side of a request: its body, bounded in size and time, and a client that may disconnect.

Work in C holds Python's lock until it returns, in a thread as well. So whatever grows with a body is either
bounded or done in steps, between which the event loop gets its turn.
"""

from __future__ import annotations

import asyncio
import json
import json.scanner
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from json.scanner import py_make_scanner  # type: ignore[attr-defined]  # typeshed knows only C's
from types import FunctionType
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from typing_extensions import override

from rollout_common.wire import MAX_IMAGE_REQUEST_BYTES, AbortReason, GenerateRequest
from rollout_common.wire.problems import ProblemError, invalid_request_problem

from .admission_checks import NO_PARTS, PreparedParts
from .in_flight_requests import InFlightRequest, InFlightRequests
from .settings import BODY_TIMEOUT_SECONDS

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

MIB = 2**20
STEPWISE_BYTES = MIB // 2
"""A longer body is parsed value by value: C would hold Python's lock for over 20 ms."""
MAX_DEPTH = 100
"""Levels of nesting; pydantic and templates end at about 250."""
INLINE_PARSE_BYTES = 2**15
"""Shorter bodies are parsed on the loop: in a few milliseconds at worst, less than a switch of threads."""
BODY_BUDGET_BYTES = 512 * MIB
"""What all unparsed bodies of one port may take in memory."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """The largest body: bytes, and JSON values, each of which takes up to 64 bytes.

    Lists and objects cost more: the garbage collector visits them, and holds the lock of the process.
    """

    size: int
    values: int
    parts: int
    """Lists and objects; also the fields of all objects."""


CONTROL_LIMITS = BodyLimits(MIB, 2**17, 2**14)


def data_body_limits(max_length: int, *, pictures: bool = False) -> BodyLimits:
    """Room for a prompt of `max_length` tokens, a fixed part for text and several prompts, and perhaps pictures."""
    return BodyLimits(
        size=8 * MIB + 16 * max_length + pictures * MAX_IMAGE_REQUEST_BYTES // 3 * 4,
        values=2**19 + 2 * max_length,
        # A message that quotes JSON has about as many braces and colons.
        parts=2**16 + max_length // 8,
    )


NUMBER = re.compile(r"(-?(?:0|[1-9]\d{0,4300}))(\.\d{1,4300})?([eE][-+]?\d{1,10})?")
"""A number as JSON writes it, up to one digit more than Python converts to an integer."""

_bounded_scanner = FunctionType(
    py_make_scanner.__code__, {**vars(json.scanner), "NUMBER_RE": NUMBER}
)
"""The standard library's scanner, whose own pattern would match millions of digits in one call of C."""


class _StepwiseDecoder(json.JSONDecoder):
    """The standard library's parser without its accelerator."""

    def __init__(self) -> None:
        super().__init__()
        self.scan_once = _bounded_scanner(self)


def parse_body(model: type[M], body: bytes, limits: BodyLimits) -> M:
    """Return a body as a model.

    Raises:
        ProblemError: 413 or 422; it names the first fields at fault.
    """
    opened = _check_values(body, limits)
    try:
        long = len(body) > STEPWISE_BYTES
        value = json.loads(body, cls=_StepwiseDecoder) if long else json.loads(body)
    except json.JSONDecodeError as error:
        raise _bad_body(f"invalid JSON at character {error.pos}: {error.msg}") from None
    except UnicodeDecodeError:
        raise _bad_body("not valid UTF-8 JSON") from None
    except ValueError:
        raise _bad_body("a number has too many digits") from None
    except RecursionError:
        raise _too_deep_problem() from None
    if opened > MAX_DEPTH and _fits_level([value], MAX_DEPTH):
        raise _too_deep_problem()
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise invalid_request_problem(
            error.errors(include_url=False, include_input=False)
        ) from None


def _check_values(body: bytes, limits: BodyLimits) -> int:
    """Refuse too many values before any of them exists; returns the number of lists and objects.

    A value begins a list or an object, or follows a comma; a field has two quotes and a colon. Such
    characters inside of text count, too.
    """
    commas = opened = quotes = colons = 0
    for start in range(0, len(body), MIB):
        piece = body[start : start + MIB]
        commas += piece.count(b",")
        opened += piece.count(b"[") + piece.count(b"{")
        quotes += piece.count(b'"')
        colons += piece.count(b":")
        if commas + opened > limits.values:
            raise _too_large_problem(f"{limits.values} values")
        if max(opened, min(quotes // 2, colons)) > limits.parts:
            raise _too_large_problem(f"{limits.parts} lists and objects, or fields")
    return opened


def _fits_level(level: Iterable[Any], most: int) -> bool:
    for _ in range(most):
        level = [value for each in level for value in _nested_values(each)]
        if not level:
            return False
    return True


def _nested_values(value: Any) -> Iterable[Any]:
    values = value.values() if isinstance(value, dict) else value
    return [each for each in values if isinstance(each, list | dict)]


def _too_deep_problem() -> ProblemError:
    return _bad_body(f"nested more than {MAX_DEPTH} levels deep")


def _bad_body(detail: str) -> ProblemError:
    said = f"body: {detail}"
    return ProblemError("invalid-request", said, errors=[{"field": "", "message": detail}])


class BodyReader:
    """Reads the bodies of one port; parses one long body at a time, so few are in memory twice."""

    def __init__(
        self,
        limits: Callable[[], BodyLimits],
        seconds: float = BODY_TIMEOUT_SECONDS,
        refused: Callable[[str], None] | None = None,
    ) -> None:
        """`limits` returns what a body may hold now, or refuses to read any; `refused` gets the slug of each 429."""
        self._limits = limits
        self._seconds = seconds
        self._refused = refused
        self._held = 0
        self._thread = ThreadPoolExecutor(1, "bodies")

    async def read_body(self, request: Request, model: type[BaseModel]) -> Request:
        """Return the request with its body as a model, if it has a body.

        Raises:
            ProblemError: 408, 413, 415, 422, 429 or 503, or what `limits` refuses with.
        """
        coding = request.headers.get("content-encoding", "identity")
        if coding.lower() != "identity":
            detail = (
                f"Content-Encoding {coding[:80]!r} is not understood: send the body uncompressed"
            )
            raise ProblemError("http-error", detail, status=415)
        limits = self._limits()
        declared = request.headers.get("content-length", "0")
        if declared.isascii() and declared.isdigit() and int(declared) > limits.size:
            raise _too_large_problem(f"{limits.size // MIB} MiB")
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
        """Fill `pieces` with what is in memory, however this ends."""
        size = 0
        try:
            async with asyncio.timeout(self._seconds):
                async for piece in request.stream():
                    pieces.append(piece)
                    size += len(piece)
                    self._held += len(piece)
                    if size > limits.size:
                        raise _too_large_problem(f"{limits.size // MIB} MiB")
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
        except asyncio.CancelledError:  # the server ends, and has waited for this body
            detail = "the worker is shutting down: use another replica"
            raise ProblemError("shutting-down", detail, retry_after=1) from None
        return b"".join(pieces)

    async def _parse_body(
        self, model: type[BaseModel], body: bytes, limits: BodyLimits
    ) -> BaseModel:
        if len(body) <= INLINE_PARSE_BYTES:
            return parse_body(model, body, limits)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, parse_body, model, body, limits)


class _ParsedRequest(Request):
    """A request whose JSON is a model already, which FastAPI takes as it is."""

    def __init__(self, request: Request, value: BaseModel | None) -> None:
        # `curl -d` and `kubectl create --raw` don't say that their body is JSON.
        kept = [(k, v) for k, v in request.scope["headers"] if k != b"content-type"]
        headers = [*kept, (b"content-type", b"application/json")]
        super().__init__({**request.scope, "headers": headers}, request.receive)
        self._value = value

    @override
    async def body(self) -> bytes:
        # The bytes are gone: FastAPI only asks whether there were any.
        return b"" if self._value is None else b"parsed"

    @override
    async def json(self) -> Any:
        return self._value


class ClientDisconnected(Exception):
    """The client disconnected: nobody is waiting for the answer."""


class BodyRoute(APIRoute):
    """A route whose body is read by the `BodyReader` of its application (`app.state.bodies`)."""

    @override
    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        original = super().get_route_handler()
        models = [each.field_info.annotation for each in self.dependant.body_params]

        async def handle(request: Request) -> Response:
            for model in models:
                assert isinstance(model, type)
                request = await request.app.state.bodies.read_body(request, model)
            try:
                return await original(request)
            except ClientDisconnected:
                return Response(status_code=499)  # nobody will read this

        return handle


def _too_large_problem(limit: str) -> ProblemError:
    return ProblemError("body-too-large", f"the body has more than {limit}: send less at once")


async def finish_flights(
    flights: InFlightRequests, waited: Sequence[InFlightRequest], seconds: float, request: Request
) -> None:
    """Wait for flights to end; abort them if the client disconnects first."""
    ends = asyncio.gather(*(flight.wait_finished(seconds) for flight in waited))
    try:
        await await_unless_disconnected(request, ends)
    except ClientDisconnected:
        await abort_abandoned(flights, waited)
    finally:
        ends.cancel()
        await asyncio.shield(abort_abandoned(flights, waited))


async def abort_abandoned(flights: InFlightRequests, left: Sequence[InFlightRequest]) -> None:
    """Abort the flights that have not ended, because their client is gone."""
    await flights.abort_requests(
        [each for each in left if not each.done.is_set()], AbortReason.CLIENT
    )


async def await_unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """Await some work on behalf of a client.

    Raises:
        ClientDisconnected: The client disconnected first; the work is cancelled.
    """
    task = asyncio.ensure_future(work)
    # Its end is of no interest once the client is gone: asyncio must not log it as an unseen error.
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    gone = asyncio.create_task(_wait_for_disconnect(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return await task
    finally:
        gone.cancel()
        task.cancel()


async def await_parts(
    request: Request,
    body: GenerateRequest,
    prepare: Callable[[GenerateRequest], Awaitable[PreparedParts]],
) -> PreparedParts:
    """Return what `prepare` makes of a request that has parts; raises as it and `await_unless_disconnected` do."""
    if body.structured is None and body.multimodal is None:
        return NO_PARTS
    return await await_unless_disconnected(request, prepare(body))


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
