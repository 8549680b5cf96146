"""The status that describes what a pass saw: counters, members, conditions, phase. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from rollout_operator.api import names
from rollout_operator.api.names import Condition
from rollout_operator.api.revision import is_current
from rollout_operator.api.spec import Mode, State
from rollout_operator.api.status import (
    MAX_ERRORS,
    MAX_MEMBERS,
    LastError,
    Member,
    Phase,
    PoolCondition,
    Replacement,
    RolloutReplicaStatus,
    Transition,
    UpdatePhase,
)
from rollout_worker.schemas import WeightsId

from .findings import Finding, Kind, find, first_wait
from .gangs import Gang
from .heads import Head, waits_for
from .podtrouble import NO_IMAGE
from .updates.status import weights_status
from .view import View

Verdict = tuple[bool, str, str]
"""Status, reason and message of a condition."""


def build_status(view: View, stored: RolloutReplicaStatus, now: float) -> RolloutReplicaStatus:
    """Return the whole status; times of what did not change are kept from `stored`."""
    found = find(view)
    wanted = [g for g in view.gangs.values() if g.index < view.wanted]
    current = [g for g in wanted if g.complete and _is_current(view, g)]
    conditions = _conditions(view, found, stored, now)
    return RolloutReplicaStatus(
        observed_generation=view.seen.generation,
        phase=_phase(view, found),
        message=_sentence(view, found),
        replicas=sum(bool(g.living) for g in view.gangs.values()),
        desired_replicas=view.spec.replicas,
        ready_replicas=view.ready,
        updated_replicas=len(current),
        asleep_replicas=view.asleep,
        selector=_selector(view),
        weights=weights_status(view.weights, view.heads),
        last_transition=_transition(view, stored, now),
        members=_members(view),
        restarts=stored.restarts + _new_restarts(view, stored),
        replacing=tuple(
            Replacement(replica=index, restarts=count)
            for index, count in sorted(view.pods.replacing.items())
        ),
        last_errors=_last_errors(view, found.get(Kind.DEGRADED), stored, now),
        conditions=conditions,
    )


def _is_current(view: View, gang: Gang) -> bool:
    """Whether all its pods are of the latest revision; a trainer's pods have none."""
    theirs = view.spec.mode is Mode.HYBRID
    return theirs or all(is_current(pod.revision, view.spec) for pod in gang.living)


def _selector(view: View) -> str:
    """Label selector of one pod per replica."""
    if view.spec.mode is Mode.HYBRID and view.spec.colocation is not None:
        return view.spec.colocation.trainer_selector.text()
    return names.head_selector(view.seen.name)


def _new_restarts(view: View, stored: RolloutReplicaStatus) -> int:
    """Replicas that this pass restarts; one whose deletion failed has been counted.

    A trainer's containers restart in their pods: what status had of each member tells which are new.
    """
    if view.spec.mode is not Mode.HYBRID:
        return len(view.pods.failed)
    before = {member.name: member.restarts for member in stored.members}
    pods = (head.pod for head in view.heads.values() if head.pod.name in before)
    return sum(max(0, pod.restarts - before[pod.name]) for pod in pods)


def _sentence(view: View, found: dict[Kind, Finding]) -> str:
    for kind in (Kind.DEGRADED, Kind.STALLED, Kind.PROGRESSING):
        if kind in found:
            return found[kind].message
    if view.spec.suspend:
        return "suspended: no pods run"
    if view.spec.state is not State.ACTIVE:
        return f"all {view.wanted} replicas are {view.spec.state.lower()}"
    weights = f"weights {view.weights.committed.identity}"
    return f"{view.ready} of {view.wanted} replicas serve {weights}"


def _phase(view: View, found: dict[Kind, Finding]) -> Phase:
    ladder: Iterable[tuple[bool, Phase]] = (
        (view.spec.suspend, Phase.SUSPENDED),
        (bool(view.pods.exhausted) and not view.ready, Phase.FAILED),
        (Kind.DEGRADED in found, Phase.DEGRADED),
        (view.spec.state is State.ASLEEP and view.reached, Phase.ASLEEP),
        (view.spec.state is State.PAUSED and view.reached, Phase.PAUSED),
        (_is_updating(view), Phase.UPDATING),
        (view.reached, Phase.READY),
        (not view.pods.waiting and any(p.started for p in view.seen.pods), Phase.LOADING),
    )
    return next((phase for holds, phase in ladder if holds), Phase.PENDING)


def _is_updating(view: View) -> bool:
    update = view.weights.update
    running = update is not None and update.phase in (
        UpdatePhase.STAGING,
        UpdatePhase.COMMITTING,
        UpdatePhase.FAILED,
    )
    falling = view.spec.state is not State.ACTIVE and bool(view.heads)
    return running or falling or bool(view.pods.outdated)


def _conditions(
    view: View, found: dict[Kind, Finding], stored: RolloutReplicaStatus, now: float
) -> tuple[PoolCondition, ...]:
    verdicts: dict[Condition, Verdict] = {
        Condition.READY: _ready(view),
        Condition.PROGRESSING: _progressing(view, found),
        Condition.DEGRADED: _degraded(view, found),
        Condition.WEIGHTS_SYNCED: _synced(view, stored),
        Condition.ASLEEP: _asleep(view),
        Condition.SUSPENDED: _suspended(view),
    }
    out = []
    for kind, (holds, reason, message) in verdicts.items():
        status = "True" if holds else "False"
        before = stored.condition(kind)
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


def _ready(view: View) -> Verdict:
    if view.spec.suspend:
        return False, "Suspended", "the pool is suspended: set spec.suspend to false to run it"
    if view.spec.state is not State.ACTIVE:
        return False, view.spec.state.value, f"spec.state is {view.spec.state}"
    text = f"{view.ready} of {view.wanted} replicas serve"
    if view.reached:
        return True, "Serving", text
    what = first_wait(view)
    return False, "NotServing", text + (what and f": {what}")


def _progressing(view: View, found: dict[Kind, Finding]) -> Verdict:
    if Kind.STALLED in found:
        return False, found[Kind.STALLED].reason, found[Kind.STALLED].message
    if Kind.PROGRESSING in found:
        return True, found[Kind.PROGRESSING].reason, found[Kind.PROGRESSING].message
    return False, "Complete", _sentence(view, {})


def _degraded(view: View, found: dict[Kind, Finding]) -> Verdict:
    if Kind.DEGRADED in found:
        return True, found[Kind.DEGRADED].reason, found[Kind.DEGRADED].message
    missing = view.wanted - view.ready
    if view.spec.state is not State.ACTIVE or missing <= 0:
        return False, "AsExpected", "nothing is wrong"
    text = f"no failure is known; {missing} of {view.wanted} replicas do not serve yet"
    return False, "AsExpected", text


def _synced(view: View, stored: RolloutReplicaStatus) -> Verdict:
    update, target = view.weights.update, view.target
    actives = [h.worker.active for h in view.heads.values()]
    ahead = [a for a in actives if a is not None and a > max(target, _running_id(view) or target)]
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
    if _running_id(view) is not None and update is not None:
        return False, update.phase.value, update.message
    if view.weights.withheld:
        text = f"nobody has the bytes of weights {target}: publish again, under a higher version"
        return False, "NoLiveCopy", text
    if view.spec.suspend:
        return False, "Suspended", f"no worker runs; {target} will be loaded before any serves"
    there = sum(a == target for a in actives)
    text = f"{there} of {view.wanted} replicas have weights {target}"
    if there >= view.wanted:
        return True, "Synced", text
    before = stored.condition(Condition.WEIGHTS_SYNCED)
    known = stored.weights.committed
    if (
        before is not None
        and before.status == "True"
        and known is not None
        and known.identity == target
        and there + view.unknown >= view.wanted
    ):
        return True, "Synced", before.message  # unknown is not out of date
    return False, "Asleep" if view.spec.state is State.ASLEEP else "Loading", text


def _running_id(view: View) -> WeightsId | None:
    update = view.weights.update
    if update is None or update.phase in (UpdatePhase.COMPLETE, UpdatePhase.SUPERSEDED):
        return None
    return update.identity


def _asleep(view: View) -> Verdict:
    count = view.at_rest if view.spec.state is State.ASLEEP else view.asleep
    whole = 0 < view.wanted <= count
    reason = "Asleep" if whole else "PartlyAsleep" if count else "Awake"
    return whole, reason, f"{count} of {view.wanted} replicas are asleep"


def _suspended(view: View) -> Verdict:
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


def _transition(view: View, stored: RolloutReplicaStatus, now: float) -> Transition | None:
    """The lifecycle's last change: begun when spec asked for it, ended when all have done it."""
    wanted = "Suspended" if view.spec.suspend else view.spec.state
    last = stored.last_transition
    if last is None or last.to != wanted:
        moment = datetime.fromtimestamp(now, UTC)
        last = Transition(from_=last.to if last else None, to=wanted, started_at=moment)
    if last.completed_at is not None:
        return last
    if view.reached:
        moment = datetime.fromtimestamp(now, UTC)
        return last.model_copy(update={"completed_at": moment, "message": "done"})
    return last.model_copy(update={"message": _waiting(view)})


def _waiting(view: View) -> str:
    return f"bringing {view.wanted} replicas to state {view.spec.state}"


def _member(view: View, head: Head) -> Member:
    state, active = head.worker.state, head.worker.active
    pod = head.pod
    told = "Terminating" if pod.deleting else "Unreachable" if pod.started else "Pending"
    return Member(
        name=pod.name,
        node=pod.node,
        state=state.lifecycle if state else told,
        epoch=active.epoch if active else None,
        version=active.version if active else None,
        ready=head.serves,
        restarts=pod.restarts,
        turn=state.turn.state if state and state.turn else None,
        message=view.ailments.unreachable.get(pod.replica) or waits_for(head),
    )


def _members(view: View) -> tuple[Member, ...]:
    silent = view.ailments.unreachable
    order = sorted(
        view.heads.values(),
        key=lambda h: (h.serves, h.pod.replica not in silent, h.pod.replica),
    )
    return tuple(_member(view, head) for head in order[:MAX_MEMBERS])


def _last_errors(
    view: View, finding: Finding | None, stored: RolloutReplicaStatus, now: float
) -> tuple[LastError, ...]:
    at = datetime.fromtimestamp(now, UTC)
    # Made first: that cuts a text to its bound, as those in status are.
    made = [
        LastError(time=at, message=message, log=view.pods.logs.get(index, ""))
        for index, message in view.pods.failed.items()
    ]
    if (
        finding is not None and finding.reason != "CrashLooping"
    ):  # its failures are there, each once
        made.append(LastError(time=at, message=finding.message))
    known = {_gist(each.message) for each in stored.last_errors}
    fresh = [error for error in made if _gist(error.message) not in known]
    return (*reversed(fresh), *stored.last_errors)[:MAX_ERRORS]


def _gist(message: str) -> str:
    """What makes an error another one: the kubelet tells of one image in turn in two ways."""
    before, found, _ = message.partition(NO_IMAGE)
    return before if found else message
