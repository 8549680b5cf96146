"""The phase Committing: it goes forward, until every serving replica has the new weights.

There is one way out: while no worker serves the new weights and each that should has failed, the
update is Failed. Nobody is sent away for it, retries go on, and a newer target supersedes it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rollout_operator.api.spec import RolloutReplicaSpec, WeightsStrategy
from rollout_operator.api.status import LastUpdate, UpdatePhase
from rollout_operator.core.pass_plan import ControlVerb, EventNote
from rollout_operator.core.replica_heads import ReplicaHead, WeightsVersion

from .content_hashes import bind_root_hash
from .pushed_copies import is_copy_available, is_lost_everywhere, is_stranded, no_copy_message
from .staging_phase import count_attempts
from .update_lifecycle import finish_update, is_served
from .weights_plan import WeightsPlan, has_unpolled_head, update_version


def advance_commit(
    spec: RolloutReplicaSpec,
    plan: WeightsPlan,
    update: LastUpdate,
    heads: Mapping[str, ReplicaHead],
    now: float,
) -> None:
    """Move every head to the version; the update is done once all that serve are there."""
    version = bind_root_hash(update_version(update, plan.committed.source), heads)
    update = update.model_copy(update={"root_hash": version.root_hash})
    behind = [h for h in heads.values() if not h.has_at_least(version.identity)]
    floor = plan.committed.identity
    in_service = [h for h in behind if h.is_in_service(floor)]
    served = is_served(version.identity, heads)
    given = is_copy_available(version, heads)
    lost = {h.pod.uid for h in in_service if is_stranded(h, version, given=given)}
    # Who commits first keeps a copy for the others.
    hopeless = lost if lost and (served or is_lost_everywhere(version, heads)) else set()
    found = (_commit_failure(spec, h, version, hopeless, plan.overdue) for h in in_service)
    failed = {h.pod.uid: text for h, text in zip(in_service, found, strict=True) if text}
    plan.failures = sorted(failed.values())
    refused = not served and _have_all_refused(update, in_service, version, lost, plan.overdue)
    # Who is not in service must not be the first to have what the others refuse.
    for head in in_service if refused else behind:
        plan.version_for[head.pod.uid] = version
    if spec.weights.strategy is WeightsStrategy.ALL_AT_ONCE:
        plan.may_commit = set(plan.version_for)
        plan.out_of_service = set(failed) if served else set()
    else:
        # Who waits for a copy takes nobody's turn: whoever commits first has one to give.
        able = [h for h in in_service if h.pod.uid not in lost]
        plan.may_commit = _heads_next_to_commit(spec, behind, able, failed)
    # Who failed is out of the Service before the others' weights count as the pool's.
    waiting = [h for h in in_service if h.pod.uid not in plan.out_of_service or h.pod.gate]
    done = len(heads) - len(behind)
    if not waiting and (done or not in_service) and not has_unpolled_head(heads):
        plan.update = update
        finish_update(plan, now, f"{done} of {len(heads)} replicas serve it")
        return
    text = f"{done} of {len(heads)} replicas have committed {version.identity}"
    _report_progress(plan, update, in_service, text, refused=refused)


def _report_progress(
    plan: WeightsPlan,
    update: LastUpdate,
    waiting: Collection[ReplicaHead],
    text: str,
    *,
    refused: bool,
) -> None:
    if plan.failures:
        text += f"; {plan.failures[0]}"
    if refused and plan.overdue and update.phase is not UpdatePhase.FAILED:
        plan.notes.append(EventNote("Warning", "WeightsDeadlineExceeded", text))
    plan.update = update.model_copy(
        update={
            "phase": UpdatePhase.FAILED if refused else UpdatePhase.COMMITTING,
            "attempts": max(update.attempts, count_attempts(waiting, update, ControlVerb.COMMIT)),
            "message": text,
        }
    )


def _commit_failure(
    spec: RolloutReplicaSpec,
    head: ReplicaHead,
    version: WeightsVersion,
    hopeless: Collection[str],
    overdue: bool,
) -> str | None:
    """Why a head has not committed the version; None while nothing is known to be wrong."""
    if text := _refusal_message(head, version):
        return text
    if head.pod.uid in hopeless:
        return no_copy_message(head, version)
    if not overdue:
        return None
    seconds = spec.weights.deadline_seconds
    return f"{head.pod.name}: has not committed weights {version.identity} within {seconds} s"


def _refusal_message(head: ReplicaHead, version: WeightsVersion) -> str | None:
    found = head.mismatch_message(version) or head.failure_message(
        version.identity, ControlVerb.COMMIT, ControlVerb.STAGE
    )
    return found or (None if head.has_staged(version) else head.newer_push_message(version))


def _have_all_refused(
    update: LastUpdate,
    in_service: list[ReplicaHead],
    version: WeightsVersion,
    lost: Collection[str],
    overdue: bool,
) -> bool:
    """Each that serves has refused or failed to commit; once that was so, only success ends it."""
    if update.phase is UpdatePhase.FAILED:
        return True

    def refuses(head: ReplicaHead) -> bool:
        failed = _refusal_message(head, version) or head.pod.uid in lost
        return bool(failed) or (overdue and ControlVerb.COMMIT not in head.worker.running)

    return bool(in_service) and all(refuses(head) for head in in_service)


def _heads_next_to_commit(
    spec: RolloutReplicaSpec,
    behind: list[ReplicaHead],
    in_service: list[ReplicaHead],
    failed: Mapping[str, str],
) -> set[str]:
    """Heads that may commit now: all (Eager), or the next few while none fails (Rolling).

    Who is furthest behind is next, so that nobody is left out however often the target moves.
    """
    if spec.weights.strategy is WeightsStrategy.EAGER:
        return {h.pod.uid for h in behind}
    joiners = {h.pod.uid for h in behind} - {h.pod.uid for h in in_service}
    busy = [h for h in in_service if ControlVerb.COMMIT in h.worker.running]
    free = max(spec.weights.max_unavailable - len(busy), 0)
    if failed:
        stuck = [h for h in in_service if h.pod.uid in failed]
        return joiners | {h.pod.uid for h in (*busy, *stuck[:free])}
    ready = [(h.worker.active.as_tuple(), h.pod.replica, h) for h in in_service if h.worker.active]
    waits = (h for *_, h in sorted(ready, key=lambda each: each[:2]))
    order = [h for h in waits if ControlVerb.COMMIT not in h.worker.running]
    return joiners | {h.pod.uid for h in (*busy, *order[:free])}
