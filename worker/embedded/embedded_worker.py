"""The two interfaces of an embedded worker: for plain code, and for code in an event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from functools import wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

from rollout_common.listening_sockets import EVERY_ADDRESS
from rollout_common.wire import InFlightPolicy, PauseRequest, SleepRequest, WorkerState
from rollout_worker.core.holds import SleepLevel
from rollout_worker.engine import Engine, TrainerTensors
from rollout_worker.lifecycle.governor import Mode
from rollout_worker.settings import WorkerSettings
from rollout_worker.sources.tensor_bytes import named, settled

from .handing_over import (
    EMBEDDED_HOLDER,
    HandedOver,
    HandOverOptions,
    get_state,
    hand_over_weights,
    release_hold,
)
from .setting_keywords import settings_from_keywords
from .worker_host import WorkerHost

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    Weights = Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]

P = ParamSpec("P")
T = TypeVar("T")


class _HostCalls:
    """The calls of both interfaces; each begins its work in the worker's thread."""

    def __init__(self, host: WorkerHost) -> None:
        self._host = host

    def hand_over(
        self,
        version: int,
        weights: Weights,
        *,
        epoch: int | None = None,
        copy: bool = False,
        commit: bool | None = None,
        in_flight: InFlightPolicy = "Drain",
        drain_seconds: float = 30,
        deadline_seconds: float = 600,
        labels: Mapping[str, str] | None = None,
    ) -> Future[HandedOver]:
        """Give the worker tensors of this process as the weights of a version; stage and commit them.

        On the hf engine's own device and in its dtype they serve as they are, without a copy: don't
        change them in place before the worker is paused or asleep. No token is made of tensors that were
        changed all the same: the worker refuses to resume, and a running engine ends.

        Args:
            version: Higher than all earlier versions of this epoch.
            weights: A module, a state dict, or pairs of name and tensor: all tensors of the
                checkpoint, under its names, in its dtypes.
            epoch: The trainer's, as `RolloutPool.acquire` gave it; default: the one that serves.
            copy: Copy them, so that the trainer may change them at once.
            commit: Whether to commit; default: yes, unless the worker is in a pool, where only the operator commits.
            in_flight: The policy for running requests, as in a commit.
            drain_seconds: The time that running requests get to finish.
            deadline_seconds: The time that staging may take.
            labels: Kept with the version.

        Raises:
            HandOverFailed: These are not weights of this model, or don't fit into memory; the former weights serve on.
            ProblemError: The order of versions, or the worker's state, forbids it.
            WorkerEnded: The worker has ended.
        """
        asked = HandOverOptions(
            version, epoch, commit, in_flight, drain_seconds, deadline_seconds, labels or {}
        )
        tensors = named(weights)
        settled(tensors)
        given = TrainerTensors(tensors, tensors.clear, copy)
        return self._host.submit_work(lambda worker: hand_over_weights(worker, given, asked))

    def pause(self, mode: Mode = "drain", *, drain_seconds: float = 30) -> Future[None]:
        """Generate nothing until `resume`; keep all memory."""
        asked = PauseRequest(mode=mode, deadline_seconds=drain_seconds)
        return self._host.submit_work(
            lambda worker: worker.verbs.pause_worker(EMBEDDED_HOLDER, asked)
        )

    def sleep(
        self, level: SleepLevel = 2, mode: Mode = "drain", *, drain_seconds: float = 30
    ) -> Future[None]:
        """Generate nothing, and release everything: KV cache, own weights, and the trainer's tensors.

        Level 2 forgets the weights: hand some over before `resume`. Level 1 keeps a copy in a file.
        """
        asked = SleepRequest(level=level, mode=mode, deadline_seconds=drain_seconds)
        return self._host.submit_work(
            lambda worker: worker.verbs.put_to_sleep(EMBEDDED_HOLDER, asked)
        )

    def resume(self) -> Future[None]:
        """End this trainer's `pause` or `sleep`; returns once the worker serves.

        Raises:
            ProblemError: Its weights are gone or were changed: hand some over first. Or other callers hold it.
        """
        return self._host.submit_work(release_hold)

    def state(self) -> Future[WorkerState]:
        """What the control port's `GET /v1/state` says."""
        return self._host.submit_work(get_state)


def _block_until(
    begin: Callable[Concatenate[_HostCalls, P], Future[T]],
) -> Callable[Concatenate[Worker, P], T]:
    """Return a method that blocks until the work of a call has ended."""

    @wraps(begin)
    def call(worker: Worker, /, *args: P.args, **kwargs: P.kwargs) -> T:
        future = begin(worker._calls, *args, **kwargs)
        try:
            return future.result()
        except BaseException:  # such as Ctrl-C while it waits
            future.cancel()
            raise

    return call


def _await_until(
    begin: Callable[Concatenate[_HostCalls, P], Future[T]],
) -> Callable[Concatenate[AsyncWorker, P], Coroutine[Any, Any, T]]:
    """Return a coroutine method that waits until the work of a call has ended."""

    @wraps(begin)
    async def call(worker: AsyncWorker, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.wrap_future(begin(worker._calls, *args, **kwargs))

    return call


class _EmbeddedBase:
    """What both interfaces share: settings, addresses, the thread."""

    _make_engine: Callable[[], Engine] | None = None

    def __init__(self, **settings: object) -> None:
        """Check the settings; nothing runs before the `with` block begins.

        Args:
            settings: The flags of `rollout-worker serve`, such as `max_length` for `--max-length`. A
                setting that is None or missing comes from its variable, such as `ROLLOUT_POOL`.

        Raises:
            TypeError: A setting does not exist.
            InvalidSettings: Names the setting and the fix.
        """
        self._host = WorkerHost(settings_from_keywords(settings, os.environ), self._make_engine)
        self._calls = _HostCalls(self._host)

    @property
    def settings(self) -> WorkerSettings:
        """The checked settings."""
        return self._host.settings

    @property
    def data_url(self) -> str:
        """The URL of the data port, for a client on this machine."""
        return self._url_of(self.settings.data_host, self._host.ports[0], tls=False)

    @property
    def control_url(self) -> str:
        """The URL of the control port, for a caller on this machine."""
        tls = self.settings.control_tls_cert_file is not None
        return self._url_of(self.settings.control_host, self._host.ports[1], tls=tls)

    @staticmethod
    def _url_of(host: str, port: int, *, tls: bool) -> str:
        host = "127.0.0.1" if host in (EVERY_ADDRESS, "0.0.0.0") else host
        name = f"[{host}]" if ":" in host else host
        return f"http{'s' if tls else ''}://{name}:{port}"

    @property
    def running(self) -> bool:
        """Whether it serves; False once it has ended, also by itself."""
        return self._host.is_running


class Worker(_EmbeddedBase):
    """A worker in this process, for plain code. `AsyncWorker` is the same within an event loop."""

    def __enter__(self) -> Self:
        """Open the ports, load the engine.

        Raises:
            InvalidSettings: A port or the credentials can't be used.
            WorkerEnded: The engine can't be loaded.
        """
        self._host.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close; after an error, running requests are aborted."""
        self.close(drain=error is None)

    def close(self, *, drain: bool = True) -> None:
        """Close the ports, stop the engine, end the threads. Idempotent.

        Args:
            drain: Let running requests finish, within `drain_seconds`; else they end as aborted.
        """
        self._host.close(drain=drain)

    hand_over = _block_until(_HostCalls.hand_over)
    pause = _block_until(_HostCalls.pause)
    sleep = _block_until(_HostCalls.sleep)
    resume = _block_until(_HostCalls.resume)
    state = _block_until(_HostCalls.state)

    @contextmanager
    def turn(self, *, level: SleepLevel = 2) -> Iterator[None]:
        """Sleep during a block, in which the trainer uses the device and hands new weights over.

        After an error in the block the worker stays asleep.
        """
        self.sleep(level)
        yield
        self.resume()


class AsyncWorker(_EmbeddedBase):
    """A worker in this process, for code in an event loop. `Worker` documents each call."""

    async def __aenter__(self) -> Self:
        """Open the ports, load the engine; a cancelled caller leaves no worker behind."""
        starting = asyncio.ensure_future(asyncio.to_thread(self._host.start))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            self._host.begin_close()
            await asyncio.wait({starting})
            starting.exception()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close; after an error, running requests are aborted."""
        await self.close(drain=error is None)

    async def close(self, *, drain: bool = True) -> None:
        """As `Worker.close`."""
        await asyncio.shield(asyncio.to_thread(self._host.close, drain=drain))

    hand_over = _await_until(_HostCalls.hand_over)
    pause = _await_until(_HostCalls.pause)
    sleep = _await_until(_HostCalls.sleep)
    resume = _await_until(_HostCalls.resume)
    state = _await_until(_HostCalls.state)

    @asynccontextmanager
    async def turn(self, *, level: SleepLevel = 2) -> AsyncIterator[None]:
        """As `Worker.turn`."""
        await self.sleep(level)
        yield
        await self.resume()
