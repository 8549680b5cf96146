"""Wait for a request to end while its client may disconnect, or read no more of its stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from typing import TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Send

from rollout_common.wire import AbortReason

from .in_flight_requests import InFlightRequest, InFlightRequests
from .settings import ANSWER_TIMEOUT_SECONDS

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ClientDisconnected(Exception):
    """The client disconnected: nobody is waiting for the answer."""


class EventStream(StreamingResponse):
    """Server-sent events of a request with this deadline; who stops reading is dropped, too late.

    Nothing is sent ahead: the next event is made when the client has taken the former ones.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        deadline_seconds: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        headers = {"Cache-Control": "no-store", **(headers or {})}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._events = events
        self._seconds = deadline_seconds + ANSWER_TIMEOUT_SECONDS

    async def stream_response(self, send: Send) -> None:
        """Send the events; give up on a client that leaves them unread for too long."""
        try:
            async with asyncio.timeout(self._seconds):
                await super().stream_response(send)
        except TimeoutError:
            logger.warning("a stream was not read to its end within %g s", self._seconds)
        finally:
            await self._events.aclose()


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
        ClientGone: the client disconnected first; the work is cancelled.
    """
    task = asyncio.ensure_future(work)
    # Nobody hears of its end once the client is gone, which is no error to be logged.
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


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
