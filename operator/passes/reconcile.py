"""One pass over one pool: observe, decide, act."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from rollout_common.kube.errors import Conflict, NotFound
from rollout_operator.api import names
from rollout_operator.api.objects import Obj, PoolKey
from rollout_operator.api.spec import InvalidSpec, PoolMode
from rollout_operator.api.status import RolloutReplicaStatus
from rollout_operator.core.pass_plan import PassPlan, RequeueAfter
from rollout_operator.core.pass_planning import plan_pass
from rollout_operator.core.pods.forced_deletion import plan_forced_deletion
from rollout_operator.core.pods.pod_reader import sort_pods
from rollout_operator.core.status_report import status_for_invalid_spec

from .pass_context import PassContext
from .pass_input import (
    PassInput,
    observe_pool,
    refresh_surplus_heads,
    seconds_until_first_polls,
    stop_polling,
    wait_for_first_polls,
)
from .plan_actions import apply_plan, soonest_requeue, write_status, write_unreadable_status
from .pool_memory import PoolMemory
from .pool_writer import PoolWriter
from .settings import ABSENT_RETRY_SECONDS

logger = logging.getLogger(__name__)

THREADED_PLAN_PODS = 500
"""From so many pods on `plan_pass` takes more than 50 ms, and a second with as many as the CRD allows."""


class Reconciler:
    """Passes over pools; the queue runs one at a time for each."""

    def __init__(self, ctx: PassContext) -> None:
        self.ctx = ctx
        self._memory: dict[PoolKey, PoolMemory] = {}

    async def reconcile(self, key: PoolKey) -> float | None:
        """Bring the pool one step nearer to its spec.

        Returns:
            Seconds until the next look if nothing happens before, None: none is needed.

        Raises:
            KubeError: this process may not write, or the API server answers nothing; the queue tries
                again with back-off.
        """
        pool = self.ctx.store.find_pool(key)
        if pool is None or pool["metadata"].get("deletionTimestamp"):
            return await self._forget_deleted_pool(key, pool)
        memory = self._memory_of(key, pool)
        seconds = seconds_until_first_polls(self.ctx, memory)
        return seconds if seconds > 0 else await self._look_at_pool(key, pool, memory)

    async def _look_at_pool(self, key: PoolKey, pool: Obj, memory: PoolMemory) -> float | None:
        memory.notice_user_change(pool)
        stored = memory.read_status(pool)
        if memory.unreadable is not None:
            stop_polling(self.ctx, memory)
            await write_unreadable_status(self.ctx, key, pool, memory.unreadable, stored)
            return None
        try:
            spec = memory.read_spec(pool)
        except InvalidSpec as error:
            stop_polling(self.ctx, memory)
            status = status_for_invalid_spec(stored, pool, str(error), self.ctx.clock())
            writer = PoolWriter(self.ctx, key, pool["metadata"]["uid"], memory.obstacles)
            try:
                return await write_status(writer, pool, PassPlan(status), memory)
            except NotFound:
                return ABSENT_RETRY_SECONDS
        if memory.first_look is None:
            memory.recall_obstacles()
        pass_input = PassInput(
            key, pool, spec, stored, observe_pool(self.ctx, key, pool, spec, memory)
        )
        if self._knows_too_little(pass_input):
            return None  # the lists' end, or what is wrong with them, wakes the pool
        if not memory.first_polls_done:
            left = wait_for_first_polls(self.ctx, key, pass_input.seen, memory)
            if left:
                return left
        pass_input = await refresh_surplus_heads(self.ctx, pass_input, memory)
        plan = await compute_plan(pass_input, self.ctx.clock())
        if pass_input.seen.paused:
            plan = _paused_plan(plan, stored)
        try:
            return await apply_plan(self.ctx, pass_input, plan, memory)
        except Conflict as error:
            # Another client wrote the object since it was read: retry with what the watch brings.
            logger.debug("%s changed since it was read: %s", key, error)
            return 0.2

    def _memory_of(self, key: PoolKey, pool: Obj) -> PoolMemory:
        """Return what is remembered of exactly this object."""
        memory = self._memory.setdefault(key, PoolMemory())
        if memory.pool is not None and memory.pool["metadata"]["uid"] != pool["metadata"]["uid"]:
            # Created again under the same name between two passes: the old obstacles are not its own.
            self._forget_heads(memory)
            memory = self._memory[key] = PoolMemory(ended_pods=memory.ended_pods)
        return memory

    def _forget_heads(self, memory: PoolMemory) -> None:
        for uid in memory.polled:
            self.ctx.workers.forget_head(uid)

    def _knows_too_little(self, pass_input: PassInput) -> bool:
        """Whether too little is known yet of the trainer whose devices or pods the pool shares."""
        trainers = pass_input.seen.trainers
        if pass_input.spec.mode is not PoolMode.HYBRID:
            is_pending = trainers.claims is None and not trainers.unknown
            return pass_input.spec.colocation is not None and is_pending
        if trainers.unknown:
            # Without its members there is nothing to report: status and Services stay as they are.
            why = f"can't list the trainer's pods: {trainers.unknown}"
            self.ctx.recorder.record_event(pass_input.pool, "Warning", "TrainerUnknown", why)
        return trainers.claims is None

    async def _forget_deleted_pool(self, key: PoolKey, pool: Obj | None) -> float | None:
        """Forget a deleted object: the garbage collector does the rest, except for stuck pods."""
        memory = self._memory.setdefault(key, PoolMemory())
        self._forget_heads(memory)
        self.ctx.neighbours.unsubscribe_pool(key)
        self.ctx.telemetry.pools.forget_pool(key)
        self.ctx.gangs.note_pool(key, wants_gang=False)
        self.ctx.pace.note_pool(key, moving=False)
        if pool is None:
            self.ctx.kube.forget_token(names.token_audience(key.namespace, key.name))
        again = await self._force_delete_orphans(key, memory)
        if pool is None:
            # A later object of that name is another one, but its predecessor's pods are the same.
            self._memory[key] = PoolMemory(ended_pods=memory.ended_pods)
            if not self.ctx.store.pool_pods(key):
                del self._memory[key]
        return again

    async def _force_delete_orphans(self, key: PoolKey, memory: PoolMemory) -> float | None:
        ctx, next_due = self.ctx, None
        orphans = sort_pods(ctx.store.pool_pods(key), key.name, "").predecessors
        for pod in memory.ended_pods.with_seen_seconds(orphans, ctx.monotonic()):
            wait = RequeueAfter()
            forced = plan_forced_deletion(pod, ctx.clock(), wait)
            if forced is not None:
                memory.ended_pods.note_forced(pod.uid, ctx.monotonic())
                await PoolWriter(ctx, key, "", memory.obstacles).delete_pod(forced)
            next_due = soonest_requeue(next_due, wait.seconds)
        return next_due


async def compute_plan(pass_input: PassInput, now: float) -> PassPlan:
    """Decide; for a large pool in a thread, because the event loop has the other pools to serve."""
    if len(pass_input.seen.pods) < THREADED_PLAN_PODS:
        return plan_pass(pass_input.spec, pass_input.seen, pass_input.stored, now)
    return await asyncio.to_thread(
        plan_pass, pass_input.spec, pass_input.seen, pass_input.stored, now
    )


def _paused_plan(plan: PassPlan, stored: RolloutReplicaStatus) -> PassPlan:
    """Observe and report, but change nothing; decisions about weights wait, too."""
    text = f"reconciling is paused by the annotation {names.ANNOTATION_PAUSED}"
    known = {"committed": stored.weights.committed, "last_update": stored.weights.last_update}
    kept = {
        "message": text,
        "weights": plan.status.weights.model_copy(update=known),
        "restarts": stored.restarts,
        "replacing": stored.replacing,
    }
    status = plan.status.model_copy(update=kept)
    return replace(plan, status=status, notes=(), barrier=None, restarts={}, requeue=None)
