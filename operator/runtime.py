"""The operator process: who starts what, who watches whom, and how it ends.

    standby ──Lease──▶ leader: first list → streams (kopf) + N workers + poller + resync + events
                       └─ Lease lost: exit at once, 1      └─ SIGTERM: finish passes, release, exit 0

Normally kopf runs inside (`streams.py`); under `kopf run` it is the other way round and
`handlers.py` starts this with `embedded=False`.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

from rollout_client.control import ControlError, WorkerControl
from rollout_operator.api.objects import Key
from rollout_worker.schemas import WorkerState

from .api.names import audience
from .cache.expectations import Expectations
from .cache.feed import RELIST_SECONDS, Feed
from .cache.resync import Resync
from .cache.store import Store
from .cache.streams import Streams
from .cache.workqueue import WorkQueue
from .config import Config, ConfigError
from .health import LoopLag, Probes
from .kube.client import Kube
from .kube.events import Recorder
from .kube.lease import Leadership, LeadershipLost, SoleLeader
from .passes.context import Context, Reconcile
from .passes.loop import Passes
from .telemetry import Telemetry
from .workers.calls import Calls
from .workers.connections import Connections
from .workers.poller import Poller
from .workers.talk import Workers

logger = logging.getLogger(__name__)

SILENT_SECONDS = 60.0
"""The election's every step has a deadline, so a minute of silence means that it is stuck."""

QUEUE_AGE_SECONDS = 60.0
FINISH_SECONDS = 8.0
"""What running passes get at the end; with all the rest it stays below 25 s."""

STREAMS_SECONDS = 4.0
FENCE_TICK_SECONDS = 0.25

LOST, DIED = "lost", "died"


class Operator:
    """One operator process; see the module.

    Args:
        config: The settings.
        make_reconcile: Makes the pass from the context.
        embedded: False where kopf runs around us and feeds `feed`.
    """

    def __init__(
        self,
        config: Config,
        make_reconcile: Callable[[Context], Reconcile],
        *,
        embedded: bool = True,
    ) -> None:
        self._config = config
        self._embedded = embedded
        self.telemetry = Telemetry()
        self.kube = Kube(on_request=self.telemetry.request, service_account=config.account())
        self.leadership = _leadership(config, self.kube)
        self.kube.fence_with(self.leadership.write_seconds)
        self._wire(make_reconcile)
        self.port = 0
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ended: asyncio.Queue[asyncio.Task[None] | None] = asyncio.Queue()

    def _wire(self, make_reconcile: Callable[[Context], Reconcile]) -> None:
        config, telemetry = self._config, self.telemetry
        self._connections = Connections()
        self.store = Store()
        self.expectations = Expectations(
            on_timeout=lambda resource: telemetry.expectation_timeouts.labels(resource).inc()
        )
        self.queue: WorkQueue[Key] = WorkQueue(on_wait=telemetry.queue_wait.observe)
        self.poller = Poller(self._ask, lambda key: self.feed.part_changed(key))
        may_write = self.leadership.may_write
        self.calls = Calls(self.queue.add, after=self.poller.refresh, may_start=may_write)
        self.recorder = Recorder(self.kube, instance=config.pod_name)
        self.resync = Resync(
            self.kube,
            self.store,
            self.expectations,
            self.queue,
            telemetry,
            namespaces=config.watch_namespaces,
            interval=config.resync_seconds,
        )
        self.feed = Feed(self.store, self.expectations, self.queue, telemetry, self.resync)
        self.streams = Streams(
            self.feed,
            namespaces=config.watch_namespaces,
            spawned=self.handle_signals,
            listed=self.resync.first,
        )
        reconcile = make_reconcile(self._context())
        self.passes = Passes(
            reconcile, self.queue, telemetry, workers=config.workers, may_run=may_write
        )
        self._lag = LoopLag()
        self._probes = Probes(
            telemetry,
            healthy=[self._lag.check, self._dead_task, self._stuck_election],
            ready=[self._leads_badly],
            refresh=self._refresh_metrics,
        )

    def _context(self) -> Context:
        return Context(
            config=self._config,
            store=self.store,
            expectations=self.expectations,
            kube=self.kube,
            workers=Workers(self.poller, self.calls, self.control),
            recorder=self.recorder,
            telemetry=self.telemetry,
            queue=self.queue,
            clock=time.time,
            fence=self.leadership.may_write,
        )

    def control(self, key: Key, address: str) -> WorkerControl:
        """Return the client of a worker's control port at `host:port`."""

        async def token() -> str | None:
            if self._config.service_account is None:
                return None  # a worker that wants one says so
            return await self.kube.token(audience(key.namespace, key.name))

        return WorkerControl(f"http://{address}", token, self._connections.send)

    def handle_signals(self) -> None:
        """Let SIGTERM and SIGINT end `run` in an orderly way (only in a main thread)."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            try:
                loop.add_signal_handler(signum, self.stop)
            except (RuntimeError, ValueError):
                return  # not the main thread: whoever runs us there stops us

    def stop(self) -> None:
        """Ask `run` to end in an orderly way."""
        self._ended.put_nowait(None)

    async def run(self) -> int:
        """Run until `stop` (returns 0), or until the Lease is lost or a task died (1).

        Raises:
            ConfigError: The port of metrics and probes can't be had.
        """
        host, port = self._config.http_host, self._config.http_port
        try:
            self.port = await self._probes.start(host, port)
        except OSError as error:
            raise ConfigError(
                f"--http-port: {host}:{port} can't be listened on: {error}"
            ) from error
        logger.info("serving metrics and probes", extra={"port": self.port})
        self._start("loop lag", self._lag.run())
        self._start("leading", self._lead())
        while True:
            ended = await self._ended.get()
            if ended is None:
                logger.info("stopping")
                await self._end_well()
                return 0
            reason = self._judge(ended)
            if reason is not None:
                await self._end_badly(reason)
                return 1

    async def _lead(self) -> None:
        await self.leadership.acquire()
        self._start("lease", self.leadership.hold())
        self._start("fence", self._watch_fence())
        self._start("events", self.recorder.run())
        await self.resync.first()
        logger.info("the first list is complete", extra={"known": self.store.counts()})
        if self._embedded:
            self._start("streams", self.streams.run())
        self._start("poller", self.poller.run())
        self._start("resync", self.resync.run())
        self._start("passes", self.passes.run())
        self.resync.soon(RELIST_SECONDS)  # what went between the list and the streams' start

    async def _watch_fence(self) -> None:
        """Cut running calls off as soon as this process may not act, and look again when it may."""
        could = True
        while True:
            await asyncio.sleep(FENCE_TICK_SECONDS)
            can = self.leadership.may_write()
            if could and not can:
                logger.error("fenced: the Lease was not renewed in time; nothing is written")
                await self.calls.cancel_all()
            elif can and not could:
                logger.warning("the Lease is renewed: going on")
                self.resync.soon(0)
            could = can

    def _start(self, name: str, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine, name=name)
        self._tasks[name] = task
        task.add_done_callback(self._ended.put_nowait)

    def _judge(self, task: asyncio.Task[None]) -> str | None:
        """Return why the end of a task ends the process; None if it need not."""
        if task.cancelled():
            return None
        error = task.exception()
        if error is None and task.get_name() == "leading":
            return None  # everything is started
        if isinstance(error, LeadershipLost):
            logger.critical("leadership is lost: %s", error)
            return LOST
        logger.critical("the task %r ended", task.get_name(), exc_info=error)
        return DIED

    async def _end_well(self) -> None:
        if "passes" not in self._tasks:
            self._tasks["leading"].cancel()
        await self.passes.finish(self._tasks.get("passes"), FINISH_SECONDS)
        await self.calls.cancel_all()
        if events := self._tasks.get("events"):
            await self.recorder.flush(events)
        await self._cancel("leading", "lease", "poller", "resync", "fence")
        await self.leadership.release()
        await self._stop_streams()
        await self._close()

    async def _end_badly(self, reason: str) -> None:
        """End at once: a successor may be at work already."""
        await self._cancel("passes", "poller", "resync", "leading", "lease", "events")
        await self.calls.cancel_all()
        if reason == DIED:
            await self.leadership.release()
        await self._cancel(*self._tasks)

    async def _stop_streams(self) -> None:
        self.streams.stop()
        if streams := self._tasks.get("streams"):
            await asyncio.wait({streams}, timeout=STREAMS_SECONDS)

    async def _cancel(self, *names: str) -> None:
        tasks = {self._tasks[name] for name in names if name in self._tasks}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1)

    async def _close(self) -> None:
        await self._cancel(*self._tasks)
        await self._probes.stop()
        await self._connections.close()
        await self.kube.close()

    async def _ask(self, key: Key, address: str) -> WorkerState:
        try:
            return await self.control(key, address).state()
        except ControlError as error:
            if error.status == 401:
                self.kube.forget_token(audience(key.namespace, key.name))
            raise

    def _dead_task(self) -> str | None:
        for name, task in self._tasks.items():
            if task.done() and name != "leading":
                return f"the task {name!r} has ended"
        return None

    def _stuck_election(self) -> str | None:
        if self.leadership.silent_seconds() > SILENT_SECONDS:
            return "the loop that renews the Lease is stuck"
        return None

    def _leads_badly(self) -> str | None:
        """Return what keeps a leader from its work; a standby has none to do."""
        if not self.leadership.held():
            return None
        if not self.leadership.may_write():
            return "the Lease could not be renewed: fenced"
        age = self.resync.age()
        if age is None:
            return "the first list is not complete"
        if age > 2 * self.resync.interval + RELIST_SECONDS:
            return f"the last whole list was {age:.0f} s ago"
        waited = self.queue.oldest_age()
        if waited > QUEUE_AGE_SECONDS:
            return f"a pool has waited {waited:.0f} s for a worker"
        return None

    def _refresh_metrics(self) -> None:
        self.telemetry.leader.set(self.leadership.held())
        self.telemetry.queue_depth.set(self.queue.depth())
        self.telemetry.event_loop_lag.set(self._lag.worst())


def _leadership(config: Config, kube: Kube) -> Leadership | SoleLeader:
    if not config.leader_elect:
        return SoleLeader()
    return Leadership(
        kube,
        namespace=config.lease_namespace,
        name=config.lease_name,
        identity=f"{config.pod_name}_{uuid.uuid4()}",
    )
