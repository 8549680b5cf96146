"""The phase Committing: it goes forward, until every serving replica has the new weights.

There is one way out: while no worker serves the new weights and each that should has failed, the
update is Failed. No replica leaves the Service for it, retries go on, and a newer target supersedes it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rollout_operator.api.spec import WeightsStrategy
from rollout_operator.api.status import LastUpdate, UpdatePhase
from rollout_operator.core.pass_plan import ControlVerb
from rollout_operator.core.replica_heads import ReplicaHead, WeightsVersion

from .pushed_copies import is_copy_available, is_lost_everywhere, is_stranded, no_copy_message
from .update_lifecycle import finish_update, refusal_message, report_progress
from .weights_plan import WeightsPass, has_unpolled_head


def advance_commit(run: WeightsPass, update: LastUpdate) -> None:
    """Move every head to the version; the update is done once all that serve are there."""
    plan, heads, version = run.plan, run.heads, run.bound_version(update)
    update = update.model_copy(update={"root_hash": version.root_hash})
    behind = [h for h in heads.values() if not h.has_at_least(version.identity)]
    in_service = [h for h in behind if h.is_in_service(plan.committed.identity)]
    served = run.is_served(version.identity)
    given = is_copy_available(version, heads)
    lost = {h.pod.uid for h in in_service if is_stranded(h, version, given=given)}
    # The first replica to commit keeps a copy for the others.
    hopeless = lost if lost and (served or is_lost_everywhere(version, heads)) else set()
    found = {h.pod.uid: _commit_failure(run, h, version, hopeless) for h in in_service}
    failed = {uid: text for uid, text in found.items() if text}
    plan.failures = sorted(failed.values())
    refused = not served and _have_all_refused(run, update, in_service, version, lost)
    # A head that is not in service must not be the first to have what the others refuse.
    plan.version_for |= {h.pod.uid: version for h in (in_service if refused else behind)}
    if run.is_all_at_once:
        plan.may_commit = set(plan.version_for)
        plan.out_of_service = set(failed) if served else set()
    else:
        # Replicas that wait for a copy take no turn: the first to commit has one to give.
        able = [h for h in in_service if h.pod.uid not in lost]
        plan.may_commit = _heads_next_to_commit(run, behind, able, failed)
    # A replica that failed leaves the Service before the others' weights count as the pool's.
    waiting = [h for h in in_service if h.pod.uid not in plan.out_of_service or h.pod.gate]
    done = len(heads) - len(behind)
    if not waiting and (done or not in_service) and not has_unpolled_head(heads):
        finish_update(run, update, f"{done} of {len(heads)} replicas serve it")
        return
    text = f"{done} of {len(heads)} replicas have committed {version.identity}"
    text += f"; {plan.failures[0]}" if plan.failures else ""
    phase = UpdatePhase.FAILED if refused else UpdatePhase.COMMITTING
    report_progress(plan, update, phase, text, (ControlVerb.COMMIT, in_service))


def _commit_failure(
    run: WeightsPass, head: ReplicaHead, version: WeightsVersion, hopeless: Collection[str]
) -> str | None:
    """Why a head has not committed the version; None while nothing is known to be wrong."""
    if text := refusal_message(head, version):
        return text
    if head.pod.uid in hopeless:
        return no_copy_message(head, version)
    if not run.plan.overdue:
        return None
    seconds = run.spec.weights.deadline_seconds
    return f"{head.pod.name}: has not committed weights {version.identity} within {seconds} s"


def _have_all_refused(
    run: WeightsPass,
    update: LastUpdate,
    in_service: list[ReplicaHead],
    version: WeightsVersion,
    lost: Collection[str],
) -> bool:
    """Each that serves has refused or failed to commit; once that was so, only success ends it."""
    if update.phase is UpdatePhase.FAILED:
        return True

    def refuses(head: ReplicaHead) -> bool:
        failed = refusal_message(head, version) or head.pod.uid in lost
        late = run.plan.overdue and ControlVerb.COMMIT not in head.worker.running
        return bool(failed) or late

    return bool(in_service) and all(refuses(head) for head in in_service)


def _heads_next_to_commit(
    run: WeightsPass,
    behind: list[ReplicaHead],
    in_service: list[ReplicaHead],
    failed: Mapping[str, str],
) -> set[str]:
    """Heads that may commit now: all (Eager), or the next few while none fails (Rolling).

    The replica that is furthest behind is next, so that none is left out however often the target moves.
    """
    if run.spec.weights.strategy is WeightsStrategy.EAGER:
        return {h.pod.uid for h in behind}
    joiners = {h.pod.uid for h in behind} - {h.pod.uid for h in in_service}
    busy = [h for h in in_service if ControlVerb.COMMIT in h.worker.running]
    free = max(run.spec.weights.max_unavailable - len(busy), 0)
    if failed:
        order = [h for h in in_service if h.pod.uid in failed]
    else:
        ready = [
            (h.worker.active.as_tuple(), h.pod.replica, h) for h in in_service if h.worker.active
        ]
        waits = (h for *_, h in sorted(ready, key=lambda each: each[:2]))
        order = [h for h in waits if ControlVerb.COMMIT not in h.worker.running]
    return joiners | {h.pod.uid for h in (*busy, *order[:free])}
