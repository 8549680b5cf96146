"""The phase Staging: workers read and verify the new weights while the old ones serve.

The *barrier* of an AllAtOnce update is the set of worker processes that were in service when
staging began. It is kept in memory only; a new leader forms it again from those in service then.
Only an answer that shows otherwise, or the end of its pod, takes a process out of it.

Pushed weights are staged by the trainer before it moves the pointer: here they are waited for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rollout_operator.api.spec import RolloutReplicaSpec
from rollout_operator.api.status import LastUpdate, UpdatePhase
from rollout_operator.core.pass_plan import EventNote
from rollout_operator.core.replica_heads import ReplicaHead, WeightsVersion, stage_failures

from .content_hashes import bind_root_hash, unsupported_by_pool
from .pushed_copies import is_staged_nowhere, waiting_for_bytes_message
from .update_lifecycle import enter_committing, finish_update
from .weights_plan import WeightsPlan, has_unpolled_head, update_version


def advance_barrier(
    spec: RolloutReplicaSpec,
    plan: WeightsPlan,
    update: LastUpdate,
    heads: Mapping[str, ReplicaHead],
    now: float,
) -> None:
    """Stage on every member of the barrier; once the last one has staged, commits begin."""
    floor = plan.committed.identity
    serving = [h for h in heads.values() if h.is_in_service(floor)]
    boots = frozenset(h.boot_id for h in serving if h.boot_id)
    plan.barrier = boots if plan.barrier is None else plan.barrier & boots
    members = {h.pod.uid: h for h in serving if h.boot_id in plan.barrier}
    if not members:
        _commit_without_members(plan, update, heads, now)
        return
    version = bind_root_hash(update_version(update, plan.committed.source), members)
    if _fail_if_unsupported(spec, plan, update, members, version):
        return
    waiting = _stage_members(plan, members.values(), version)
    if waiting:
        staged = f"{len(members) - len(waiting)} of {len(members)} replicas have staged"
        _report_progress(
            plan, update, staged, waiting, waiting_for_bytes_message(version, waiting, heads)
        )
        return
    note = f"all {len(members)} replicas of the barrier have staged {version.identity}"
    enter_committing(plan, version.root_hash, now, f"committing: {note}")
    plan.notes.append(EventNote("Normal", "WeightsCommitting", note))


def _commit_without_members(
    plan: WeightsPlan, update: LastUpdate, heads: Mapping[str, ReplicaHead], now: float
) -> None:
    """Commit at once if nobody serves; but not bytes that nobody has: the old ones may come back."""
    if has_unpolled_head(heads):
        return
    version = update_version(update, plan.committed.source)
    if is_staged_nowhere(version, heads):
        plan.barrier = None
        _report_progress(
            plan, update, "no replica has staged", (), waiting_for_bytes_message(version, (), heads)
        )
        return
    finish_update(plan, now, "committed at once: no member of the barrier was left")


def advance_singly(
    spec: RolloutReplicaSpec,
    plan: WeightsPlan,
    update: LastUpdate,
    heads: Mapping[str, ReplicaHead],
    now: float,
) -> None:
    """Rolling, Eager: stage everywhere; the first one that has staged lets commits begin."""
    floor = plan.committed.identity
    serving = {uid: h for uid, h in heads.items() if h.is_in_service(floor)}
    version = bind_root_hash(update_version(update, plan.committed.source), heads)
    if _fail_if_unsupported(spec, plan, update, serving, version):
        return
    waiting = _stage_members(plan, serving.values(), version)
    # One that waits to join may be the first: it commits when the decision stands in status, too.
    behind = [h for h in heads.values() if not h.has_at_least(version.identity)]
    staged = sum(h.has_staged(version) for h in behind)
    if staged or not (waiting or is_staged_nowhere(version, heads)):
        text = f"committing one by one: {staged} of {len(heads)} replicas have staged"
        enter_committing(plan, version.root_hash, now, text)
        return
    missing = waiting_for_bytes_message(version, waiting, heads)
    _report_progress(plan, update, f"0 of {len(serving)} replicas have staged", waiting, missing)


def _fail_if_unsupported(
    spec: RolloutReplicaSpec,
    plan: WeightsPlan,
    update: LastUpdate,
    members: Mapping[str, ReplicaHead],
    version: WeightsVersion,
) -> bool:
    """Fail the update before anything is staged if an engine can't commit as the spec asks."""
    text = unsupported_by_pool(spec, members, version)
    if text is None:
        return False
    plan.unsupported = True
    plan.overdue = False
    plan.barrier = None
    plan.failures = [text]
    plan.update = update.model_copy(
        update={"phase": UpdatePhase.FAILED, "started_at": None, "message": text}
    )
    return True


def _stage_members(
    plan: WeightsPlan, members: Iterable[ReplicaHead], version: WeightsVersion
) -> list[ReplicaHead]:
    """Have the members stage it; return those that have not yet."""
    waiting = [h for h in members if not h.has_staged(version)]
    for head in waiting:
        plan.version_for[head.pod.uid] = version
    plan.failures = stage_failures(waiting, version)
    return waiting


def _report_progress(
    plan: WeightsPlan, update: LastUpdate, staged: str, waiting: Iterable[ReplicaHead], missing: str
) -> None:
    phase = UpdatePhase.FAILED if plan.overdue else UpdatePhase.STAGING
    text = f"{staged} {update.identity}"
    silent = [h.pod.name for h in waiting if h.is_silent]
    if plan.failures:
        text += f"; {plan.failures[0]}"
    elif silent:
        text += f"; {silent[0]} does not answer"
    elif missing:
        text += f"; {missing}"
    if plan.overdue and update.phase is not UpdatePhase.FAILED:
        plan.notes.append(EventNote("Warning", "WeightsDeadlineExceeded", text))
    plan.update = update.model_copy(
        update={
            "phase": phase,
            "attempts": max(update.attempts, count_attempts(waiting, update, "stage")),
            "message": text,
        }
    )


def count_attempts(waiting: Iterable[ReplicaHead], update: LastUpdate, verb: str) -> int:
    """The first attempt, plus the retries of the head that failed most."""
    failures = (h.worker.failures.get(verb) for h in waiting)
    return 1 + max((f.count for f in failures if f and f.about == update.identity), default=0)
