"""The HTTP side of an answer: a client that disconnects, or reads too slowly."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Send
from typing_extensions import override

from rollout_common.wire import AbortReason, GenerateRequest
from rollout_common.wire.problems import ProblemError

from .in_flight_requests import InFlightRequest, InFlightRequests
from .prepared_parts import NO_PARTS, PreparedParts
from .settings import ANSWER_TIMEOUT_SECONDS

logger = logging.getLogger(__name__)

T = TypeVar("T")

EVENTS_TYPE = "text/event-stream"


class ClientDisconnected(Exception):
    """The client disconnected: nobody is waiting for the answer."""


class TimedAnswer(StreamingResponse):
    """An answer in pieces; a client that reads it for much longer than the request's deadline is disconnected."""

    def __init__(
        self,
        content: AsyncIterable[bytes],
        deadline_seconds: float,
        headers: Mapping[str, str] | None = None,
        media_type: str = "application/json",
    ) -> None:
        super().__init__(content, headers=headers, media_type=media_type)
        self._seconds = deadline_seconds + ANSWER_TIMEOUT_SECONDS

    @override
    async def stream_response(self, send: Send) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                await super().stream_response(send)
        except TimeoutError:
            logger.warning("an answer was not read to its end within %g s", self._seconds)


class EventStream(TimedAnswer):
    """A response of server-sent events that flights produce; they are aborted if it ends before them.

    Nothing is sent ahead: the next event is made once the client has taken the former ones.

    Args:
        events: The events; an error in them becomes the last one.
        report_error: Writes that event.
        flights: All flights of the worker.
        waited: Those that produce the events.
        deadline_seconds: Their deadline.
        headers: Additional headers.
        media_type: What the events are written as.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        report_error: Callable[[ProblemError], bytes],
        flights: InFlightRequests,
        waited: Sequence[InFlightRequest],
        deadline_seconds: float,
        headers: Mapping[str, str] | None = None,
        media_type: str = EVENTS_TYPE,
    ) -> None:
        self._events = self._report_errors(events, report_error)
        headers = {"Cache-Control": "no-store", **(headers or {})}
        super().__init__(self._events, deadline_seconds, headers, media_type)
        self._flights, self._waited = flights, waited

    async def _report_errors(
        self,
        events: AsyncGenerator[bytes, None],
        report_error: Callable[[ProblemError], bytes],
    ) -> AsyncGenerator[bytes, None]:
        # The status line is already sent: only an event can report an error.
        async with contextlib.aclosing(events):
            try:
                async for event in events:
                    yield event
            except ProblemError as error:
                yield report_error(error)
            except Exception:
                names = [flight.request_id for flight in self._waited]
                logger.exception("a stream failed", extra={"request": ", ".join(names)})
                detail = "the stream failed; the traceback is in the worker's log"
                yield report_error(ProblemError("internal-error", detail))

    @override
    async def stream_response(self, send: Send) -> None:
        try:
            await super().stream_response(send)
        finally:
            try:
                await self._events.aclose()
            finally:
                await asyncio.shield(abort_abandoned(self._flights, self._waited))


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
