"""A worker in a thread of this process, with an event loop of its own.

The process is not the worker's: the thread installs no signal handlers, configures no logging, and raises
no limit. It ends with `close`, at the latest before the interpreter ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from rollout_common.wire import Lifecycle
from rollout_worker.engine import Engine
from rollout_worker.engines.shared_memory.staging_budget import StagingBudget
from rollout_worker.ports.server import HttpServers, make_authorizer, serve_until
from rollout_worker.service import WorkerService, make_engine_factory
from rollout_worker.settings import InvalidSettings, WorkerSettings

from .settings import HOST_CLOSE_SECONDS

logger = logging.getLogger(__name__)

T = TypeVar("T")

ONE_PER_PROCESS = ("vllm", "sglang")
"""Engines that configure their whole process, and so can run only once in it."""


class WorkerEnded(RuntimeError):
    """The worker did not come up, or has ended; the text says why."""


class WorkerHost:
    """The thread and what runs in it."""

    def __init__(
        self, settings: WorkerSettings, make_engine: Callable[[], Engine] | None = None
    ) -> None:
        self.settings = settings
        self._make_engine = make_engine or make_engine_factory(
            settings, StagingBudget(settings.staging_memory), guest=True
        )
        self._pid = os.getpid()
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run_thread, name="rollout-worker", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._beginning = threading.Lock()
        self._stop = asyncio.Event()
        self._ended = "it was not started"
        self.worker: WorkerService | None = None
        self.ports = (0, 0)

    def start(self) -> None:
        """Open the ports, load the engine, and return once it has loaded.

        Raises:
            InvalidSettings: A port or the credentials can't be used.
            WorkerEnded: The engine can't be loaded, the worker was started before, or the interpreter ends.
        """
        if self._thread.ident is not None:
            raise WorkerEnded("a worker starts once: make another one")
        _register_host(self)
        self._thread.start()
        try:
            self._ready.result()
        except BaseException:
            self.close(drain=False)
            raise

    def submit_work(self, work: Callable[[WorkerService], Coroutine[Any, Any, T]]) -> Future[T]:
        """Run `work` in the worker's loop.

        Raises:
            WorkerEnded: It has ended; the text says why.
        """
        worker, loop = self.worker, self._loop
        if worker is None or loop is None or not self.is_running:
            raise WorkerEnded(f"the embedded worker does not run: {self._ended}")
        return asyncio.run_coroutine_threadsafe(self._await_guarded(work(worker)), loop)

    async def _await_guarded(self, work: Coroutine[Any, Any, T]) -> T:
        # The worker may end before the work does.
        task = asyncio.ensure_future(work)
        ended = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise WorkerEnded(f"the embedded worker ended during the call: {self._ended}")
            return task.result()
        finally:
            ended.cancel()
            task.cancel()

    @property
    def is_running(self) -> bool:
        """Whether it serves, in this process: a forked child has no threads."""
        return self._thread.is_alive() and self._pid == os.getpid()

    def close(self, *, drain: bool) -> None:
        """Close as `Worker.close` says.

        Raises:
            WorkerEnded: It has not ended in time.
        """
        if not self.is_running:
            return
        self.begin_close(drain=drain)
        seconds = HOST_CLOSE_SECONDS + (self.settings.drain_seconds if drain else 0)
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise WorkerEnded(f"the embedded worker has not ended within {seconds:g} s")

    def begin_close(self, *, drain: bool = False) -> None:
        """Begin to end; returns at once."""
        with self._beginning:
            if self._loop is None:
                self._stop.set()
                return
        with contextlib.suppress(RuntimeError):  # it has ended just now
            self._loop.call_soon_threadsafe(self._request_end, drain)

    def _request_end(self, drain: bool) -> None:
        self._ended = "it was closed"
        if self.worker is not None and not drain:
            self.worker.hurry_shutdown()
        self._stop.set()

    def _run_thread(self) -> None:
        try:
            asyncio.run(self._run_worker())
        except InvalidSettings as error:
            self._report_failure(error)
        except Exception as error:  # a thread would lose it
            logger.exception("the embedded worker broke")
            self._report_failure(WorkerEnded(f"{type(error).__name__}: {error}"))
        finally:
            self._report_failure(WorkerEnded(self._ended))

    def _report_failure(self, error: Exception) -> None:
        if not self._ready.done():
            self._ended = str(error)
            self._ready.set_exception(error)

    async def _run_worker(self) -> None:
        with self._beginning:
            self._loop = asyncio.get_running_loop()
        worker = WorkerService(self.settings, self._make_engine)
        servers = HttpServers(worker, make_authorizer(self.settings))
        self.worker, self.ports = worker, servers.bound_ports
        watching = asyncio.create_task(self._await_loaded(worker))
        cause = await serve_until(self._stop, worker, servers)
        watching.cancel()
        if not self._stop.is_set():
            self._ended = f"no engine works in this process any more: {cause}"
            logger.critical("the embedded worker ended: %s", cause, exc_info=cause)
            self._stop.set()
            await asyncio.sleep(0)  # so that waiting calls learn of it

    async def _await_loaded(self, worker: WorkerService) -> None:
        """Let `start` return once the engine has loaded, or raise if it does not."""
        runtime = worker.runtime
        while not runtime.lifecycle.has_engine:
            if runtime.lifecycle.current_state is Lifecycle.FAILED and runtime.last_error:
                self._report_failure(WorkerEnded(f"the engine did not load: {runtime.last_error}"))
                return
            await runtime.changed.wait_for_change(None)
        if not self._ready.done():
            self._ready.set_result(None)


_hosts: weakref.WeakSet[WorkerHost] = weakref.WeakSet()
_lock = threading.Lock()


def _register_host(host: WorkerHost) -> None:
    """Register a host that has to end before the interpreter does."""
    with _lock:
        kind = host.settings.engine
        if kind in ONE_PER_PROCESS and any(
            o.is_running and o.settings.engine == kind for o in _hosts
        ):
            raise WorkerEnded(
                f"a worker with the {kind} engine runs in this process already: close it first, or"
                " give the second one a process of its own (rollout-worker serve)"
            )
        try:
            _close_at_end()
        except RuntimeError as error:
            raise WorkerEnded(
                f"the interpreter ends, for its main thread has ended ({error}): start the worker before that, and"
                " let the main thread wait for the thread that uses it"
            ) from error
        _hosts.add(host)


@functools.cache
def _close_at_end() -> None:
    # No engine stops in order without the threads of executors, which Python ends before it calls the
    # functions of `atexit`.
    threading._register_atexit(_close_hosts)  # type: ignore[attr-defined]


def _close_hosts() -> None:
    for host in list(_hosts):
        try:
            host.close(drain=False)
        except WorkerEnded as error:
            logger.warning("%s", error)
