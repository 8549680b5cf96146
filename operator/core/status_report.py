"""The status that a pass writes: what it reports. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Literal

from rollout_operator.api import names
from rollout_operator.api.names import ConditionType
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
from .pods.pod_trouble import NO_IMAGE_TEXT
from .replica_heads import ReplicaHead, describe_wait
from .updates.weights_plan import weights_status

ConditionVerdict = tuple[bool, str, str]
"""Status, reason and message of a condition."""


def build_status(view: PoolView, stored: RolloutReplicaStatus, now: float) -> RolloutReplicaStatus:
    """Return the whole status; times of what did not change are kept from `stored`."""
    found = first_findings(view)
    wanted = [g for g in view.gangs.values() if g.index in view.choice.wanted]
    # A trainer's pods have no revision.
    theirs = view.spec.mode is PoolMode.HYBRID
    current = [g for g in wanted if g.is_complete and (theirs or g.is_current(view.spec))]
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
        conditions=_build_conditions(view, found, stored, now),
    )


def _label_selector(view: PoolView) -> str:
    """Label selector of one pod per replica."""
    if view.spec.mode is PoolMode.HYBRID and view.spec.colocation is not None:
        return view.spec.colocation.trainer_selector.to_query()
    return names.head_selector(view.seen.name)


def _new_restarts(view: PoolView, stored: RolloutReplicaStatus) -> int:
    """Replicas that this pass restarts; one whose deletion failed is counted already.

    A trainer's containers restart in their pods: the stored status shows which restarts are new.
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
    return f"{_serving_text(view)} weights {view.weights.committed.identity}"


def _serving_text(view: PoolView) -> str:
    ready = min(view.ready_replicas, view.wanted_replicas)  # a surge comes in addition
    return f"{ready} of {view.wanted_replicas} replicas serve"


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
    falling = view.spec.state is not DesiredState.ACTIVE and bool(view.heads)
    return view.weights.running_update is not None or falling or bool(view.pods.outdated)


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
        status: Literal["True", "False"] = "True" if holds else "False"
        before = stored.find_condition(kind)
        kept = before is not None and before.status == status
        since = before.last_transition_time if kept and before else datetime.fromtimestamp(now, UTC)
        condition = PoolCondition(
            type=kind,
            status=status,
            reason=reason,
            message=message,
            last_transition_time=since,
            observed_generation=view.seen.generation,
        )
        out.append(condition)
    return tuple(out)


def _ready_verdict(view: PoolView) -> ConditionVerdict:
    if view.spec.suspend:
        return False, "Suspended", "the pool is suspended: set spec.suspend to false to run it"
    if view.spec.state is not DesiredState.ACTIVE:
        return False, view.spec.state.value, f"spec.state is {view.spec.state}"
    text = _serving_text(view)
    if view.is_settled:
        return True, "Serving", text
    what = describe_first_wait(view)
    return False, "NotServing", text + (what and f": {what}")


def _progressing_verdict(view: PoolView, found: dict[FindingKind, Finding]) -> ConditionVerdict:
    for kind in (FindingKind.STALLED, FindingKind.PROGRESSING):
        if kind in found:
            return kind is FindingKind.PROGRESSING, found[kind].reason, found[kind].message
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
    weights, target, running = view.weights, view.target, view.weights.running_update
    actives = [h.worker.active for h in view.heads.values() if h.worker.active is not None]
    highest, expected = max(actives, default=target), running.identity if running else target
    if highest > max(target, expected):
        text = (
            f"a worker serves {highest}, ahead of the target {target}; workers are never "
            "rolled back: raise the target"
        )
        return False, "AheadOfTarget", text
    if running is not None and running.phase is UpdatePhase.FAILED:
        late = "DeadlineExceeded" if weights.overdue else "WeightsFailed"
        return False, "Unsupported" if weights.unsupported else late, running.message
    if running is not None:
        return False, running.phase.value, running.message
    if weights.withheld:
        text = f"nobody has the bytes of weights {target}: publish again, under a higher version"
        return False, "NoLiveCopy", text
    if view.spec.suspend:
        return False, "Suspended", f"no worker runs; {target} will be loaded before any serves"
    return _loaded_verdict(view, stored, sum(active == target for active in actives))


def _loaded_verdict(view: PoolView, stored: RolloutReplicaStatus, there: int) -> ConditionVerdict:
    """Whether the replicas have the target, of which `there` report it; no update is under way."""
    text = f"{there} of {view.wanted_replicas} replicas have weights {view.target}"
    if there >= view.wanted_replicas:
        return True, "Synced", text
    before, known = stored.find_condition(ConditionType.WEIGHTS_SYNCED), stored.weights.committed
    same_target = known is not None and known.identity == view.target
    enough = there + view.unknown_replicas >= view.wanted_replicas  # unknown is not out of date
    if before and before.status == "True" and same_target and enough:
        return True, "Synced", before.message
    return False, "Asleep" if view.spec.state is DesiredState.ASLEEP else "Loading", text


def _asleep_verdict(view: PoolView) -> ConditionVerdict:
    asleep = view.spec.state is DesiredState.ASLEEP
    count = view.replicas_at_rest if asleep else view.asleep_replicas
    whole = 0 < view.wanted_replicas <= count
    reason = "Asleep" if whole else "PartlyAsleep" if count else "Awake"
    return whole, reason, f"{count} of {view.wanted_replicas} replicas are asleep"


def _suspended_verdict(view: PoolView) -> ConditionVerdict:
    if not view.spec.suspend:
        return False, "NotSuspended", "spec.suspend is false"
    if left := len(view.seen.pods):
        text = f"waiting for {left} pod{'s' * (left != 1)} to drain and terminate"
        return False, "Suspending", text
    return True, "Suspended", "no pods run"


def _last_transition(
    view: PoolView, stored: RolloutReplicaStatus, now: float
) -> StateTransition | None:
    """The lifecycle's last change: it begins when spec asks for it and ends when all have done it."""
    wanted = "Suspended" if view.spec.suspend else view.spec.state
    last, moment = stored.last_transition, datetime.fromtimestamp(now, UTC)
    if last is None or last.to != wanted:
        last = StateTransition(from_=last.to if last else None, to=wanted, started_at=moment)
    if last.completed_at is not None:
        return last
    if view.is_settled:
        return last.model_copy(update={"completed_at": moment, "message": "done"})
    text = f"bringing {view.wanted_replicas} replicas to state {view.spec.state}"
    return last.model_copy(update={"message": text})


def _member_status(view: PoolView, head: ReplicaHead) -> MemberStatus:
    state, active = head.worker.state, head.worker.active
    pod = head.pod
    silent = "Terminating" if pod.is_deleting else "Unreachable" if pod.started else "Pending"
    return MemberStatus(
        name=pod.name,
        node=pod.node,
        state=state.lifecycle if state else silent,
        epoch=active.epoch if active else None,
        version=active.version if active else None,
        ready=head.is_serving,
        restarts=pod.restarts,
        turn=state.turn.state if state and state.turn else None,
        message=view.troubles.unreachable.get(pod.replica) or describe_wait(head),
    )


def _member_statuses(view: PoolView) -> tuple[MemberStatus, ...]:
    silent = view.troubles.unreachable

    def order(head: ReplicaHead) -> tuple[bool, bool, int]:
        return head.is_serving, head.pod.replica not in silent, head.pod.replica

    first = sorted(view.heads.values(), key=order)[:MAX_MEMBERS]
    return tuple(_member_status(view, head) for head in first)


def _last_errors(
    view: PoolView, finding: Finding | None, stored: RolloutReplicaStatus, now: float
) -> tuple[LastError, ...]:
    at = datetime.fromtimestamp(now, UTC)
    # The model cuts a text to its bound: only then it compares with those in status.
    made = [
        LastError(time=at, message=message, log=view.pods.logs.get(index, ""))
        for index, message in view.pods.failed.items()
    ]
    # A crash loop adds nothing: its failures are in the list, each once.
    if finding is not None and finding.reason != "CrashLooping":
        made.append(LastError(time=at, message=finding.message))
    known = {_error_key(each.message) for each in stored.last_errors}
    fresh = [error for error in made if _error_key(error.message) not in known]
    return (*reversed(fresh), *stored.last_errors)[:MAX_ERRORS]


def _error_key(message: str) -> str:
    """What makes an error a new one: the kubelet reports a missing image under two alternating reasons."""
    before, found, _ = message.partition(NO_IMAGE_TEXT)
    return before if found else message


def status_for_invalid_spec(
    stored: RolloutReplicaStatus, pool: Mapping[str, Any], why: str, now: float
) -> RolloutReplicaStatus:
    """Return the stored status, Degraded: this operator can't read the spec and touches nothing."""
    degraded = _degraded_condition(stored, pool, why, now, reason="InvalidSpec")
    others = tuple(c for c in stored.conditions if c.type != ConditionType.DEGRADED)
    return stored.model_copy(
        update={
            "observed_generation": degraded.observed_generation,
            "phase": PoolPhase.DEGRADED,
            "message": why[:1024],
            "conditions": (*others, degraded),
        }
    )


def document_for_unreadable_status(
    stored: RolloutReplicaStatus, pool: Mapping[str, Any], why: str, now: float
) -> dict[str, Any] | None:
    """Return the object's own status, with nothing changed but Degraded; None: it is so already.

    A newer operator needs what this one can't read: a status made of what this one understood would
    erase it, the committed weights first of all.
    """
    degraded = _degraded_condition(stored, pool, why, now, reason="UnreadableStatus")
    if stored.find_condition(ConditionType.DEGRADED) == degraded:
        return None
    kept = dict(pool["status"])
    found = kept["conditions"] if isinstance(kept.get("conditions"), list) else []
    others = [c for c in found if not _is_degraded(c)]
    kept["conditions"] = [*others, degraded.model_dump(by_alias=True)]
    return kept


def _degraded_condition(
    stored: RolloutReplicaStatus, pool: Mapping[str, Any], why: str, now: float, *, reason: str
) -> PoolCondition:
    """Return the condition Degraded, which keeps its time while it stays true."""
    before = stored.find_condition(ConditionType.DEGRADED)
    since = before.last_transition_time if before and before.status == "True" else None
    return PoolCondition(
        type=ConditionType.DEGRADED,
        status="True",
        reason=reason,
        message=why,
        last_transition_time=since or datetime.fromtimestamp(now, UTC),
        observed_generation=pool["metadata"].get("generation", 0),
    )


def _is_degraded(condition: object) -> bool:
    return isinstance(condition, Mapping) and condition.get("type") == ConditionType.DEGRADED
