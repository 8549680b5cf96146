"""Wait for a request to end while its client may disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from fastapi import Request

from rollout_worker.schemas import AbortReason

from .flights import Flight, Flights

T = TypeVar("T")


class ClientGone(Exception):
    """The client disconnected: nobody is waiting for the answer."""


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
