"""Wait for a request to end while its client may disconnect, or read no more of its stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from typing import TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Send

from rollout_worker.schemas import AbortReason

from .flights import ANSWER_SECONDS, Flight, Flights

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ClientGone(Exception):
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
        self._seconds = deadline_seconds + ANSWER_SECONDS

    async def stream_response(self, send: Send) -> None:
        """Send the events; give up on a client that leaves them unread for too long."""
        try:
            async with asyncio.timeout(self._seconds):
                await super().stream_response(send)
        except TimeoutError:
            logger.warning("a stream was not read to its end within %g s", self._seconds)
        finally:
            await self._events.aclose()


async def finish(
    flights: Flights, waited: Sequence[Flight], seconds: float, request: Request
) -> None:
    """Wait for flights to end; abort them if the client disconnects first."""
    ends = asyncio.gather(*(flight.finish(seconds) for flight in waited))
    try:
        await unless_gone(request, ends)
    except ClientGone:
        await drop(flights, waited)
    finally:
        ends.cancel()
        await asyncio.shield(drop(flights, waited))


async def drop(flights: Flights, left: Sequence[Flight]) -> None:
    """Abort the flights that have not ended, because their client is gone."""
    await flights.abort([each for each in left if not each.done.is_set()], AbortReason.CLIENT)


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Await some work on behalf of a client.

    Raises:
        ClientGone: the client disconnected first; the work is cancelled.
    """
    task = asyncio.ensure_future(work)
    # Nobody hears of its end once the client is gone, which is no error to be logged.
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    gone = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return await task
    finally:
        gone.cancel()
        task.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
