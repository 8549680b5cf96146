"""The tasks that take keys from the queue and run passes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from rollout_common.kube.errors import Conflict, FencedError, KubeError, Unavailable
from rollout_operator.api.objects import PoolKey
from rollout_operator.cache.workqueue import QueueClosed, WorkQueue
from rollout_operator.operator_telemetry import OperatorTelemetry
from rollout_operator.pool_page import FAILED_PASSES

from .pass_context import ReconcileFunction
from .settings import FENCED_RETRY_SECONDS, PASS_DEADLINE_SECONDS

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PassLoop:
    """Runs `workers` passes at once, each over another pool.

    A pass that fails is retried with the key's own back-off. A pass that has to wait returns the
    seconds to wait; nothing sleeps inside a pass. While `may_run` says that this process is fenced, keys wait.
    Those of a namespace that is not `is_listed` are dropped: the end of its lists brings them back.
    """

    reconcile: ReconcileFunction
    queue: WorkQueue[PoolKey]
    telemetry: OperatorTelemetry
    _: KW_ONLY
    workers: int
    may_run: Callable[[], bool]
    is_listed: Callable[[str], bool] = lambda namespace: True

    async def run(self) -> None:
        """Run passes until the queue is closed."""
        async with asyncio.TaskGroup() as group:
            for number in range(self.workers):
                group.create_task(self._work_loop(), name=f"pass {number}")

    async def drain_passes(self, task: asyncio.Task[None] | None, seconds: float) -> None:
        """Start no more passes, let running ones (`task` is that of `run`) end for `seconds`, then cancel what is left."""
        self.queue.close()
        if task is None:
            return
        _, late = await asyncio.wait({task}, timeout=seconds)
        if late:
            left = self.queue.busy_count()
            logger.warning("cancelling %d passes that did not end in time", left)
            task.cancel()
            await asyncio.wait({task}, timeout=1)

    async def _work_loop(self) -> None:
        while True:
            try:
                key = await self.queue.get()
            except QueueClosed:
                return
            try:
                await self._run_pass(key)
            finally:
                self.queue.mark_done(key)

    async def _run_pass(self, key: PoolKey) -> None:
        if not self.may_run():
            self.queue.add(key, FENCED_RETRY_SECONDS)
            return
        if not self.is_listed(key.namespace):
            return
        began = time.perf_counter()
        result = await self._run_guarded(key)
        self.telemetry.reconcile_duration.observe(time.perf_counter() - began)
        self.telemetry.reconcile_total.labels(result).inc()

    async def _run_guarded(self, key: PoolKey) -> str:
        """Run the pass, ask for the next one, and return the result's label."""
        where = {"pool": str(key)}
        try:
            async with asyncio.timeout(PASS_DEADLINE_SECONDS):
                again = await self.reconcile(key)
        except FencedError:
            self.queue.add(key, FENCED_RETRY_SECONDS)
            return "fenced"
        except Conflict as error:
            # Another client wrote in between: routine, the next pass sees the newer object.
            logger.debug("%s", error, extra=where)
            self.queue.add(key, rate_limited=True)
            return "conflict"
        except Unavailable as error:
            logger.warning("the pass failed and will be retried: %s", error, extra=where)
            return self._retry_failed(key, error.retry_after or 0.0)
        except KubeError as error:
            logger.error("the pass failed: %s", error, extra=where)  # noqa: TRY400 - its message says all
            return self._retry_failed(key)
        except Exception:
            logger.exception("the pass failed", extra=where)
            return self._retry_failed(key)
        self.queue.reset_backoff(key)
        if again is not None:
            self.queue.add(key, again)
        return "ok"

    def _retry_failed(self, key: PoolKey, delay: float = 0.0) -> str:
        self.queue.add(key, delay, rate_limited=True)
        self.telemetry.pools.count_event(key, FAILED_PASSES)
        return "error"
