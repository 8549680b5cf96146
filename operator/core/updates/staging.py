"""The phase Staging: workers read and verify the new weights while the old ones serve.

The *barrier* of an AllAtOnce update is the set of worker processes that were in service when
staging began. It is kept in memory only; a new leader forms it again from those in service then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rollout_operator.api.status import LastUpdate, UpdatePhase
from rollout_operator.core.heads import Head, stage_failures
from rollout_operator.core.plan import Note
from rollout_worker.schemas import WeightsId

from .lifecycle import finish
from .weights_plan import WeightsPlan, unpolled, version_of


def advance_barrier(
    plan: WeightsPlan, update: LastUpdate, heads: Mapping[str, Head], now: float
) -> None:
    """Stage on every member of the barrier; once the last one has staged, commits begin."""
    version = version_of(update, plan.committed.source)
    floor = plan.committed.identity
    serving = [h for h in heads.values() if h.in_service(floor)]
    boots = frozenset(h.boot for h in serving if h.boot)
    plan.barrier = boots if plan.barrier is None else plan.barrier & boots
    members = [h for h in serving if h.boot in plan.barrier]
    if not members:
        if not unpolled(heads):
            finish(plan, now, "committed at once: no member of the barrier was left")
        return
    waiting = [h for h in members if not h.has_staged(version)]
    for head in waiting:
        plan.version_for[head.pod.uid] = version
    plan.failures = stage_failures(waiting, version.identity)
    if waiting:
        staged = f"{len(members) - len(waiting)} of {len(members)} replicas have staged"
        _report(plan, update, staged, waiting)
        return
    note = f"all {len(members)} replicas of the barrier have staged {version.identity}"
    plan.update = update.model_copy(
        update={"phase": UpdatePhase.COMMITTING, "message": f"committing: {note}"}
    )
    plan.notes.append(Note("Normal", "WeightsCommitting", note))


def advance_singly(plan: WeightsPlan, update: LastUpdate, heads: Mapping[str, Head]) -> None:
    """Rolling, Eager: stage everywhere; the first one that has staged lets commits begin."""
    version = version_of(update, plan.committed.source)
    floor = plan.committed.identity
    serving = [h for h in heads.values() if h.in_service(floor)]
    waiting = [h for h in serving if not h.has_staged(version)]
    for head in waiting:
        plan.version_for[head.pod.uid] = version
    plan.failures = stage_failures(heads.values(), version.identity)
    if staged := len(serving) - len(waiting):
        text = f"committing one by one: {staged} of {len(serving)} replicas have staged"
        plan.update = update.model_copy(update={"phase": UpdatePhase.COMMITTING, "message": text})
        return
    _report(plan, update, f"0 of {len(serving)} replicas have staged", waiting)


def _report(plan: WeightsPlan, update: LastUpdate, staged: str, waiting: Iterable[Head]) -> None:
    phase = UpdatePhase.FAILED if plan.overdue else UpdatePhase.STAGING
    text = f"{staged} {update.identity}"
    if plan.failures:
        text += f"; {plan.failures[0]}"
    if plan.overdue and update.phase is not UpdatePhase.FAILED:
        plan.notes.append(Note("Warning", "WeightsDeadlineExceeded", text))
    plan.update = update.model_copy(
        update={
            "phase": phase,
            "attempts": max(update.attempts, _attempts(waiting, update.identity)),
            "message": text,
        }
    )


def _attempts(waiting: Iterable[Head], identity: WeightsId) -> int:
    """The first attempt, plus the retries of the head that failed most."""
    failures = (h.worker.failures.get("stage") for h in waiting)
    return 1 + max((f.count for f in failures if f and f.about == identity), default=0)
