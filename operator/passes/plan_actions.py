"""The last third of a pass: the plan's writes and calls, in the order that makes them safe."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Collection
from contextlib import suppress
from functools import partial

from rollout_common.kube.errors import Conflict, FencedError, KubeError, NotFound
from rollout_operator.api import names
from rollout_operator.api.gangs import needs_groups
from rollout_operator.api.names import ConditionType
from rollout_operator.api.objects import Obj, PoolKey
from rollout_operator.api.spec import PoolMode
from rollout_operator.api.status import RolloutReplicaStatus, UpdatePhase
from rollout_operator.core.pass_plan import ControlVerb, PassPlan
from rollout_operator.core.pods.builder import PodBuilder
from rollout_operator.core.services import with_gates
from rollout_operator.core.status_changes import (
    is_same_decision,
    owned_fields,
    without_progress,
)
from rollout_operator.core.status_report import document_for_unreadable_status

from .group_writer import GroupWriter
from .pass_context import PassContext
from .pass_input import PassInput, is_paused, poll_heads, update_phase
from .pass_reporting import (
    UNSCHEDULABLE_REASON,
    WAITING_REASON,
    count_update,
    post_events,
    update_pool_metrics,
)
from .pool_memory import PoolMemory
from .pool_writer import PoolWriter
from .settings import ABSENT_RETRY_SECONDS, PROGRESS_LOOK_SECONDS
from .write_obstacles import API_ERROR, CONFLICT, REJECTED, STATUS_LABEL

logger = logging.getLogger(__name__)

CALLS_BEGUN_TOGETHER = 50
"""A request takes the loop some 0.2 ms until it is sent."""


async def apply_plan(
    ctx: PassContext, pass_input: PassInput, plan: PassPlan, memory: PoolMemory
) -> float | None:
    """Carry the plan out; return when to look again.

    Status goes first: it holds the decisions that others rely on. If the API server does not take it,
    only the calls wait that take weights from a worker or give it others.
    """
    obstacles = memory.obstacles
    obstacles.begin_pass()
    # Polls change nothing, and their answers arrive while the status is written.
    poll_heads(ctx, pass_input.key, pass_input.seen, plan.status, memory)
    writer = PoolWriter(ctx, pass_input.key, pass_input.seen.uid, obstacles)
    try:
        later = await write_status(writer, pass_input.pool, plan, memory)
    except NotFound:
        return ABSENT_RETRY_SECONDS  # nothing is made for an object that is gone
    decided = memory.unwritten is None or is_same_decision(
        pass_input.stored.weights, plan.status.weights
    )
    post_events(ctx, pass_input, plan, memory)
    if decided:
        memory.barrier = plan.barrier
        count_update(ctx, pass_input, plan)
    if _is_overtaken(ctx, pass_input):
        return 0.0
    if not pass_input.seen.paused:
        before = obstacles.reported_labels
        await _write_children(writer, pass_input, plan, memory)
        if not writer.relabelled:
            obstacles.end_pass()  # else nothing was tried that could show them gone
        writer.check_alive()
        if _is_overtaken(ctx, pass_input):
            return 0.0
        await _start_calls(ctx, pass_input, plan, decided=decided)
        if obstacles.reported_labels != before or writer.relabelled or writer.changed:
            return 0.0
        later = soonest_requeue(later, obstacles.seconds_left(ctx.monotonic()))
    if not decided:
        return soonest_requeue(later, max(1.0, plan.requeue or 1.0))
    phase = update_phase(plan.status)
    if phase is UpdatePhase.COMMITTING and update_phase(pass_input.stored) is not phase:
        return 0.0  # the decision is in status now: commit calls may start
    return soonest_requeue(later, plan.requeue)


def _is_overtaken(ctx: PassContext, pass_input: PassInput) -> bool:
    """Whether the user has changed, paused or deleted the object since the pass read it: the next pass acts.

    A status that says the same is not written, so no conflict tells.
    """
    now = ctx.store.find_pool(pass_input.key)
    if now is None or now["metadata"].get("deletionTimestamp"):
        return True
    if is_paused(now) and not pass_input.seen.paused:
        return True
    return (now["metadata"]["uid"], now["spec"]) != (pass_input.seen.uid, pass_input.pool["spec"])


async def write_status(
    writer: PoolWriter, pool: Obj, plan: PassPlan, memory: PoolMemory
) -> float | None:
    """Write the status if it changed; mere progress at the pace of `StatusPace`.

    What the API server does not take is kept in `memory.unwritten`.

    Returns:
        Seconds until it may be written, if it waits for that.

    Raises:
        NotFound: the object is gone; the watch will say so.
        Conflict: another client has written the object since it was read.
    """
    ctx, key, status = writer.ctx, writer.key, plan.status
    update_pool_metrics(ctx, key, pool, status, plan)
    ctx.pace.note_pool(key, moving=_is_moving(pool, status))
    before, after = owned_fields(memory.stored), owned_fields(status)
    if before == after:
        memory.unwritten = None
        memory.obstacles.clear_obstacle(STATUS_LABEL)
        return None
    now = ctx.monotonic()
    if memory.unwritten is not None and memory.obstacles.is_waiting(STATUS_LABEL, now):
        memory.unwritten = status
        return memory.obstacles.retry_in(STATUS_LABEL, now)
    pause = ctx.pace.progress_seconds()
    wait = 0.0 if memory.written_at is None else memory.written_at + pause - now
    if (
        wait > 0
        and without_progress(before) == without_progress(after)
        and not _rests_on_status(plan, memory.stored)
    ):
        return min(wait, PROGRESS_LOOK_SECONDS)
    version = pool["metadata"]["resourceVersion"]
    try:
        await writer.apply_status(version, status.to_document())
    except (NotFound, FencedError):
        raise
    except KubeError as error:
        if isinstance(error, Conflict) and memory.overtaken != version:
            # A trainer that writes each second causes conflicts, too; only on one version they repeat.
            memory.overtaken = version
            memory.obstacles.clear_obstacle(STATUS_LABEL)
        what, request = f"the status of {key.name!r}", ("patch", names.PLURAL)
        met = writer.note_failure(STATUS_LABEL, what, request, error)
        if not met.reason:
            raise
        memory.unwritten = status
        ctx.recorder.record_event(pool, "Warning", met.reason, met.text)
        return memory.obstacles.retry_in(STATUS_LABEL, now)
    memory.unwritten = None
    memory.obstacles.clear_obstacle(STATUS_LABEL)
    memory.written_at = now
    return None


STUCK_REASONS = frozenset({REJECTED, API_ERROR, CONFLICT, "PodTrouble", "InvalidSpec"})
"""Of Degraded: nothing of the pool changes until somebody acts."""


def _is_moving(pool: Obj, status: RolloutReplicaStatus) -> bool:
    """Whether a pool is on its way; one that is paused or stuck, or waits for a node or a trainer, perhaps for days, is not."""
    progress, trouble = map(
        status.find_condition, (ConditionType.PROGRESSING, ConditionType.DEGRADED)
    )
    stuck = trouble is not None and trouble.status == "True" and trouble.reason in STUCK_REASONS
    if is_paused(pool) or stuck:
        return False
    return (
        progress is not None
        and progress.status == "True"
        and progress.reason not in (WAITING_REASON, UNSCHEDULABLE_REASON)
    )


def _rests_on_status(plan: PassPlan, stored: RolloutReplicaStatus) -> bool:
    """Whether a call of this plan must wait until status says what was decided about weights."""
    waits = any(call.is_irreversible for call in plan.calls)
    return waits and not is_same_decision(stored.weights, plan.status.weights)


async def write_unreadable_status(
    ctx: PassContext, key: PoolKey, pool: Obj, why: str, stored: RolloutReplicaStatus
) -> None:
    """Report that the status can't be read, and write back all that it holds."""
    update_pool_metrics(ctx, key, pool, stored)
    document = document_for_unreadable_status(stored, pool, why, ctx.clock())
    if document is None:
        return
    logger.warning("%s", why, extra={"pool": str(key)})
    ctx.recorder.record_event(pool, "Warning", "UnreadableStatus", why)
    writer = PoolWriter(ctx, key, pool["metadata"]["uid"])
    with suppress(NotFound):
        await writer.apply_status(pool["metadata"]["resourceVersion"], document)


async def _write_children(
    writer: PoolWriter, pass_input: PassInput, plan: PassPlan, memory: PoolMemory
) -> None:
    ctx, key, spec, seen = writer.ctx, pass_input.key, pass_input.spec, pass_input.seen
    if spec.mode is PoolMode.HYBRID:
        await writer.write_services(selecting=False)
        members = with_gates(seen.pods, plan.gates, ctx.clock())
        await writer.write_slices(members)
        return
    defaults = ctx.config.engine_defaults(spec.engine.type)
    turn = ctx.config.turn_claim
    gang = seen.scheduling.scheduler
    builder = PodBuilder(key.name, key.namespace, seen.uid, seen.retry, spec, defaults, turn, gang)
    budget = () if plan.budget is None else (writer.write_budget(plan.budget),)
    await writer.run_all((writer.write_services(spec.weights.transport.port), *budget))
    kind = spec.operator_class
    await writer.run_all(
        writer.relabel_pod(p.name, p.uid, names.worker_labels(key.name, p.replica, p.rank, kind))
        for p in seen.pods
        if p.mislabelled
    )
    before = writer.relabelled
    await writer.run_all(
        writer.seek_pod(builder.build_pod(s.replica, s.rank, 0)) for s in plan.seek
    )
    if writer.relabelled > before:
        return  # the gang is complete again, and this plan counts on the opposite
    # Out of the Service first, then away.
    await writer.run_all(writer.set_gate(g) for g in plan.gates if not g.serving)
    for deletion in plan.delete:
        if deletion.forced:
            memory.ended_pods.note_forced(deletion.uid, ctx.monotonic())
    await writer.run_all(writer.delete_pod(p) for p in plan.delete)
    missing, ungrouped = builder.missing_setting, await _write_groups(writer, pass_input, plan)
    if missing is None:
        creates = (c for c in plan.create if c.replica not in ungrouped)
        await writer.create_pods(
            {
                names.pod_name(key.name, c.replica, c.rank): partial(
                    builder.build_pod, c.replica, c.rank, c.restarts, c.place, surge=c.surge
                )
                for c in creates
            },
            goes_on=lambda: not _is_overtaken(ctx, pass_input),
        )
    elif plan.create:
        writer.obstacles.note_obstacle(missing[0], REJECTED, missing[1], math.inf)
    await writer.run_all(writer.set_gate(g) for g in plan.gates if g.serving)


async def _write_groups(
    writer: PoolWriter, pass_input: PassInput, plan: PassPlan
) -> Collection[int]:
    """Write the PodGroups; return the replicas whose pods can't be made, since no gang would hold them."""
    if pass_input.seen.scheduling.lacking:
        return {c.replica for c in plan.create}  # the pool is woken when one is found
    # A pool that asks for none may have groups of its former template.
    scheduler = pass_input.seen.scheduling.scheduler or writer.ctx.gangs.scheduler
    if not needs_groups(scheduler):
        return ()
    return await GroupWriter(writer, pass_input.spec, scheduler).write_groups(pass_input, plan)


async def _start_calls(
    ctx: PassContext, pass_input: PassInput, plan: PassPlan, *, decided: bool
) -> None:
    """Start calls to workers; irreversible ones only if status holds the decision."""
    by_uid = {p.uid: p for p in pass_input.seen.pods}
    started: dict[ControlVerb, list[str]] = {}
    for number, call in enumerate(plan.calls, 1):
        if number % CALLS_BEGUN_TOGETHER == 0:
            await asyncio.sleep(0)  # they begin: thousands at once would hold the loop for a second
        if call.is_irreversible and not decided:
            continue
        if ctx.workers.start_call(pass_input.key, by_uid[call.uid], call):
            started.setdefault(call.verb, []).append(call.pod)
    for verb, pods in started.items():
        # A line for each would be a twentieth of what an update of a large pool costs.
        more = f" and {len(pods) - 1} more" if len(pods) > 1 else ""
        logger.info("calling %s on %s%s", verb, pods[0], more, extra={"pool": str(pass_input.key)})


def soonest_requeue(*seconds: float | None) -> float | None:
    """Return the shortest of these waits; None: none of them needs another pass."""
    return min((s for s in seconds if s is not None), default=None)
