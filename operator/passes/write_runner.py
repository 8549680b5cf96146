"""Sends the writes of a pass so that each stands alone: an obstacle of one hinders no other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from rollout_common.kube.errors import FencedError, KubeError, Unavailable
from rollout_operator.api.objects import PoolKey
from rollout_operator.pool_page import FAILED_WRITES

from .pass_context import PassContext
from .write_obstacles import WriteObstacle, WriteObstacles

logger = logging.getLogger(__name__)

MAX_WRITES_IN_FLIGHT = 12
"""Writes of one pass at once. Another pool's call waits for all of them at every step of the event
loop, and a pass that creates 500 pods must not make it late."""

LARGEST_BATCH = 256
"""Most creates of one batch; a pass ends after it: a pool of thousands would hear nothing for minutes, whatever happens to it."""

SILENT_KINDS_OF_DEAD_SERVER = 2
"""When requests of so many kinds got no answer, and none got one, the API server counts as dead. If
only one kind got none, a hung admission webhook is more likely."""

T = TypeVar("T")


class WriteRunner:
    """Runs the writes of one pass; it raises what ends a pass: the fence, and a dead API server."""

    def __init__(self, ctx: PassContext, key: PoolKey, obstacles: WriteObstacles | None) -> None:
        self.ctx = ctx
        self.key = key
        self.obstacles = WriteObstacles() if obstacles is None else obstacles
        self.extra = {"pool": str(key)}
        self._limit = asyncio.Semaphore(MAX_WRITES_IN_FLIGHT)
        self._answers = 0
        self._silent: set[tuple[str, str]] = set()

    async def run_all(self, writes: Iterable[Coroutine[Any, Any, object]]) -> None:
        """Run writes, a bounded number at once; raise what ends the pass once all have ended."""

        async def bounded(write: Coroutine[Any, Any, object]) -> None:
            async with self._limit:
                await write

        results = await asyncio.gather(*(bounded(w) for w in writes), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def slow_start_batch(
        self,
        kind: str,
        writes: Mapping[str, Callable[[], Coroutine[Any, Any, object]]],
        goes_on: Callable[[], bool],
    ) -> None:
        """Do one of these writes, by label, then two, four, …, until one is refused.

        No more than 511 of them, and none once `goes_on` says no. The rest is for later passes: what the user changes, and
        failures and gates of pods that are there, have their turn in between.

        An exhausted quota or a webhook that is down refuses all: the rest of the kind waits some seconds,
        and then those that were never tried come first.
        """
        found = self.obstacles
        now, held = self.ctx.monotonic(), found.get(kind)
        if found.is_waiting(kind, now) and held is not None:
            found.hold_back(writes, held.due)
            return
        due = sorted((x for x in writes if not found.is_waiting(x, now)), key=found.retry_order)
        if not due:
            # Each write waits for a time of its own, or there is none: no pass waits for the kind.
            found.clear_obstacle(kind)
        size = 1
        while due and size <= LARGEST_BATCH and goes_on():
            batch, due = due[:size], due[size:]
            await self.run_all(writes[label]() for label in batch)
            refused = [label for label in batch if found.is_refused(label)]
            if refused:
                found.hold_kind(kind, refused[0], due, self.ctx.monotonic())
                return
            found.clear_obstacle(kind)
            size *= 2

    async def run_guarded(
        self, label: str, what: str, request: tuple[str, str], write: Callable[[], Awaitable[T]]
    ) -> T | None:
        """Do one write, unless it was refused a short while ago; None: not done.

        `label` names it in `obstacles`, `what` in sentences, and `request`, its verb and resource, in the metric.
        """
        if self.obstacles.is_waiting(label, self.ctx.monotonic()):
            return None
        self.check_alive()
        before = self.obstacles.get(label)
        try:
            done = await write()
        except FencedError:
            raise
        except KubeError as error:
            self.note_failure(label, what, request, error)
            return None
        self._answers += 1
        if self.obstacles.get(label) is before:
            self.obstacles.clear_obstacle(label)
        return done

    def check_alive(self) -> None:
        """Raise `Unavailable` if the API server is dead, as far as this pass has seen."""
        if len(self._silent) >= SILENT_KINDS_OF_DEAD_SERVER and not self._answers:
            raise Unavailable(0, "NoAnswer", "the API server answers nothing; trying again later")

    def note_failure(
        self, label: str, what: str, request: tuple[str, str], error: KubeError
    ) -> WriteObstacle:
        """Note that the API server did not do this write; log and count what is worth a report."""
        met = self.obstacles.note_failed_write(label, what, error, self.ctx.monotonic())
        if error.status:
            self._answers += 1
        else:
            self._silent.add(request)
        if met.reason:
            logger.warning("%s", met.text, extra=self.extra)
            verb, resource = request
            labels = {"verb": verb, "resource": resource, "reason": met.reason}
            self.ctx.telemetry.pools.count_event(self.key, FAILED_WRITES, **labels)
        return met
