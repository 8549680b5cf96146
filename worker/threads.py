"""Work in a thread that gives up when whoever waits for it does."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

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
