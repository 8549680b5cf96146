"""Work in threads: cancellable work, work that may hang forever, and work that can be postponed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


async def run_in_thread(work: Callable[[Callable[[], bool]], T], cancel: threading.Event) -> T:
    """Run `work(cancelled)` in a thread; returns only once it has ended, even if the caller is cancelled.

    Args:
        work: Calls its argument now and then, to know whether to give up.
        cancel: Makes it give up; set when the caller is cancelled.
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
            future.exception()  # retrieved: asyncio would log it otherwise
        raise


class _Closable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=_Closable)


async def open_in_thread(make: Callable[[], C]) -> C:
    """Return what `make` opens in a thread; if the caller is cancelled, it is closed again."""
    made: list[C] = []
    try:
        await run_in_thread(lambda _: made.append(make()), threading.Event())
    except BaseException:
        for each in made:
            each.close()
        raise
    return made[0]


class SharedCall(Generic[T]):
    """Work that may hang, as file systems do: in a thread of its own, shared by all callers that wait.

    However many callers come, no more than one thread hangs.
    """

    def __init__(self, work: Callable[[], T], name: str) -> None:
        self._work = work
        self._thread = ThreadPoolExecutor(1, name)
        self._call: asyncio.Future[T] | None = None

    async def get_result(self, seconds: float) -> T:
        """Return what the work returns, or raise what it raises.

        Raises:
            TimeoutError: It did not end in time, and goes on.
        """
        if self._call is None or self._call.done():
            self._call = asyncio.get_running_loop().run_in_executor(self._thread, self._work)
            self._call.add_done_callback(_ignore_failure)
        async with asyncio.timeout(seconds):
            return await asyncio.shield(self._call)


class BackgroundFreeing:
    """Frees memory in a thread, but not while an engine is paused; may be used by several threads.

    Gigabytes take a tenth of a second to free, during which every mapping of memory waits, also that of a
    thread that starts.
    """

    def __init__(self) -> None:
        self._state = threading.Condition()
        self._todo: deque[Callable[[], object]] = deque()
        self._held = 0
        self._busy = False

    def free_soon(self, free: Callable[[], object]) -> None:
        """Call `free` in a thread, soon."""
        with self._state:
            self._todo.append(free)
            self._start_thread()

    @contextlib.contextmanager
    def postpone_freeing(self) -> Iterator[None]:
        """Start no freeing inside the block."""
        with self._state:
            self._held += 1
        try:
            yield
        finally:
            with self._state:
                self._held -= 1
                self._start_thread()

    def wait_until_freed(self, seconds: float) -> None:
        """Wait until everything is free, for `seconds` at most."""
        with self._state:
            self._state.wait_for(lambda: not self._todo and not self._busy, seconds)

    def _start_thread(self) -> None:
        if self._todo and not self._held and not self._busy:
            self._busy = True
            threading.Thread(target=self._free_all, name="weights-free", daemon=True).start()

    def _free_all(self) -> None:
        while (free := self._next_free()) is not None:
            try:
                free()
            except Exception:  # the next one must be freed all the same
                logger.exception("memory of weights could not be freed")

    def _next_free(self) -> Callable[[], object] | None:
        with self._state:
            if self._todo and not self._held:
                return self._todo.popleft()
            self._busy = False
            self._state.notify_all()
            return None


def _ignore_failure(call: asyncio.Future[T]) -> None:
    if not call.cancelled():  # perhaps no caller waits any more
        call.exception()
