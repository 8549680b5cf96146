"""What a pass reports: events for people, one log line, figures for Prometheus."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Literal

from rollout_operator.api.names import Condition
from rollout_operator.api.objects import Key, Obj
from rollout_operator.api.spec import Mode
from rollout_operator.api.status import (
    LastUpdate,
    PoolCondition,
    RolloutReplicaStatus,
    UpdatePhase,
    WeightsStatus,
)
from rollout_operator.core.plan import Plan
from rollout_operator.telemetry import PoolFigures

from .context import Context
from .memory import Memory
from .observe import Look

logger = logging.getLogger(__name__)

EventType = Literal["Normal", "Warning"]


def post_events(ctx: Context, look: Look, plan: Plan, memory: Memory) -> None:
    """Post an event for each note and each condition that changed; log a new sentence."""
    for note in plan.notes:
        ctx.recorder.event(look.pool, note.type, note.reason, note.message)
    for condition in plan.status.conditions:
        if not _changed(condition, look.stored.condition(condition.type)):
            continue
        found = _event_of(condition)
        if found is not None:
            ctx.recorder.event(look.pool, *found, condition.message)
    if plan.sentence != memory.sentence:
        memory.sentence = plan.sentence
        logger.info("%s", plan.sentence, extra={"pool": str(look.key)})


WAITING = "WaitingForTrainer"
UNSCHEDULABLE = "Unschedulable"
"""The two reasons of Progressing that are worth an event: somebody may have to act."""

FINAL = (UpdatePhase.COMPLETE, UpdatePhase.SUPERSEDED)


def count_update(ctx: Context, look: Look, plan: Plan) -> None:
    """Count what became of a weights update in this pass, if anything did."""
    for update, outcome in outcomes(look.stored.weights, plan.status.weights):
        if update.started_at is not None:
            seconds = max(0.0, ctx.clock() - update.started_at.timestamp())
            ctx.telemetry.update_ended(look.key, outcome.value, seconds)


def outcomes(stored: WeightsStatus, new: WeightsStatus) -> Iterator[tuple[LastUpdate, UpdatePhase]]:
    """Yield the updates that reached an outcome between two statuses, and which one."""
    before, after = stored.last_update, new.last_update
    is_told = False
    if before is not None and after is not None and _same(before, after):
        is_told = before.phase is after.phase
    elif before is not None and before.phase not in FINAL:
        # Within one pass it ended and another one began.
        there = new.committed is not None and new.committed.identity >= before.identity
        yield before, UpdatePhase.COMPLETE if there else UpdatePhase.SUPERSEDED
    if after is not None and after.phase in (*FINAL, UpdatePhase.FAILED) and not is_told:
        yield after, after.phase


def _same(one: LastUpdate, other: LastUpdate) -> bool:
    return one.identity == other.identity and one.started_at == other.started_at


def show_figures(
    ctx: Context, key: Key, pool: Obj, status: RolloutReplicaStatus, plan: Plan | None = None
) -> None:
    """Show the pool's figures on the page of metrics."""
    target = (pool["spec"].get("weights") or {}).get("target") or {"epoch": 0, "version": 0}
    weights = {"target": (int(target["epoch"]), int(target["version"]))}
    if status.weights.committed is not None:
        weights["committed"] = status.weights.committed.identity.as_tuple()
    if status.weights.active is not None:
        weights["active_min"] = status.weights.active.min.identity.as_tuple()
        weights["active_max"] = status.weights.active.max.identity.as_tuple()
    figures = PoolFigures(
        desired=_desired(pool, status),
        replicas=status.replicas,
        ready=status.ready_replicas,
        asleep=status.asleep_replicas,
        unreachable=plan.unreachable if plan else 0,
        in_a_row=plan.in_a_row if plan else 0,
        restarts=status.restarts,
        weights=weights,
        conditions={c.type: c.status for c in status.conditions},
        degraded=_reason(status, Condition.DEGRADED),
        progressing=_reason(status, Condition.PROGRESSING),
    )
    ctx.telemetry.pool(key, figures)


def _desired(pool: Obj, status: RolloutReplicaStatus) -> int:
    """Replicas that should run: how many a Hybrid pool has, only its status knows."""
    if pool["spec"].get("mode") == Mode.HYBRID:
        return status.desired_replicas
    return int(pool["spec"].get("replicas", 1))


def _reason(status: RolloutReplicaStatus, kind: Condition) -> str | None:
    """Reason of a condition that is True; None if it isn't."""
    found = status.condition(kind)
    return found.reason if found is not None and found.status == "True" else None


def _changed(condition: PoolCondition, before: PoolCondition | None) -> bool:
    """Another status; or degraded for another reason, or waiting for something else of a trainer."""
    if condition.reason == WAITING:
        return before is None or before.message != condition.message
    if condition.reason == UNSCHEDULABLE:
        return before is None or before.reason != UNSCHEDULABLE
    if before is None:
        return condition.status != "False"
    degraded = condition.type == Condition.DEGRADED and condition.status == "True"
    return condition.status != before.status or (degraded and condition.reason != before.reason)


def _event_of(condition: PoolCondition) -> tuple[EventType, str] | None:
    """Type and reason of the event for a condition's change; None if it is not worth one."""
    table: dict[tuple[str, str], tuple[EventType, str]] = {
        ("Ready", "True"): ("Normal", "Ready"),
        ("Ready", "False"): ("Normal", "NotReady"),
        ("Degraded", "True"): ("Warning", condition.reason),
        ("Degraded", "False"): ("Normal", "Recovered"),
        ("Asleep", "True"): ("Normal", "Asleep"),
        ("Suspended", "True"): ("Normal", "Suspended"),
    }
    if condition.reason == WAITING:
        return "Normal", WAITING
    if condition.reason == UNSCHEDULABLE:
        return "Warning", UNSCHEDULABLE
    return table.get((condition.type, condition.status))
