"""How a pool comes from one version of its weights to the next. Pure.

`plan_weights` is the case table of the public contract: it takes the stored status, the target
and what the workers answered, and says which update is under way, what each head must do next
and what is committed. The stored phase is the decision: commit calls are planned only when
`Committing` stands in the status that was read, so a crash can't undo a begun commit.

The *barrier* of an AllAtOnce update is the set of worker processes that served when staging
began. It lives in memory only; a new leader forms it anew from those that serve then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from rollout_operator.api.spec import RolloutReplicaSpec, State, Strategy
from rollout_operator.api.status import (
    ActiveRange,
    CommittedWeights,
    LastUpdate,
    StatusId,
    UpdatePhase,
    WeightsStatus,
)
from rollout_worker.schemas import (
    CHECKPOINT,
    Checkpoint,
    WeightsId,
    WeightsSource,
)

from .heads import Head, Version
from .plan import Wait
from .world import Observed

UNDER_WAY = (UpdatePhase.STAGING, UpdatePhase.COMMITTING, UpdatePhase.FAILED)


@dataclass(slots=True)
class WeightsPlan:
    """What `plan_weights` decides; the maps are by pod uid."""

    committed: CommittedWeights
    update: LastUpdate | None
    barrier: frozenset[str] | None = None
    bring: dict[str, Version] = field(default_factory=dict)
    """Heads that must come to this version."""
    may_commit: set[str] = field(default_factory=set)
    """Of those, heads that may flip now."""
    out: set[str] = field(default_factory=set)
    """Heads that failed to commit what the rest serves: no traffic."""
    fence_epoch: int = 0
    failures: list[str] = field(default_factory=list)
    overdue: bool = False
    notes: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def committing(self) -> bool:
        """A commit has begun and is not finished."""
        return self.update is not None and self.update.phase is UpdatePhase.COMMITTING


def target_of(spec: RolloutReplicaSpec) -> Version:
    """The pointer, or the checkpoint where there is none."""
    if spec.target is None:
        return Version(CHECKPOINT, WeightsSource(checkpoint=Checkpoint()))
    return Version(spec.target.identity, spec.target.source)


def committed_of(weights: WeightsStatus) -> CommittedWeights:
    """The stored committed weights; a new pool begins with the checkpoint."""
    if weights.committed is not None:
        return weights.committed
    return CommittedWeights(epoch=0, version=0, source=WeightsSource(checkpoint=Checkpoint()))


def plan_weights(
    spec: RolloutReplicaSpec,
    seen: Observed,
    stored: WeightsStatus,
    heads: Mapping[str, Head],
    now: float,
    wait: Wait,
) -> WeightsPlan:
    """Decide the update's next phase and what each head must do.

    Args:
        spec: the wanted pool.
        seen: the world; its `barrier` is what this process remembers.
        stored: `status.weights` as read from the API server.
        heads: living heads of wanted replicas, by pod uid.
        now: wall clock, seconds.
        wait: told when to look again.
    """
    plan = WeightsPlan(committed_of(stored), stored.last_update, seen.barrier)
    target = target_of(spec)
    plan.fence_epoch = max(target.identity.epoch, plan.committed.epoch)
    if _blind(heads):
        wait.at_most(1.0)
        if plan.update is None or plan.update.phase not in UNDER_WAY:
            return plan
    _settle_target(spec, plan, target, heads, now)
    if plan.update is not None and plan.update.phase in UNDER_WAY:
        _advance(spec, plan, heads, now, wait)
    else:
        plan.barrier = None
    _bring_joiners(spec, plan, target, heads)
    _learn_hash(plan, heads)
    return plan


def _blind(heads: Mapping[str, Head]) -> bool:
    """Some running worker has not been asked yet: nothing may be concluded from silence."""
    return any(
        h.pod.started and not h.pod.finished and h.worker.state is None and h.worker.error is None
        for h in heads.values()
    )


def _running(plan: WeightsPlan) -> WeightsId | None:
    """Identity of the update under way."""
    if plan.update is None or plan.update.phase not in UNDER_WAY:
        return None
    return plan.update.identity


def _settle_target(
    spec: RolloutReplicaSpec,
    plan: WeightsPlan,
    target: Version,
    heads: Mapping[str, Head],
    now: float,
) -> None:
    """Finish, supersede or begin an update; afterwards at most one is under way."""
    running = _running(plan)
    if running is not None and any(h.at_least(running) for h in heads.values()):
        _enter_committing(plan)  # somebody serves it already: there is no way back
    resting = spec.suspend or spec.state is State.ASLEEP
    if running is not None and not plan.committing:
        _maybe_supersede(spec, plan, target, heads, resting)
    elif plan.committing and spec.weights.strategy is not Strategy.ALL_AT_ONCE:
        _maybe_retarget(plan, target)
    if plan.committing and spec.suspend:
        _finish(plan, now, "committed while the pool is suspended; loaded before it serves again")
    if _running(plan) is None and target.identity > plan.committed.identity:
        _begin(plan, target, heads, now, resting)
    _complete_adopted(spec, plan, heads, now)


def _enter_committing(plan: WeightsPlan) -> None:
    if plan.update is not None and plan.update.phase is not UpdatePhase.COMMITTING:
        plan.update = plan.update.model_copy(update={"phase": UpdatePhase.COMMITTING})


def _maybe_supersede(
    spec: RolloutReplicaSpec,
    plan: WeightsPlan,
    target: Version,
    heads: Mapping[str, Head],
    resting: bool,
) -> None:
    update = plan.update
    if update is None:
        return
    failed = (
        update.phase is UpdatePhase.FAILED
        or update.attempts > 1
        or _stage_failures(heads, update.identity)
    )
    newer = target.identity > update.identity
    if resting:
        why = "the pool is suspended" if spec.suspend else "the pool falls asleep"
    elif newer and target.identity.epoch > update.epoch:
        why = f"a trainer with epoch {target.identity.epoch} took over"
    elif newer and (failed or spec.weights.strategy is not Strategy.ALL_AT_ONCE):
        why = f"{target.identity} is newer"
    else:
        return
    _supersede(plan, why)


def _maybe_retarget(plan: WeightsPlan, target: Version) -> None:
    """Rolling and Eager have no barrier to keep: they turn to the newest at once."""
    if plan.update is not None and target.identity > plan.update.identity:
        _supersede(plan, f"{target.identity} is newer")


def _supersede(plan: WeightsPlan, why: str) -> None:
    if plan.update is None:
        return
    message = f"weights {plan.update.identity} were given up: {why}"
    plan.update = plan.update.model_copy(
        update={"phase": UpdatePhase.SUPERSEDED, "message": message}
    )
    plan.notes.append(("Normal", "WeightsSuperseded", message))
    plan.barrier = None


def _begin(
    plan: WeightsPlan, target: Version, heads: Mapping[str, Head], now: float, resting: bool
) -> None:
    """Start the update to `target`; with nobody in service it is committed at once."""
    if resting and plan.update is not None and plan.update.identity == target.identity:
        # Given up to rest: they are loaded on the way back, and `Superseded` stays to be seen.
        identity = target.identity.model_dump()
        plan.committed = CommittedWeights(**identity, source=target.source)
        return
    update = LastUpdate(
        epoch=target.identity.epoch,
        version=target.identity.version,
        source=target.source,
        phase=UpdatePhase.STAGING,
        attempts=1,
        started_at=datetime.fromtimestamp(now, UTC),
    )
    plan.update = update
    plan.barrier = None
    floor = plan.committed.identity
    serving = [h for h in heads.values() if h.in_service(floor)]
    if resting or not serving:
        _finish(plan, now, "committed while nobody served; each replica loads it before it serves")
    elif any(h.at_least(target.identity) for h in heads.values()):
        _enter_committing(plan)
    else:
        note = f"staging weights {target.identity} on {len(serving)} replicas"
        plan.notes.append(("Normal", "WeightsStaging", note))


def _complete_adopted(
    spec: RolloutReplicaSpec, plan: WeightsPlan, heads: Mapping[str, Head], now: float
) -> None:
    """An update that was given up for a rest is complete once all have loaded it after all."""
    update = plan.update
    if update is None or update.phase is not UpdatePhase.SUPERSEDED:
        return
    there = sum(h.at_least(update.identity) for h in heads.values())
    if update.identity == plan.committed.identity and there >= max(spec.replicas, 1):
        _finish(plan, now, f"{there} of {len(heads)} replicas serve it")


def _finish(plan: WeightsPlan, now: float, message: str) -> None:
    update = plan.update
    if update is None:
        return
    source = update.source or plan.committed.source
    plan.committed = CommittedWeights(epoch=update.epoch, version=update.version, source=source)
    plan.update = update.model_copy(
        update={
            "phase": UpdatePhase.COMPLETE,
            "completed_at": datetime.fromtimestamp(now, UTC),
            "message": message,
        }
    )
    plan.barrier = None
    plan.notes.append(("Normal", "WeightsCommitted", f"weights {update.identity}: {message}"))


def _advance(
    spec: RolloutReplicaSpec,
    plan: WeightsPlan,
    heads: Mapping[str, Head],
    now: float,
    wait: Wait,
) -> None:
    """Take the update under way one step further."""
    update = plan.update
    if update is None:
        return
    left = _time_left(spec, update, now)
    plan.overdue = left <= 0
    if not plan.overdue:
        wait.at_most(left)
    if update.phase is UpdatePhase.COMMITTING:
        _advance_commit(spec, plan, update, heads, now)
    elif spec.weights.strategy is Strategy.ALL_AT_ONCE:
        _advance_barrier(plan, update, heads, now)
    else:
        _advance_singly(plan, update, heads)


def _time_left(spec: RolloutReplicaSpec, update: LastUpdate, now: float) -> float:
    started = update.started_at.timestamp() if update.started_at else now
    return started + spec.weights.deadline_seconds - now


def _version_of(update: LastUpdate, fallback: WeightsSource) -> Version:
    return Version(update.identity, update.source or fallback)


def _advance_barrier(
    plan: WeightsPlan, update: LastUpdate, heads: Mapping[str, Head], now: float
) -> None:
    """Stage on every member of the barrier; the last one staged opens it."""
    version = _version_of(update, plan.committed.source)
    floor = plan.committed.identity
    serving = [h for h in heads.values() if h.in_service(floor)]
    boots = frozenset(h.boot for h in serving if h.boot)
    plan.barrier = boots if plan.barrier is None else plan.barrier & boots
    members = [h for h in serving if h.boot in plan.barrier]
    if not members:
        if _blind(heads):
            return
        _finish(plan, now, "committed at once: nobody was left in the barrier")
        return
    waiting = [h for h in members if not h.has_staged(version)]
    for head in waiting:
        plan.bring[head.pod.uid] = version
    plan.failures = _stage_failures({h.pod.uid: h for h in waiting}, version.identity)
    if not waiting:
        note = f"all {len(members)} replicas of the barrier have staged {version.identity}"
        plan.update = update.model_copy(
            update={"phase": UpdatePhase.COMMITTING, "message": f"committing: {note}"}
        )
        plan.notes.append(("Normal", "WeightsCommitting", note))
        return
    staged = f"{len(members) - len(waiting)} of {len(members)} replicas have staged"
    _report_staging(plan, update, staged, waiting)


def _report_staging(
    plan: WeightsPlan, update: LastUpdate, staged: str, waiting: list[Head]
) -> None:
    phase = UpdatePhase.FAILED if plan.overdue else UpdatePhase.STAGING
    text = f"{staged} {update.identity}"
    if plan.failures:
        text += f"; {plan.failures[0]}"
    if plan.overdue and update.phase is not UpdatePhase.FAILED:
        plan.notes.append(("Warning", "WeightsDeadlineExceeded", text))
    plan.update = update.model_copy(
        update={
            "phase": phase,
            "attempts": max(update.attempts, _attempts(waiting, update.identity)),
            "message": text,
        }
    )


def _attempts(waiting: list[Head], identity: WeightsId) -> int:
    """The first try and the retries of whoever failed most."""
    failures = (h.worker.failures.get("stage") for h in waiting)
    return 1 + max((f.count for f in failures if f and f.about == identity), default=0)


def _stage_failures(heads: Mapping[str, Head], identity: WeightsId) -> list[str]:
    found = (h.failure(identity, "stage") for h in heads.values())
    return sorted(text for text in found if text)


def _advance_singly(plan: WeightsPlan, update: LastUpdate, heads: Mapping[str, Head]) -> None:
    """Rolling, Eager: stage everywhere; the first one staged lets commits begin."""
    version = _version_of(update, plan.committed.source)
    floor = plan.committed.identity
    serving = [h for h in heads.values() if h.in_service(floor)]
    for head in serving:
        if not head.has_staged(version):
            plan.bring[head.pod.uid] = version
    plan.failures = _stage_failures(heads, version.identity)
    staged = sum(h.has_staged(version) for h in serving)
    if staged:
        text = f"committing one by one: {staged} of {len(serving)} replicas have staged"
        plan.update = update.model_copy(update={"phase": UpdatePhase.COMMITTING, "message": text})
        return
    waiting = [h for h in serving if not h.has_staged(version)]
    _report_staging(plan, update, f"0 of {len(serving)} replicas have staged", waiting)


def _advance_commit(
    spec: RolloutReplicaSpec,
    plan: WeightsPlan,
    update: LastUpdate,
    heads: Mapping[str, Head],
    now: float,
) -> None:
    """Roll forward: bring every head to the version; done once all that serve are there."""
    version = _version_of(update, plan.committed.source)
    behind = [h for h in heads.values() if not h.at_least(version.identity)]
    floor = plan.committed.identity
    in_service = [h for h in behind if h.in_service(floor)]
    failed = _commit_failures(spec, in_service, version.identity, plan.overdue)
    plan.failures = sorted(failed.values())
    for head in behind:
        plan.bring[head.pod.uid] = version
    all_at_once = spec.weights.strategy is Strategy.ALL_AT_ONCE
    if all_at_once:
        plan.may_commit = {h.pod.uid for h in behind}
        plan.out = set(failed)
    else:
        plan.may_commit = _turns(spec, behind, in_service, failed)
    # Who failed is out of the Service before the others' weights count as the pool's.
    waiting = [h for h in in_service if not plan.out or h.pod.uid not in failed or h.pod.gate]
    done = len(heads) - len(behind)
    if not waiting and (done or not in_service) and not _blind(heads):
        _finish(plan, now, f"{done} of {len(heads)} replicas serve it")
        return
    text = f"{done} of {len(heads)} replicas have committed {version.identity}"
    if plan.failures:
        text += f"; {plan.failures[0]}"
    plan.update = update.model_copy(update={"message": text})


def _commit_failures(
    spec: RolloutReplicaSpec, in_service: list[Head], identity: WeightsId, overdue: bool
) -> dict[str, str]:
    """What keeps heads from the version that is being committed, by pod uid."""
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


def _bring_joiners(
    spec: RolloutReplicaSpec, plan: WeightsPlan, target: Version, heads: Mapping[str, Head]
) -> None:
    """Whoever is below the committed weights loads them before it serves."""
    committed = plan.committed
    floor = Version(committed.identity, committed.source, committed.root_hash)
    eager = spec.weights.strategy is not Strategy.ALL_AT_ONCE and _running(plan) is not None
    for uid, head in heads.items():
        if uid in plan.bring or head.at_least(floor.identity):
            continue
        plan.bring[uid] = target if eager else floor
        plan.may_commit.add(uid)


def _learn_hash(plan: WeightsPlan, heads: Mapping[str, Head]) -> None:
    """Note the content hash of what is committed, as the lowest replica computed it."""
    if plan.committed.root_hash is not None:
        return
    wanted = plan.committed.identity
    for head in sorted(heads.values(), key=lambda h: h.pod.replica):
        state = head.worker.state
        active = state.weights.active if state else None
        if active and active.root_hash and active.identity == wanted:
            plan.committed = plan.committed.model_copy(update={"root_hash": active.root_hash})
            return


def weights_status(plan: WeightsPlan, heads: Mapping[str, Head]) -> WeightsStatus:
    """Return `status.weights` for this plan and what was observed."""
    serving = sorted(
        h.worker.active.as_tuple() for h in heads.values() if h.pod.ready and h.worker.active
    )
    update = plan.update if plan.update and _running(plan) else None
    running = _version_of(update, plan.committed.source) if update else None
    return WeightsStatus(
        committed=plan.committed,
        active=ActiveRange(
            min=StatusId(epoch=serving[0][0], version=serving[0][1]),
            max=StatusId(epoch=serving[-1][0], version=serving[-1][1]),
        )
        if serving
        else None,
        staged_replicas=sum(h.has_staged(running) for h in heads.values()) if running else 0,
        last_update=plan.update,
    )
