"""The phase Staging: workers read and verify the new weights while the old ones serve.

The *barrier* of an AllAtOnce update is the set of worker processes that were in service when
staging began. It is kept in memory only; a new leader forms it again from those in service then.
Only an answer that shows otherwise, or the end of its pod, takes a process out of it.

The trainer stages pushed weights before it moves the pointer: here the pool waits for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rollout_operator.api.status import LastUpdate, UpdatePhase
from rollout_operator.core.pass_plan import ControlVerb, EventNote
from rollout_operator.core.replica_heads import ReplicaHead, WeightsVersion, stage_failures

from .content_hashes import bind_root_hash, unsupported_by_pool
from .pushed_copies import is_staged_nowhere, waiting_for_bytes_message
from .update_lifecycle import enter_committing, finish_update, report_progress
from .weights_plan import WeightsPass, WeightsPlan, has_unpolled_head


def advance_barrier(run: WeightsPass, update: LastUpdate) -> None:
    """Stage on every member of the barrier; once the last one has staged, commits begin."""
    plan, serving = run.plan, run.heads_in_service.values()
    boots = frozenset(h.boot_id for h in serving if h.boot_id)
    plan.barrier = boots if plan.barrier is None else plan.barrier & boots
    members = {h.pod.uid: h for h in serving if h.boot_id in plan.barrier}
    if not members:
        _commit_without_members(run, update)
        return
    version = bind_root_hash(plan.version_of(update), members)
    if _fail_if_unsupported(run, update, members, version):
        return
    waiting = _stage_members(plan, members.values(), version)
    if waiting:
        staged = f"{len(members) - len(waiting)} of {len(members)} replicas have staged"
        _report_staged(run, update, staged, version, waiting)
        return
    note = f"all {len(members)} replicas of the barrier have staged {version.identity}"
    enter_committing(run, update, version.root_hash, f"committing: {note}")
    plan.notes.append(EventNote("Normal", "WeightsCommitting", note))


def _commit_without_members(run: WeightsPass, update: LastUpdate) -> None:
    """Commit at once if no replica serves; but not bytes that none has: the old ones may return."""
    if has_unpolled_head(run.heads):
        return
    version = run.plan.version_of(update)
    if is_staged_nowhere(version, run.heads):
        run.plan.barrier = None
        _report_staged(run, update, "no replica has staged", version, [])
        return
    finish_update(run, update, "committed at once: no member of the barrier was left")


def advance_singly(run: WeightsPass, update: LastUpdate) -> None:
    """Rolling, Eager: stage everywhere; the first one that has staged lets commits begin."""
    serving = run.heads_in_service
    version = run.bound_version(update)
    if _fail_if_unsupported(run, update, serving, version):
        return
    waiting = _stage_members(run.plan, serving.values(), version)
    # One that waits to join may be the first: it commits when status holds the decision, too.
    behind = [h for h in run.heads.values() if not h.has_at_least(version.identity)]
    staged = sum(h.has_staged(version) for h in behind)
    if staged or not (waiting or is_staged_nowhere(version, run.heads)):
        text = f"committing one by one: {staged} of {len(run.heads)} replicas have staged"
        enter_committing(run, update, version.root_hash, text)
        return
    _report_staged(run, update, f"0 of {len(serving)} replicas have staged", version, waiting)


def _fail_if_unsupported(
    run: WeightsPass,
    update: LastUpdate,
    members: Mapping[str, ReplicaHead],
    version: WeightsVersion,
) -> bool:
    """Fail the update before anything is staged if an engine can't commit as the spec asks."""
    plan, text = run.plan, unsupported_by_pool(run.spec, members, version)
    if text is None:
        return False
    plan.unsupported = True
    plan.overdue = False
    plan.barrier = None
    plan.failures = [text]
    failed = {"phase": UpdatePhase.FAILED, "started_at": None, "message": text}
    plan.update = update.model_copy(update=failed)
    return True


def _stage_members(
    plan: WeightsPlan, members: Iterable[ReplicaHead], version: WeightsVersion
) -> list[ReplicaHead]:
    """Have the members stage it; return those that have not yet."""
    waiting = [h for h in members if not h.has_staged(version)]
    plan.version_for |= {h.pod.uid: version for h in waiting}
    plan.failures = stage_failures(waiting, version)
    return waiting


def _report_staged(
    run: WeightsPass,
    update: LastUpdate,
    staged: str,
    version: WeightsVersion,
    waiting: list[ReplicaHead],
) -> None:
    plan, silent = run.plan, [h.pod.name for h in waiting if h.is_silent]
    text = f"{staged} {update.identity}"
    if plan.failures:
        text += f"; {plan.failures[0]}"
    elif silent:
        text += f"; {silent[0]} does not answer"
    elif missing := waiting_for_bytes_message(version, waiting, run.heads):
        text += f"; {missing}"
    phase = UpdatePhase.FAILED if plan.overdue else UpdatePhase.STAGING
    report_progress(plan, update, phase, text, (ControlVerb.STAGE, waiting))
