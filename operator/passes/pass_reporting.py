"""What a pass reports: events for people, one log line, figures for Prometheus."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Literal

from rollout_common import tracing
from rollout_operator.api.names import ConditionType
from rollout_operator.api.objects import Obj, PoolKey
from rollout_operator.api.spec import PoolMode
from rollout_operator.api.status import (
    LastUpdate,
    PoolCondition,
    RolloutReplicaStatus,
    UpdatePhase,
    WeightsStatus,
)
from rollout_operator.core.pass_plan import PassPlan
from rollout_operator.pool_page import PoolMetrics

from .pass_context import PassContext
from .pass_input import PassInput
from .pool_memory import PoolMemory

logger = logging.getLogger(__name__)

EventType = Literal["Normal", "Warning"]

WAITING_REASON = "WaitingForTrainer"
UNSCHEDULABLE_REASON = "Unschedulable"
"""The two reasons of Progressing that are worth an event: somebody may have to act."""

FINAL_PHASES = (UpdatePhase.COMPLETE, UpdatePhase.SUPERSEDED)

CONDITION_EVENTS: dict[tuple[str, str], tuple[EventType, str]] = {
    ("Ready", "True"): ("Normal", "Ready"),
    ("Ready", "False"): ("Normal", "NotReady"),
    ("Degraded", "False"): ("Normal", "Recovered"),
    ("Asleep", "True"): ("Normal", "Asleep"),
    ("Suspended", "True"): ("Normal", "Suspended"),
}
"""Type and reason of the event when a condition of this type turns to this status."""


def post_events(
    ctx: PassContext, pass_input: PassInput, plan: PassPlan, memory: PoolMemory
) -> None:
    """Post an event for each note and each condition that changed; log a new sentence."""
    for note in plan.notes:
        ctx.recorder.record_event(pass_input.pool, note.type, note.reason, note.message)
    for condition in plan.status.conditions:
        found = condition_event(condition, pass_input.stored.find_condition(condition.type))
        if found is not None:
            ctx.recorder.record_event(pass_input.pool, *found, condition.message)
    if plan.status.message != memory.sentence:
        memory.sentence = plan.status.message
        logger.info("%s", memory.sentence, extra={"pool": str(pass_input.key)})


def count_update(ctx: PassContext, pass_input: PassInput, plan: PassPlan) -> None:
    """Count what became of a weights update in this pass, if anything did."""
    for update, outcome in update_outcomes(pass_input.stored.weights, plan.status.weights):
        if update.started_at is not None:
            seconds = max(0.0, ctx.clock() - update.started_at.timestamp())
            ctx.telemetry.pools.observe_update(pass_input.key, outcome.value, seconds)
            _trace_update(pass_input.key, update, outcome, ctx.clock())


def _trace_update(key: PoolKey, update: LastUpdate, outcome: UpdatePhase, ended: float) -> None:
    """Send the span of an update; workers' spans of it, and the trainer's, know its ids without it."""
    assert update.started_at is not None, "only what has begun ends"
    attributes: tracing.Attributes = {
        "k8s.namespace.name": key.namespace,
        "rollout.pool": key.name,
        "rollout.epoch": update.epoch,
        "rollout.version": update.version,
        "rollout.outcome": outcome.value,
    }
    ids = tracing.update_ids(key.namespace, key.name, update.epoch, update.version)
    failed = update.message if outcome is UpdatePhase.FAILED else ""
    tracing.record_span(
        "weights update", ids, update.started_at.timestamp(), ended, attributes, failed
    )


def update_outcomes(
    stored: WeightsStatus, new: WeightsStatus
) -> Iterator[tuple[LastUpdate, UpdatePhase]]:
    """Yield the updates that reached an outcome between two statuses, and which one."""
    before, after = stored.last_update, new.last_update
    is_known = False
    if before is not None and after is not None and _is_same_update(before, after):
        is_known = before.phase is after.phase
    elif before is not None and before.phase not in FINAL_PHASES:
        # Within one pass it ended and another one began.
        there = new.committed is not None and new.committed.identity >= before.identity
        yield before, UpdatePhase.COMPLETE if there else UpdatePhase.SUPERSEDED
    if after is not None and after.phase in (*FINAL_PHASES, UpdatePhase.FAILED) and not is_known:
        yield after, after.phase


def _is_same_update(one: LastUpdate, other: LastUpdate) -> bool:
    return one.identity == other.identity and one.started_at == other.started_at


def update_pool_metrics(
    ctx: PassContext,
    key: PoolKey,
    pool: Obj,
    status: RolloutReplicaStatus,
    plan: PassPlan | None = None,
) -> None:
    """Set the pool's metrics."""
    target = (pool["spec"].get("weights") or {}).get("target") or {"epoch": 0, "version": 0}
    weights = {"target": (int(target["epoch"]), int(target["version"]))}
    if status.weights.committed is not None:
        weights["committed"] = status.weights.committed.identity.as_tuple()
    if status.weights.active is not None:
        weights["active_min"] = status.weights.active.min.identity.as_tuple()
        weights["active_max"] = status.weights.active.max.identity.as_tuple()
    figures = PoolMetrics(
        desired=_desired_replicas(pool, status),
        replicas=status.replicas,
        ready=status.ready_replicas,
        asleep=status.asleep_replicas,
        unreachable=plan.unreachable if plan else 0,
        in_a_row=plan.in_a_row if plan else 0,
        restarts=status.restarts,
        weights=weights,
        conditions={c.type: c.status for c in status.conditions},
        degraded=_condition_reason(status, ConditionType.DEGRADED),
        progressing=_condition_reason(status, ConditionType.PROGRESSING),
    )
    ctx.telemetry.pools.set_figures(key, figures)


def _desired_replicas(pool: Obj, status: RolloutReplicaStatus) -> int:
    """Replicas that should run: only the status of a Hybrid pool has their number."""
    if pool["spec"].get("mode") == PoolMode.HYBRID:
        return status.desired_replicas
    return int(pool["spec"].get("replicas", 1))


def _condition_reason(status: RolloutReplicaStatus, kind: ConditionType) -> str | None:
    """Reason of a condition if it is True."""
    found = status.find_condition(kind)
    return found.reason if found is not None and found.status == "True" else None


def condition_event(
    condition: PoolCondition, before: PoolCondition | None
) -> tuple[EventType, str] | None:
    """Return type and reason of the event for a condition that was another one before; None: it is not worth one."""
    if condition.reason == WAITING_REASON:
        is_news = before is None or before.message != condition.message
        return ("Normal", WAITING_REASON) if is_news else None
    status, reason = ("False", "") if before is None else (before.status, before.reason)
    if condition.reason == UNSCHEDULABLE_REASON:
        return ("Warning", UNSCHEDULABLE_REASON) if reason != UNSCHEDULABLE_REASON else None
    if condition.type == ConditionType.DEGRADED and condition.status == "True":
        is_news = (status, reason) != ("True", condition.reason)
        return ("Warning", condition.reason) if is_news else None
    turned = condition.status != status
    return CONDITION_EVENTS.get((condition.type, condition.status)) if turned else None
