"""The thread of a process that runs its transfers, on a separate event loop.

On the loop of the control plane, transfers would block everything else. A thread for each connection would mean
hundreds of threads in a large pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine
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


@contextlib.asynccontextmanager
async def running_tasks(*work: Coroutine[Any, Any, Any]) -> AsyncGenerator[list[asyncio.Task[Any]]]:
    """Run these as tasks for as long as the block runs; at its end cancel those that still run, and wait for them.

    Errors that the block does not read are dropped.
    """
    tasks = [asyncio.create_task(each) for each in work]
    try:
        yield tasks
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.wait(tasks)
        for each in tasks:
            if not each.cancelled():
                each.exception()  # read, so that asyncio doesn't log it


async def wait_for_first(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Wait until one of the tasks has ended; raise what it raised."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for each in done:
        each.result()


class TaskSet:
    """Tasks of the running loop, forgotten as they end. Each is cancelled once, since it closes its connection then."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._cancelled: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Run this as a task."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._cancelled.discard)

    def cancel_tasks(self) -> None:
        """Cancel all tasks."""
        for task in self._tasks - self._cancelled:
            task.cancel()
        self._cancelled |= self._tasks

    async def wait_for_end(self) -> None:
        """Wait until no task is left."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def end_tasks(self) -> None:
        """Cancel all tasks, and those that they start until they end; wait for them."""
        while self._tasks:
            self.cancel_tasks()
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)


def waking(event: asyncio.Event) -> Callable[[], None]:
    """Return a function that sets an event of the running loop, from any thread."""
    loop, thread = asyncio.get_running_loop(), threading.get_ident()

    def wake() -> None:
        if event.is_set():  # its task clears it before it looks, so it sees this change, too
            return
        if threading.get_ident() == thread:  # without the two system calls that wake a loop
            event.set()
            return
        with contextlib.suppress(RuntimeError):  # the loop may have ended already
            loop.call_soon_threadsafe(event.set)

    return wake
