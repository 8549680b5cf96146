"""Work in threads: some gives up when whoever waits for it does, some may hang for ever."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[Callable[[], bool]], T], cancel: threading.Event) -> T:
    """Run `work(cancelled)` in a thread; it has ended when this has, however often it is cancelled.

    Args:
        work: Asks its argument now and then whether to give up.
        cancel: Says so, and is set when the caller is cancelled.
    """
    future = asyncio.get_running_loop().run_in_executor(None, work, cancel.is_set)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        cancel.set()
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([future])
        if not future.cancelled():
            future.exception()  # looked at: a thread that gave up is no unheard error
        raise


class Closable(Protocol):
    """What holds something until it is closed."""

    def close(self) -> None:
        """Give it back."""
        ...


C = TypeVar("C", bound=Closable)


async def opened_in_thread(make: Callable[[], C]) -> C:
    """Return what `make` makes in a thread; a cancelled caller gets nothing, and nothing stays open."""
    made: list[C] = []
    try:
        await in_thread(lambda _: made.append(make()), threading.Event())
    except BaseException:
        for each in made:
            each.close()
        raise
    return made[0]


class Shared(Generic[T]):
    """Work that may hang, as file systems do: in a thread of its own, and whoever asks meanwhile shares it.

    However often it is asked for, no more than one thread hangs.
    """

    def __init__(self, work: Callable[[], T], name: str) -> None:
        self._work = work
        self._thread = ThreadPoolExecutor(1, name)
        self._call: asyncio.Future[T] | None = None

    async def get(self, seconds: float) -> T:
        """Return what the work returns, or raise what it raises.

        Raises:
            TimeoutError: it did not end in time, and goes on.
        """
        if self._call is None or self._call.done():
            self._call = asyncio.get_running_loop().run_in_executor(self._thread, self._work)
            self._call.add_done_callback(_heard)
        async with asyncio.timeout(seconds):
            return await asyncio.shield(self._call)


def _heard(call: asyncio.Future[T]) -> None:
    """Nobody may be left to hear of its failure."""
    if not call.cancelled():
        call.exception()
