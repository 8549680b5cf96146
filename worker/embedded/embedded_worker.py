"""The two interfaces of an embedded worker: for plain code, and for code in an event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from rollout_common.listening_sockets import EVERY_ADDRESS
from rollout_common.wire import WorkerState
from rollout_worker import service
from rollout_worker.engine import Engine, TrainerTensors
from rollout_worker.lifecycle.governor import Mode
from rollout_worker.settings import WorkerSettings
from rollout_worker.sources.tensor_bytes import named, settled

from . import handing_over
from .handing_over import HandedOver, HandOverOptions
from .setting_keywords import settings_from_keywords
from .worker_host import WorkerHost

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    Weights = Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]

T = TypeVar("T")

InFlight = Literal["Drain", "Abort", "Keep", "Recompute", "Pin"]


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

    def _hand_over_work(
        self, weights: Weights, copy: bool, asked: HandOverOptions
    ) -> Callable[[service.WorkerService], Coroutine[Any, Any, HandedOver]]:
        tensors = named(weights)
        settled(tensors)
        given = TrainerTensors(tensors, tensors.clear, copy)
        return lambda worker: handing_over.hand_over_weights(worker, given, asked)


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

    def _run_in_host(self, work: Callable[[service.WorkerService], Coroutine[Any, Any, T]]) -> T:
        future = self._host.submit_work(work)
        try:
            return future.result()
        except BaseException:  # such as Ctrl-C while it waits
            future.cancel()
            raise

    def hand_over(
        self,
        version: int,
        weights: Weights,
        *,
        epoch: int | None = None,
        copy: bool = False,
        commit: bool | None = None,
        in_flight: InFlight = "Drain",
        drain_seconds: float = 30,
        deadline_seconds: float = 600,
        labels: Mapping[str, str] | None = None,
    ) -> HandedOver:
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
        return self._run_in_host(self._hand_over_work(weights, copy, asked))

    def pause(self, mode: Mode = "drain", *, drain_seconds: float = 30) -> None:
        """Generate nothing until `resume`; keep all memory."""
        self._run_in_host(lambda worker: handing_over.pause_worker(worker, mode, drain_seconds))

    def sleep(
        self, level: Literal[1, 2] = 2, mode: Mode = "drain", *, drain_seconds: float = 30
    ) -> None:
        """Generate nothing, and release everything: KV cache, own weights, and the trainer's tensors.

        Level 2 forgets the weights: hand some over before `resume`. Level 1 keeps a copy in a file.
        """
        self._run_in_host(
            lambda worker: handing_over.put_to_sleep(worker, level, mode, drain_seconds)
        )

    def resume(self) -> None:
        """End this trainer's `pause` or `sleep`; returns once the worker serves.

        Raises:
            ProblemError: Its weights are gone or were changed: hand some over first. Or other callers hold it.
        """
        self._run_in_host(handing_over.release_hold)

    @contextmanager
    def turn(self, *, level: Literal[1, 2] = 2) -> Iterator[None]:
        """Sleep during a block, in which the trainer uses the device and hands new weights over.

        After an error in the block the worker stays asleep.
        """
        self.sleep(level)
        yield
        self.resume()

    def state(self) -> WorkerState:
        """What the control port's `GET /v1/state` says."""
        return self._run_in_host(handing_over.get_state)


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

    async def _run_in_host(
        self, work: Callable[[service.WorkerService], Coroutine[Any, Any, T]]
    ) -> T:
        return await asyncio.wrap_future(self._host.submit_work(work))

    async def hand_over(
        self,
        version: int,
        weights: Weights,
        *,
        epoch: int | None = None,
        copy: bool = False,
        commit: bool | None = None,
        in_flight: InFlight = "Drain",
        drain_seconds: float = 30,
        deadline_seconds: float = 600,
        labels: Mapping[str, str] | None = None,
    ) -> HandedOver:
        """As `Worker.hand_over`."""
        asked = HandOverOptions(
            version, epoch, commit, in_flight, drain_seconds, deadline_seconds, labels or {}
        )
        return await self._run_in_host(self._hand_over_work(weights, copy, asked))

    async def pause(self, mode: Mode = "drain", *, drain_seconds: float = 30) -> None:
        """As `Worker.pause`."""
        await self._run_in_host(
            lambda worker: handing_over.pause_worker(worker, mode, drain_seconds)
        )

    async def sleep(
        self, level: Literal[1, 2] = 2, mode: Mode = "drain", *, drain_seconds: float = 30
    ) -> None:
        """As `Worker.sleep`."""
        await self._run_in_host(
            lambda worker: handing_over.put_to_sleep(worker, level, mode, drain_seconds)
        )

    async def resume(self) -> None:
        """As `Worker.resume`."""
        await self._run_in_host(handing_over.release_hold)

    @asynccontextmanager
    async def turn(self, *, level: Literal[1, 2] = 2) -> AsyncIterator[None]:
        """As `Worker.turn`."""
        await self.sleep(level)
        yield
        await self.resume()

    async def state(self) -> WorkerState:
        """As `Worker.state`."""
        return await self._run_in_host(handing_over.get_state)
