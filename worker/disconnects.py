"""Waiting for a request's end while its client may go away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from fastapi import Request

from .flights import Flight
from .service import Worker

T = TypeVar("T")


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


async def finish(
    worker: Worker, flights: Sequence[Flight], seconds: float, request: Request
) -> None:
    """Wait for the end of flights; abort them if the client goes away meanwhile."""
    ends = asyncio.gather(*(worker.finish(flight, seconds) for flight in flights))
    try:
        await unless_gone(request, ends)
    except ClientGone:
        await drop(worker, flights)
    finally:
        ends.cancel()
        await asyncio.shield(drop(worker, flights))


async def drop(worker: Worker, flights: Sequence[Flight]) -> None:
    """Abort those flights that have not ended."""
    for flight in flights:
        if not flight.done.is_set():
            await worker.drop(flight)


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Await something for a client.

    Raises:
        ClientGone: the client went away first; the work is cancelled.
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
