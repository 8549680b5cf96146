"""Work in threads: some gives up when whoever waits for it does, some may hang for ever, some is put off."""

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


async def open_in_thread(make: Callable[[], C]) -> C:
    """Return what `make` makes in a thread; a cancelled caller gets nothing, and nothing stays open."""
    made: list[C] = []
    try:
        await run_in_thread(lambda _: made.append(make()), threading.Event())
    except BaseException:
        for each in made:
            each.close()
        raise
    return made[0]


class SharedCall(Generic[T]):
    """Work that may hang, as file systems do: in a thread of its own, and whoever asks meanwhile shares it.

    However often it is asked for, no more than one thread hangs.
    """

    def __init__(self, work: Callable[[], T], name: str) -> None:
        self._work = work
        self._thread = ThreadPoolExecutor(1, name)
        self._call: asyncio.Future[T] | None = None

    async def get_result(self, seconds: float) -> T:
        """Return what the work returns, or raise what it raises.

        Raises:
            TimeoutError: it did not end in time, and goes on.
        """
        if self._call is None or self._call.done():
            self._call = asyncio.get_running_loop().run_in_executor(self._thread, self._work)
            self._call.add_done_callback(_ignore_failure)
        async with asyncio.timeout(seconds):
            return await asyncio.shield(self._call)


class BackgroundFreeing:
    """Frees memory in a thread, and none while an engine stands still; may be used by several threads.

    Gigabytes take a tenth of a second to go, and meanwhile everybody waits who maps memory, as each
    thread does that starts.
    """

    def __init__(self) -> None:
        self._state = threading.Condition()
        self._todo: deque[Callable[[], object]] = deque()
        self._held = 0
        self._busy = False

    def free_soon(self, free: Callable[[], object]) -> None:
        """Call this in a thread, soon."""
        with self._state:
            self._todo.append(free)
            self._start_thread()

    @contextlib.contextmanager
    def postpone_freeing(self) -> Iterator[None]:
        """Begin to free nothing inside the block."""
        with self._state:
            self._held += 1
        try:
            yield
        finally:
            with self._state:
                self._held -= 1
                self._start_thread()

    def wait_until_freed(self, seconds: float) -> None:
        """Wait until everything is free; at most so long."""
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
            except Exception:  # the next one is to be freed all the same
                logger.exception("memory of weights could not be freed")

    def _next_free(self) -> Callable[[], object] | None:
        with self._state:
            if self._todo and not self._held:
                return self._todo.popleft()
            self._busy = False
            self._state.notify_all()
            return None


def _ignore_failure(call: asyncio.Future[T]) -> None:
    """Nobody may be left to hear of its failure."""
    if not call.cancelled():
        call.exception()
