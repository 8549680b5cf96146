"""A thread with an event loop, for programs that have none."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, Self, TypeVar

from rollout_client.errors import PoolClosed

T = TypeVar("T")

CLOSE_SECONDS = 30.0
LOOK_SECONDS = 1.0
"""How often a waiting caller checks that the loop is still there."""


class Begun(Generic[T]):
    """What runs in the loop; as a block it is cancelled, and waited for, if the block fails.

    Args:
        future: Of the coroutine.
        thread: That the loop runs in.
    """

    def __init__(self, future: concurrent.futures.Future[T], thread: threading.Thread) -> None:
        self._future, self._thread = future, thread

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._future.cancel()
            # Its last words are not the error that counts.
            with contextlib.suppress(Exception):
                self.result()

    def result(self) -> T:
        """Return the result; if the caller is interrupted, cancel it."""
        try:
            while not concurrent.futures.wait([self._future], LOOK_SECONDS).done:
                if not self._thread.is_alive():  # handed over just after the loop's last turn
                    raise PoolClosed("the pool was closed")
            return self._future.result()
        except concurrent.futures.CancelledError:
            raise PoolClosed("the pool was closed while this ran") from None
        except BaseException:
            self._future.cancel()
            raise


class LoopThread:
    """Runs coroutines for other threads until `close`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True, name=name)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        # Callers that are still waiting get an end, too.
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop and return its result; if the caller is interrupted, cancel it.

        Raises:
            PoolClosed: The loop has ended.
            RuntimeError: The caller runs in the loop itself.
        """
        return self.begin(work).result()

    def begin(
        self, work: Coroutine[Any, Any, T], ended: Callable[[], None] = lambda: None
    ) -> Begun[T]:
        """Run a coroutine in the loop beside the caller. Raises what `call` raises.

        Args:
            work: What to run.
            ended: Called at its end, in whatever thread.
        """
        if self._is_here():
            work.close()
            raise RuntimeError(
                "a callback runs in the pool's own thread and can't wait for it: call the pool from "
                "another thread, or use AsyncRolloutPool"
            )
        if self._loop.is_closed() or not self._thread.is_alive():
            work.close()
            raise PoolClosed("the pool was closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        future.add_done_callback(lambda _: ended())
        return Begun(future, self._thread)

    def read(self, look: Callable[[], T]) -> T:
        """Return what a function that waits for nothing says in the loop; callbacks may ask, too."""
        if self._is_here():
            return look()

        async def in_loop() -> T:
            return look()

        return self.call(in_loop())

    def _is_here(self) -> bool:
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """End the loop and the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_SECONDS)
