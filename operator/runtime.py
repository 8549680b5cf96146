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
from collections.abc import Callable, Coroutine
from typing import Any

from .cache.feed import RELIST_SECONDS
from .config import Config, ConfigError
from .health import LoopLag, Probes
from .kube.lease import LeadershipLost
from .passes.context import Context, Reconcile
from .wiring import Parts

logger = logging.getLogger(__name__)

SILENT_SECONDS = 60.0
"""The election's every step has a deadline, so a minute of silence means that it is stuck."""

QUEUE_AGE_SECONDS = 60.0
FINISH_SECONDS = 8.0
"""Time that running passes get at the end; the whole shutdown stays below 25 s."""

STREAMS_SECONDS = 4.0
FENCE_TICK_SECONDS = 0.25

LOST, DIED = "lost", "died"


class Operator:
    """One operator process; see the module.

    Args:
        config: The settings.
        make_reconcile: Makes the pass from the context.
        embedded: False under `kopf run`, where kopf's handlers feed `feed`.
        make_parts: Makes the parts from the settings, `make_reconcile` and `spawned`.
    """

    def __init__(
        self,
        config: Config,
        make_reconcile: Callable[[Context], Reconcile],
        *,
        embedded: bool = True,
        make_parts: Callable[..., Parts] = Parts,
    ) -> None:
        self._config = config
        self._embedded = embedded
        self._parts = make_parts(config, make_reconcile, spawned=self.handle_signals)
        self.feed = self._parts.feed
        self._lag = LoopLag()
        self._probes = Probes(
            self._parts.telemetry,
            healthy=[self._lag.check, self._dead_task, self._stuck_election],
            ready=[self._parts.installed.check, self._leads_badly],
            refresh=self._refresh_metrics,
        )
        self.port = 0
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ended: asyncio.Queue[asyncio.Task[None] | None] = asyncio.Queue()

    def handle_signals(self) -> None:
        """Make SIGTERM and SIGINT shut `run` down gracefully (only in a main thread)."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            try:
                loop.add_signal_handler(signum, self.stop)
            except (RuntimeError, ValueError):
                return  # not the main thread: whoever runs us there stops us

    def stop(self) -> None:
        """Ask `run` to shut down gracefully."""
        self._ended.put_nowait(None)

    async def run(self) -> int:
        """Run until `stop` (returns 0), or until the Lease is lost or a task died (1).

        Raises:
            ConfigError: The port for metrics and probes is not available.
        """
        host, port = self._config.http_host, self._config.http_port
        try:
            self.port = await self._probes.start(host, port)
        except OSError as error:
            raise ConfigError(f"--http-port: can't listen on {host}:{port}: {error}") from error
        logger.info("serving metrics and probes", extra={"port": self.port})
        self._start("loop lag", self._lag.run())
        self._start("installed schema", self._parts.installed.run())
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
        await self._parts.leadership.acquire()
        self._start("lease", self._parts.leadership.hold())
        self._start("fence", self._watch_fence())
        self._start("events", self._parts.recorder.run())
        await self._parts.resync.first()
        logger.info("the first list is complete", extra={"known": self._parts.store.counts()})
        if self._embedded:
            self._start("streams", self._parts.streams.run())
        self._start("poller", self._parts.poller.run())
        self._start("resync", self._parts.resync.run())
        self._start("neighbours", self._parts.neighbours.run())
        self._start("passes", self._parts.passes.run())
        self._parts.resync.soon(RELIST_SECONDS)  # what went between the list and the streams' start

    async def _watch_fence(self) -> None:
        """Cancel running calls as soon as this process may not act; look again when it may."""
        could = True
        while True:
            await asyncio.sleep(FENCE_TICK_SECONDS)
            can = self._parts.leadership.may_write()
            if could and not can:
                logger.error("fenced: the Lease was not renewed in time; writes are suspended")
                await self._parts.calls.cancel_all()
            elif can and not could:
                logger.warning("the Lease is renewed: resuming writes")
                self._parts.resync.soon(0)
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
            logger.critical("lost leadership: %s", error)
            return LOST
        logger.critical("the task %r ended unexpectedly", task.get_name(), exc_info=error)
        return DIED

    async def _end_well(self) -> None:
        if "passes" not in self._tasks:
            self._tasks["leading"].cancel()
        await self._parts.passes.finish(self._tasks.get("passes"), FINISH_SECONDS)
        await self._parts.calls.cancel_all()
        if events := self._tasks.get("events"):
            await self._parts.recorder.flush(events)
        await self._cancel("leading", "lease", "poller", "resync", "neighbours", "fence")
        await self._parts.leadership.release()
        await self._stop_streams()
        await self._close()

    async def _end_badly(self, reason: str) -> None:
        """End at once: a successor may be working already."""
        await self._cancel("passes", "poller", "resync", "neighbours", "leading", "lease", "events")
        await self._parts.calls.cancel_all()
        if reason == DIED:
            await self._parts.leadership.release()
        await self._cancel(*self._tasks)

    async def _stop_streams(self) -> None:
        self._parts.streams.stop()
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
        await self._parts.connections.close()
        await self._parts.kube.close()

    def _dead_task(self) -> str | None:
        for name, task in self._tasks.items():
            if task.done() and name != "leading":
                return f"the task {name!r} has ended"
        return None

    def _stuck_election(self) -> str | None:
        if self._parts.leadership.silent_seconds() > SILENT_SECONDS:
            return "the loop that renews the Lease is stuck"
        return None

    def _leads_badly(self) -> str | None:
        """Return what keeps a leader from working; a standby has nothing to do."""
        if not self._parts.leadership.held():
            return None
        if not self._parts.leadership.may_write():
            return "fenced: can't renew the Lease"
        age = self._parts.resync.age()
        if age is None:
            return "the first list is not complete"
        if age > 2 * self._parts.resync.interval + RELIST_SECONDS:
            return f"the last full list was {age:.0f} s ago"
        waited = self._parts.queue.oldest_age()
        if waited > QUEUE_AGE_SECONDS:
            return f"a pool has waited {waited:.0f} s to be reconciled"
        return None

    def _refresh_metrics(self) -> None:
        self._parts.telemetry.leader.set(self._parts.leadership.held())
        self._parts.telemetry.queue_depth.set(self._parts.queue.depth())
        self._parts.telemetry.event_loop_lag.set(self._lag.worst())
