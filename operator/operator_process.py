"""The operator process: how its parts start, what watches them, and how it ends.

    standby ──Lease──▶ leader: informer → first lists → stream (kopf) + N workers + poller + events
                       └─ Lease lost: exit at once, 1      └─ SIGTERM: finish passes, release, exit 0

Normally kopf runs inside (`kopf_streams.py`); under `kopf run` it is the other way round and
`handlers.py` starts this with `embedded=False`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from .cache.settings import RELIST_DELAY_SECONDS
from .config import ConfigError, OperatorConfig
from .heap_freezing import keep_heap_frozen
from .kube.shard_lease import LeadershipLost
from .passes.pass_context import PassContext, ReconcileFunction
from .probe_server import LoopLag, ProbeServer
from .settings import (
    ELECTION_SILENCE_SECONDS,
    FENCE_TICK_SECONDS,
    MAX_QUEUE_AGE_SECONDS,
    PASSES_DRAIN_SECONDS,
    STREAMS_STOP_SECONDS,
    SWITCH_SECONDS,
)
from .wiring import OperatorParts

logger = logging.getLogger(__name__)

LEASE_LOST, TASK_DIED = "lost", "died"


class Operator:
    """One operator process; see the module.

    It is not `embedded` under `kopf run`, where kopf's handlers call `take_pool_event`. `make_parts` is `OperatorParts`, or a
    test's.
    """

    def __init__(
        self,
        config: OperatorConfig,
        make_reconcile: Callable[[PassContext], ReconcileFunction],
        *,
        embedded: bool = True,
        make_parts: Callable[..., OperatorParts] = OperatorParts,
    ) -> None:
        self._config = config
        self._embedded = embedded
        self._parts = make_parts(config, make_reconcile, spawned=self.handle_signals)
        self.take_pool_event = self._parts.informer.take_pool_event
        self._lag = LoopLag()
        self._probes = ProbeServer(
            self._parts.telemetry,
            healthy=[self._lag.check_lag, self._check_tasks, self._check_election],
            ready=[self._parts.installed.schema_problem, self._check_leading],
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
                return  # not the main thread: its owner calls `stop`

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
        sys.setswitchinterval(SWITCH_SECONDS)
        self._start_task("loop lag", self._lag.run())
        self._start_task("installed schema", self._parts.installed.run())
        self._start_task("heap", keep_heap_frozen())
        self._start_task("leading", self._start_leading())
        while True:
            ended = await self._ended.get()
            if ended is None:
                logger.info("stopping")
                await self._stop_gracefully()
                return 0
            reason = self._exit_reason(ended)
            if reason is not None:
                await self._stop_at_once(reason)
                return 1

    async def _start_leading(self) -> None:
        await self._parts.leadership.acquire_lease()
        self._start_task("lease", self._parts.leadership.hold_lease())
        self._start_task("fence", self._watch_fence())
        self._start_task("events", self._parts.recorder.run())
        self._start_task("informer", self._parts.informer.run())
        await self._parts.informer.wait_listed()
        gc.freeze()  # what was listed has no cycles: to look for some would take a second
        logger.info(
            "the first list is complete", extra={"known": self._parts.store.object_counts()}
        )
        if self._embedded:
            self._start_task("streams", self._parts.streams.run())
        self._start_task("poller", self._parts.poller.run())
        self._start_task("neighbours", self._parts.neighbours.run())
        self._start_task("gangs", self._parts.gangs.run())
        self._start_task("passes", self._parts.passes.run())
        # What went between the list and the stream's start.
        self._parts.informer.schedule_pool_list(RELIST_DELAY_SECONDS)

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
                self._parts.informer.schedule_pool_list(0)
            could = can

    def _start_task(self, name: str, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine, name=name)
        self._tasks[name] = task
        task.add_done_callback(self._ended.put_nowait)

    def _exit_reason(self, task: asyncio.Task[None]) -> str | None:
        """Return why the end of a task ends the process; None if it need not."""
        if task.cancelled():
            return None
        error = task.exception()
        if error is None and task.get_name() == "leading":
            return None  # everything is started
        if isinstance(error, LeadershipLost):
            logger.critical("lost leadership: %s", error)
            return LEASE_LOST
        logger.critical("the task %r ended unexpectedly", task.get_name(), exc_info=error)
        return TASK_DIED

    async def _stop_gracefully(self) -> None:
        if "passes" not in self._tasks:
            self._tasks["leading"].cancel()
        await self._parts.passes.drain_passes(self._tasks.get("passes"), PASSES_DRAIN_SECONDS)
        await self._parts.calls.cancel_all()
        if events := self._tasks.get("events"):
            await self._parts.recorder.flush_events(events)
        await self._cancel_tasks(
            "leading", "lease", "poller", "informer", "neighbours", "gangs", "fence"
        )
        await self._parts.leadership.release_lease()
        await self._stop_streams()
        await self._close_parts()

    async def _stop_at_once(self, reason: str) -> None:
        """End at once: a successor may be working already."""
        await self._cancel_tasks(
            "passes", "poller", "informer", "neighbours", "gangs", "leading", "lease", "events"
        )
        await self._parts.calls.cancel_all()
        if reason == TASK_DIED:
            await self._parts.leadership.release_lease()
        await self._cancel_tasks(*self._tasks)

    async def _stop_streams(self) -> None:
        self._parts.streams.stop()
        if streams := self._tasks.get("streams"):
            await asyncio.wait({streams}, timeout=STREAMS_STOP_SECONDS)

    async def _cancel_tasks(self, *names: str) -> None:
        tasks = {self._tasks[name] for name in names if name in self._tasks}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1)

    async def _close_parts(self) -> None:
        await self._cancel_tasks(*self._tasks)
        await self._probes.stop()
        await self._parts.connections.close()
        await self._parts.kube.close()

    def _check_tasks(self) -> str | None:
        for name, task in self._tasks.items():
            if task.done() and name != "leading":
                return f"the task {name!r} has ended"
        return None

    def _check_election(self) -> str | None:
        if self._parts.leadership.silent_seconds() > ELECTION_SILENCE_SECONDS:
            return "the loop that renews the Lease is stuck"
        return None

    def _check_leading(self) -> str | None:
        """Return what keeps a leader from working; a standby has nothing to do, but must be able to lead."""
        if not self._parts.leadership.has_lease():
            return self._parts.leadership.standby_problem
        if not self._parts.leadership.may_write():
            return "fenced: can't renew the Lease"
        age = self._parts.informer.oldest_list_age()
        if age is None:
            why = self._parts.informer.first_problem()
            return f"the first list is not complete{why and ': '}{why or ''}"
        if age > 2 * self._parts.informer.interval + RELIST_DELAY_SECONDS:
            return f"the last full list was {age:.0f} s ago"
        waited = self._parts.queue.oldest_age()
        if waited > MAX_QUEUE_AGE_SECONDS:
            return f"a pool has waited {waited:.0f} s to be reconciled"
        return None

    def _refresh_metrics(self) -> None:
        self._parts.telemetry.shards.set(self._parts.leadership.shards)
        self._parts.telemetry.leader.set(self._parts.leadership.has_lease())
        self._parts.telemetry.queue_depth.set(self._parts.queue.due_count())
        self._parts.telemetry.event_loop_lag.set(self._lag.worst_lag())
