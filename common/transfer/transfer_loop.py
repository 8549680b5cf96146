"""The thread of a process that runs its transfers, on a separate event loop.

On the loop of the control plane, transfers would block everything else. A thread for each connection would mean
hundreds of threads in a large pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

_T = TypeVar("_T")
_lock = threading.Lock()
_running: tuple[int, asyncio.AbstractEventLoop] | None = None


def transfer_loop() -> asyncio.AbstractEventLoop:
    """Return the loop of this process; start it if there is none yet, as after a fork."""
    global _running
    with _lock:
        if _running is None or _running[0] != os.getpid():
            # Python's own, whatever policy the process has: streams read and write their sockets themselves.
            loop = asyncio.SelectorEventLoop()
            threading.Thread(target=loop.run_forever, name="weights-io", daemon=True).start()
            _running = os.getpid(), loop
        return _running[1]


def run_on_loop(work: Coroutine[Any, Any, _T]) -> Future[_T]:
    """Run a coroutine on the loop; may be called from any thread but the loop's."""
    return asyncio.run_coroutine_threadsafe(work, transfer_loop())


def waking(event: asyncio.Event) -> Callable[[], None]:
    """Return a function that sets an event of the running loop, from any thread."""
    loop = asyncio.get_running_loop()

    def wake() -> None:
        if event.is_set():  # its task clears it before it looks, so it sees this change, too
            return
        with contextlib.suppress(RuntimeError):  # the loop may have ended already
            loop.call_soon_threadsafe(event.set)

    return wake
