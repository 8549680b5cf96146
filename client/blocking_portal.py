"""A portal: threads without an event loop call coroutines, which run in the loop of one thread.

While a thread waits for its call, the coroutine can hand blocking work back to it: tensors are made
and copied in the calling thread, which may be the only one with the right device.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

from rollout_client.errors import PoolClosed

from .settings import CHECK_SECONDS, CLOSE_SECONDS

T = TypeVar("T")

_CALLING_THREAD: ContextVar[CallingThread | None] = ContextVar("calling_thread", default=None)


def calling_thread() -> CallingThread | None:
    """Return the thread that waits for the current task; None: no thread does.

    A task that the call started gets None, too: its work would have to wait for the call's own.
    """
    caller = _CALLING_THREAD.get()
    return caller if caller is not None and caller.task is asyncio.current_task() else None


class CallingThread:
    """A thread that waits for a task, and does the work that the task hands to it.

    Attributes:
        task: The task; None: not started yet, or its result was taken.
        started: Whether the loop has started the task.
    """

    def __init__(self) -> None:
        self.task: asyncio.Task[Any] | None = None
        self.started = False
        self._interrupt: BaseException | None = None
        self._left = False
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._work = queue.SimpleQueue()

    # In the loop's thread.

    def start_task(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Start the task that this thread waits for."""
        self.started = True
        self.task = asyncio.get_running_loop().create_task(self._run_task(coroutine))
        self.task.add_done_callback(lambda _: self._work.put(None))

    async def _run_task(self, coroutine: Coroutine[Any, Any, T]) -> T | None:
        _CALLING_THREAD.set(self)
        try:
            return await coroutine
        except (KeyboardInterrupt, SystemExit) as error:
            # It would end the event loop, so the calling thread raises it instead.
            self._interrupt = error
            return None

    def cancel_task(self) -> None:
        """Cancel the task, if it has been started."""
        if self.task is not None:
            self.task.cancel()

    def run_work(self, work: Callable[..., T], *args: Any) -> Future[T]:
        """Hand work to the thread; it is cancelled if the thread has stopped waiting."""
        done: Future[T] = Future()
        self._work.put((done, partial(work, *args)))
        if self._left:
            self._cancel_work()
        return done

    # In the thread itself.

    def wait_for_task(self, loop_thread: threading.Thread) -> None:
        """Do the work that the task hands over until it has ended.

        Raises:
            PoolClosed: The loop ended before the task.
        """
        while True:
            try:
                if (item := self._work.get(timeout=CHECK_SECONDS)) is None:
                    return
            except queue.Empty:
                if not loop_thread.is_alive() and (self.task is None or not self.task.done()):
                    raise PoolClosed("the pool was closed") from None
                continue
            done, work = item
            if done.set_running_or_notify_cancel():
                _complete_future(done, work)
            del item, done, work  # an error that is kept here would keep the tensors of its frames

    def take_result(self) -> Any:
        """Return the result of the ended task, or raise its error.

        Raises:
            PoolClosed: The task was cancelled: the loop ends.
        """
        # Tasks that it started refer to this object, and would keep the error or the result alive.
        task, self.task = self.task, None
        interrupt, self._interrupt = self._interrupt, None
        assert task is not None
        try:
            if interrupt is not None:
                raise interrupt
            return task.result()
        except asyncio.CancelledError:
            raise PoolClosed("the pool was closed while this ran") from None
        finally:
            del task, interrupt

    def stop_waiting(self) -> None:
        """Cancel work that has not begun, and all later work."""
        self._left = True
        self._cancel_work()

    def _cancel_work(self) -> None:
        while not self._work.empty():
            if (item := self._work.get()) is not None:
                item[0].cancel()


def _complete_future(done: Future[T], work: Callable[[], T]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:  # noqa: BLE001  # the task raises it
        done.set_exception(error)
    finally:
        del done, work  # the error's traceback refers to this frame


class BlockingPortal:
    """Runs coroutines for other threads, in the event loop of a thread of its own, until `close`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._process = os.getpid()
        self._finishing: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run_loop, daemon=True, name=name)
        self._thread.start()

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        # Cancelled tasks give threads that still wait an answer.
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()

    def call(
        self, coroutine: Coroutine[Any, Any, T], if_refused: Callable[[], object] = lambda: None
    ) -> T:
        """Run a coroutine in the loop and return its result; Ctrl-C cancels it and waits for its end.

        A second Ctrl-C does not wait. If the coroutine is never started, `if_refused` is called.

        Raises:
            PoolClosed: The loop has ended.
            RuntimeError: The caller runs in the loop itself.
        """
        if self._is_current():
            coroutine.close()
            if_refused()
            raise RuntimeError(
                "a callback runs in the pool's own thread and can't wait for it: call the pool from "
                "another thread, or use AsyncRolloutPool"
            )
        caller = CallingThread()
        try:
            if os.getpid() != self._process:
                raise PoolClosed(
                    "the pool's thread is not in this process, which was forked: make a pool in each process"
                )
            if not self._thread.is_alive():
                raise PoolClosed("the pool was closed")
            self._schedule(caller.start_task, coroutine)
            self._wait_for_task(caller)
            result: T = caller.take_result()
            return result
        finally:
            if not caller.started:
                coroutine.close()
                if_refused()

    def _schedule(self, work: Callable[..., None], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(work, *args)
        except RuntimeError:  # the loop is closed
            raise PoolClosed("the pool was closed") from None

    def _wait_for_task(self, caller: CallingThread) -> None:
        try:
            caller.wait_for_task(self._thread)
        except PoolClosed:
            raise
        except BaseException:
            try:
                self._schedule(caller.cancel_task)
                caller.wait_for_task(self._thread)  # its cleanup may need this thread
            except PoolClosed:
                pass
            finally:
                caller.stop_waiting()
            raise

    def read(self, function: Callable[[], T]) -> T:
        """Run a function that does not wait in the loop; callbacks may call this as well."""
        if self._is_current():
            return function()

        async def run_in_loop() -> T:
            return function()

        return self.call(run_in_loop())

    def finish(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run the end of something, unless the loop has ended, and with it everything in it.

        The garbage collector may call this in any thread: the loop's own does not wait.
        """
        if self._is_current():
            task = self._loop.create_task(coroutine)
            self._finishing.add(task)  # the loop itself keeps none
            task.add_done_callback(self._finishing.discard)
            return
        with contextlib.suppress(PoolClosed):
            self.call(coroutine)

    def _is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """End the loop and the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_SECONDS)
