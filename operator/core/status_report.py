"""The status that describes what a pass saw: counters, members, conditions, phase. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from rollout_common.wire import WeightsId
from rollout_operator.api import names
from rollout_operator.api.names import ConditionType
from rollout_operator.api.revision import is_current_revision
from rollout_operator.api.spec import DesiredState, PoolMode
from rollout_operator.api.status import (
    MAX_ERRORS,
    MAX_MEMBERS,
    LastError,
    MemberStatus,
    PendingReplacement,
    PoolCondition,
    PoolPhase,
    RolloutReplicaStatus,
    StateTransition,
    UpdatePhase,
)

from .findings import Finding, FindingKind, PoolView, describe_first_wait, first_findings
from .pod_planning import PodGang
from .pod_trouble import NO_IMAGE_TEXT
from .replica_heads import ReplicaHead, describe_wait
from .updates.weights_plan import weights_status

ConditionVerdict = tuple[bool, str, str]
"""Status, reason and message of a condition."""


def build_status(view: PoolView, stored: RolloutReplicaStatus, now: float) -> RolloutReplicaStatus:
    """Return the whole status; times of what did not change are kept from `stored`."""
    found = first_findings(view)
    wanted = [g for g in view.gangs.values() if g.index < view.wanted_replicas]
    current = [g for g in wanted if g.is_complete and _is_gang_current(view, g)]
    conditions = _build_conditions(view, found, stored, now)
    return RolloutReplicaStatus(
        observed_generation=view.seen.generation,
        phase=_pool_phase(view, found),
        message=_status_message(view, found),
        replicas=sum(bool(g.living) for g in view.gangs.values()),
        desired_replicas=view.spec.replicas,
        ready_replicas=view.ready_replicas,
        updated_replicas=len(current),
        asleep_replicas=view.asleep_replicas,
        selector=_label_selector(view),
        weights=weights_status(view.weights, view.heads),
        last_transition=_last_transition(view, stored, now),
        members=_member_statuses(view),
        restarts=stored.restarts + _new_restarts(view, stored),
        replacing=tuple(
            PendingReplacement(replica=index, restarts=count)
            for index, count in sorted(view.pods.replacing.items())
        ),
        last_errors=_last_errors(view, found.get(FindingKind.DEGRADED), stored, now),
        conditions=conditions,
    )


def _is_gang_current(view: PoolView, gang: PodGang) -> bool:
    """Whether all its pods are of the latest revision; a trainer's pods have none."""
    theirs = view.spec.mode is PoolMode.HYBRID
    return theirs or all(is_current_revision(pod.revision, view.spec) for pod in gang.living)


def _label_selector(view: PoolView) -> str:
    """Label selector of one pod per replica."""
    if view.spec.mode is PoolMode.HYBRID and view.spec.colocation is not None:
        return view.spec.colocation.trainer_selector.to_query()
    return names.head_selector(view.seen.name)


def _new_restarts(view: PoolView, stored: RolloutReplicaStatus) -> int:
    """Replicas that this pass restarts; one whose deletion failed has been counted.

    A trainer's containers restart in their pods: what status had of each member tells which are new.
    """
    if view.spec.mode is not PoolMode.HYBRID:
        return len(view.pods.failed)
    before = {member.name: member.restarts for member in stored.members}
    pods = (head.pod for head in view.heads.values() if head.pod.name in before)
    return sum(max(0, pod.restarts - before[pod.name]) for pod in pods)


def _status_message(view: PoolView, found: dict[FindingKind, Finding]) -> str:
    for kind in (FindingKind.DEGRADED, FindingKind.STALLED, FindingKind.PROGRESSING):
        if kind in found:
            return found[kind].message
    if view.spec.suspend:
        return "suspended: no pods run"
    if view.spec.state is not DesiredState.ACTIVE:
        return f"all {view.wanted_replicas} replicas are {view.spec.state.lower()}"
    weights = f"weights {view.weights.committed.identity}"
    return f"{view.ready_replicas} of {view.wanted_replicas} replicas serve {weights}"


def _pool_phase(view: PoolView, found: dict[FindingKind, Finding]) -> PoolPhase:
    ladder: Iterable[tuple[bool, PoolPhase]] = (
        (view.spec.suspend, PoolPhase.SUSPENDED),
        (bool(view.pods.exhausted) and not view.ready_replicas, PoolPhase.FAILED),
        (FindingKind.DEGRADED in found, PoolPhase.DEGRADED),
        (view.spec.state is DesiredState.ASLEEP and view.is_settled, PoolPhase.ASLEEP),
        (view.spec.state is DesiredState.PAUSED and view.is_settled, PoolPhase.PAUSED),
        (_is_updating(view), PoolPhase.UPDATING),
        (view.is_settled, PoolPhase.READY),
        (not view.pods.waiting and any(p.started for p in view.seen.pods), PoolPhase.LOADING),
    )
    return next((phase for holds, phase in ladder if holds), PoolPhase.PENDING)


def _is_updating(view: PoolView) -> bool:
    update = view.weights.update
    running = update is not None and update.phase in (
        UpdatePhase.STAGING,
        UpdatePhase.COMMITTING,
        UpdatePhase.FAILED,
    )
    falling = view.spec.state is not DesiredState.ACTIVE and bool(view.heads)
    return running or falling or bool(view.pods.outdated)


def _build_conditions(
    view: PoolView, found: dict[FindingKind, Finding], stored: RolloutReplicaStatus, now: float
) -> tuple[PoolCondition, ...]:
    verdicts: dict[ConditionType, ConditionVerdict] = {
        ConditionType.READY: _ready_verdict(view),
        ConditionType.PROGRESSING: _progressing_verdict(view, found),
        ConditionType.DEGRADED: _degraded_verdict(view, found),
        ConditionType.WEIGHTS_SYNCED: _weights_synced_verdict(view, stored),
        ConditionType.ASLEEP: _asleep_verdict(view),
        ConditionType.SUSPENDED: _suspended_verdict(view),
    }
    out = []
    for kind, (holds, reason, message) in verdicts.items():
        status = "True" if holds else "False"
        before = stored.find_condition(kind)
        kept = before is not None and before.status == status
        since = before.last_transition_time if kept and before else datetime.fromtimestamp(now, UTC)
        out.append(
            PoolCondition(
                type=kind,
                status="True" if holds else "False",
                reason=reason,
                message=message,
                last_transition_time=since,
                observed_generation=view.seen.generation,
            )
        )
    return tuple(out)


def _ready_verdict(view: PoolView) -> ConditionVerdict:
    if view.spec.suspend:
        return False, "Suspended", "the pool is suspended: set spec.suspend to false to run it"
    if view.spec.state is not DesiredState.ACTIVE:
        return False, view.spec.state.value, f"spec.state is {view.spec.state}"
    text = f"{view.ready_replicas} of {view.wanted_replicas} replicas serve"
    if view.is_settled:
        return True, "Serving", text
    what = describe_first_wait(view)
    return False, "NotServing", text + (what and f": {what}")


def _progressing_verdict(view: PoolView, found: dict[FindingKind, Finding]) -> ConditionVerdict:
    if FindingKind.STALLED in found:
        return False, found[FindingKind.STALLED].reason, found[FindingKind.STALLED].message
    if FindingKind.PROGRESSING in found:
        return True, found[FindingKind.PROGRESSING].reason, found[FindingKind.PROGRESSING].message
    return False, "Complete", _status_message(view, {})


def _degraded_verdict(view: PoolView, found: dict[FindingKind, Finding]) -> ConditionVerdict:
    if FindingKind.DEGRADED in found:
        return True, found[FindingKind.DEGRADED].reason, found[FindingKind.DEGRADED].message
    missing = view.wanted_replicas - view.ready_replicas
    if view.spec.state is not DesiredState.ACTIVE or missing <= 0:
        return False, "AsExpected", "nothing is wrong"
    text = f"no failure is known; {missing} of {view.wanted_replicas} replicas do not serve yet"
    return False, "AsExpected", text


def _weights_synced_verdict(view: PoolView, stored: RolloutReplicaStatus) -> ConditionVerdict:
    update, target = view.weights.update, view.target
    actives = [h.worker.active for h in view.heads.values()]
    ahead = [
        a for a in actives if a is not None and a > max(target, _running_identity(view) or target)
    ]
    if ahead:
        text = (
            f"a worker serves {max(ahead)}, ahead of the target {target}; workers are never "
            "rolled back: raise the target"
        )
        return False, "AheadOfTarget", text
    if update is not None and update.phase is UpdatePhase.FAILED:
        late = "DeadlineExceeded" if view.weights.overdue else "WeightsFailed"
        reason = "Unsupported" if view.weights.unsupported else late
        return False, reason, update.message
    if _running_identity(view) is not None and update is not None:
        return False, update.phase.value, update.message
    if view.weights.withheld:
        text = f"nobody has the bytes of weights {target}: publish again, under a higher version"
        return False, "NoLiveCopy", text
    if view.spec.suspend:
        return False, "Suspended", f"no worker runs; {target} will be loaded before any serves"
    there = sum(a == target for a in actives)
    text = f"{there} of {view.wanted_replicas} replicas have weights {target}"
    if there >= view.wanted_replicas:
        return True, "Synced", text
    before = stored.find_condition(ConditionType.WEIGHTS_SYNCED)
    known = stored.weights.committed
    if (
        before is not None
        and before.status == "True"
        and known is not None
        and known.identity == target
        and there + view.unknown_replicas >= view.wanted_replicas
    ):
        return True, "Synced", before.message  # unknown is not out of date
    return False, "Asleep" if view.spec.state is DesiredState.ASLEEP else "Loading", text


def _running_identity(view: PoolView) -> WeightsId | None:
    update = view.weights.update
    if update is None or update.phase in (UpdatePhase.COMPLETE, UpdatePhase.SUPERSEDED):
        return None
    return update.identity


def _asleep_verdict(view: PoolView) -> ConditionVerdict:
    count = (
        view.replicas_at_rest if view.spec.state is DesiredState.ASLEEP else view.asleep_replicas
    )
    whole = 0 < view.wanted_replicas <= count
    reason = "Asleep" if whole else "PartlyAsleep" if count else "Awake"
    return whole, reason, f"{count} of {view.wanted_replicas} replicas are asleep"


def _suspended_verdict(view: PoolView) -> ConditionVerdict:
    if not view.spec.suspend:
        return False, "NotSuspended", "spec.suspend is false"
    left = len(view.seen.pods)
    if left:
        return (
            False,
            "Suspending",
            f"waiting for {left} pod{'s' * (left != 1)} to drain and terminate",
        )
    return True, "Suspended", "no pods run"


def _last_transition(
    view: PoolView, stored: RolloutReplicaStatus, now: float
) -> StateTransition | None:
    """The lifecycle's last change: begun when spec asked for it, ended when all have done it."""
    wanted = "Suspended" if view.spec.suspend else view.spec.state
    last = stored.last_transition
    if last is None or last.to != wanted:
        moment = datetime.fromtimestamp(now, UTC)
        last = StateTransition(from_=last.to if last else None, to=wanted, started_at=moment)
    if last.completed_at is not None:
        return last
    if view.is_settled:
        moment = datetime.fromtimestamp(now, UTC)
        return last.model_copy(update={"completed_at": moment, "message": "done"})
    return last.model_copy(update={"message": _transition_message(view)})


def _transition_message(view: PoolView) -> str:
    return f"bringing {view.wanted_replicas} replicas to state {view.spec.state}"


def _member_status(view: PoolView, head: ReplicaHead) -> MemberStatus:
    state, active = head.worker.state, head.worker.active
    pod = head.pod
    told = "Terminating" if pod.is_deleting else "Unreachable" if pod.started else "Pending"
    return MemberStatus(
        name=pod.name,
        node=pod.node,
        state=state.lifecycle if state else told,
        epoch=active.epoch if active else None,
        version=active.version if active else None,
        ready=head.is_serving,
        restarts=pod.restarts,
        turn=state.turn.state if state and state.turn else None,
        message=view.ailments.unreachable.get(pod.replica) or describe_wait(head),
    )


def _member_statuses(view: PoolView) -> tuple[MemberStatus, ...]:
    silent = view.ailments.unreachable
    order = sorted(
        view.heads.values(),
        key=lambda h: (h.is_serving, h.pod.replica not in silent, h.pod.replica),
    )
    return tuple(_member_status(view, head) for head in order[:MAX_MEMBERS])


def _last_errors(
    view: PoolView, finding: Finding | None, stored: RolloutReplicaStatus, now: float
) -> tuple[LastError, ...]:
    at = datetime.fromtimestamp(now, UTC)
    # Made first: that cuts a text to its bound, as those in status are.
    made = [
        LastError(time=at, message=message, log=view.pods.logs.get(index, ""))
        for index, message in view.pods.failed.items()
    ]
    # Of a crash loop the failures are there, each once.
    if finding is not None and finding.reason != "CrashLooping":
        made.append(LastError(time=at, message=finding.message))
    known = {_error_key(each.message) for each in stored.last_errors}
    fresh = [error for error in made if _error_key(error.message) not in known]
    return (*reversed(fresh), *stored.last_errors)[:MAX_ERRORS]


def _error_key(message: str) -> str:
    """What makes an error another one: the kubelet tells of one image in turn in two ways."""
    before, found, _ = message.partition(NO_IMAGE_TEXT)
    return before if found else message
