"""The phase Committing: it only goes forward, until every serving replica has the new weights."""

from __future__ import annotations

from collections.abc import Mapping

from rollout_operator.api.spec import RolloutReplicaSpec, Strategy
from rollout_operator.api.status import LastUpdate
from rollout_operator.core.heads import Head
from rollout_worker.schemas import WeightsId

from .lifecycle import finish
from .weights_plan import WeightsPlan, unpolled, version_of


def advance_commit(
    spec: RolloutReplicaSpec,
    plan: WeightsPlan,
    update: LastUpdate,
    heads: Mapping[str, Head],
    now: float,
) -> None:
    """Move every head to the version; the update is done once all that serve are there."""
    version = version_of(update, plan.committed.source)
    behind = [h for h in heads.values() if not h.at_least(version.identity)]
    floor = plan.committed.identity
    in_service = [h for h in behind if h.in_service(floor)]
    failed = _failures(spec, in_service, version.identity, plan.overdue)
    plan.failures = sorted(failed.values())
    for head in behind:
        plan.version_for[head.pod.uid] = version
    if spec.weights.strategy is Strategy.ALL_AT_ONCE:
        plan.may_commit = {h.pod.uid for h in behind}
        plan.out_of_service = set(failed)
    else:
        plan.may_commit = _turns(spec, behind, in_service, failed)
    # Who failed is out of the Service before the others' weights count as the pool's.
    waiting = [
        h for h in in_service if not plan.out_of_service or h.pod.uid not in failed or h.pod.gate
    ]
    done = len(heads) - len(behind)
    if not waiting and (done or not in_service) and not unpolled(heads):
        finish(plan, now, f"{done} of {len(heads)} replicas serve it")
        return
    text = f"{done} of {len(heads)} replicas have committed {version.identity}"
    if plan.failures:
        text += f"; {plan.failures[0]}"
    plan.update = update.model_copy(update={"message": text})


def _failures(
    spec: RolloutReplicaSpec, in_service: list[Head], identity: WeightsId, overdue: bool
) -> dict[str, str]:
    """Why heads have not committed the version, by pod uid."""
    found = {}
    for head in in_service:
        text = head.failure(identity, "commit", "stage")
        if text is None and overdue:
            seconds = spec.weights.deadline_seconds
            text = f"{head.pod.name}: has not committed weights {identity} within {seconds} s"
        if text is not None:
            found[head.pod.uid] = text
    return found


def _turns(
    spec: RolloutReplicaSpec, behind: list[Head], in_service: list[Head], failed: Mapping[str, str]
) -> set[str]:
    """Heads that may commit now: all (Eager), or the next few while none fails (Rolling)."""
    joiners = {h.pod.uid for h in behind if h not in in_service}
    if spec.weights.strategy is Strategy.EAGER:
        return joiners | {h.pod.uid for h in in_service}
    busy = [h for h in in_service if "commit" in h.worker.running]
    free = max(spec.weights.max_unavailable - len(busy), 0)
    if failed:
        stuck = [h for h in in_service if h.pod.uid in failed]
        return joiners | {h.pod.uid for h in (*busy, *stuck[:free])}
    order = sorted((h for h in in_service if h not in busy), key=lambda h: h.pod.replica)
    return joiners | {h.pod.uid for h in (*busy, *order[:free])}
