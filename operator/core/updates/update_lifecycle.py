"""How an update begins, is superseded and ends; afterwards at most one is under way."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from rollout_common.wire import WeightsId
from rollout_operator.api.spec import DesiredState, RolloutReplicaSpec, WeightsStrategy
from rollout_operator.api.status import CommittedWeights, LastUpdate, UpdatePhase
from rollout_operator.core.pass_plan import ControlVerb, EventNote
from rollout_operator.core.replica_heads import ReplicaHead, WeightsVersion, stage_failures

from .content_hashes import bind_root_hash, serving_hash, unsupported_by_pool
from .pushed_copies import (
    is_copy_available,
    is_lost_everywhere,
    is_staged_nowhere,
    is_stranded,
    lacks_bytes,
)
from .weights_plan import WeightsPlan, deadline_seconds_left, update_version

WEIGHTS_VERBS = (ControlVerb.STAGE, ControlVerb.COMMIT)


def settle_update(
    spec: RolloutReplicaSpec,
    plan: WeightsPlan,
    target: WeightsVersion,
    heads: Mapping[str, ReplicaHead],
    now: float,
) -> None:
    """Finish, supersede or begin an update."""
    running = plan.running_identity
    if running is not None and not plan.is_committing and is_served(running, heads):
        # Some worker serves it already: there is no way back.
        enter_committing(plan, _served_hash(plan, heads), now)
    resting = spec.suspend or spec.state is DesiredState.ASLEEP
    if running is not None and not plan.is_committing:
        _maybe_supersede(spec, plan, target, heads, now, resting)
    elif plan.is_committing and spec.weights.strategy is not WeightsStrategy.ALL_AT_ONCE:
        _maybe_retarget(spec, plan, target, heads, now)
    if plan.is_committing and spec.suspend:
        finish_update(
            plan, now, "committed while the pool is suspended; loaded before it serves again"
        )
    if plan.running_identity is None and target.identity > plan.committed.identity:
        _begin_update(spec, plan, target, heads, now, resting)
    _complete_after_rest(spec, plan, heads, now)


def finish_update(plan: WeightsPlan, now: float, message: str) -> None:
    """Complete the update under way: its weights are now the committed ones."""
    update = plan.update
    if update is None:
        return
    source = update.source or plan.committed.source
    identity = update.identity.model_dump()
    plan.committed = CommittedWeights(**identity, source=source, root_hash=update.root_hash)
    plan.update = update.model_copy(
        update={
            "phase": UpdatePhase.COMPLETE,
            "completed_at": datetime.fromtimestamp(now, UTC),
            "message": message,
        }
    )
    plan.barrier = None
    plan.overdue = False
    plan.notes.append(
        EventNote("Normal", "WeightsCommitted", f"weights {update.identity}: {message}")
    )


def enter_committing(
    plan: WeightsPlan, root_hash: str | None, now: float, message: str | None = None
) -> None:
    """Decide to commit these bytes; the calls follow once this stands in status."""
    if plan.update is None:
        return
    change = {
        "phase": UpdatePhase.COMMITTING,
        "commit_started_at": datetime.fromtimestamp(now, UTC),
        "root_hash": plan.update.root_hash or root_hash,
        "message": plan.update.message if message is None else message,
    }
    plan.update = plan.update.model_copy(update=change)


def is_served(identity: WeightsId, heads: Mapping[str, ReplicaHead]) -> bool:
    """Some worker has exactly these weights, as it last said."""
    return any(h.last_active == identity for h in heads.values())


def _served_hash(plan: WeightsPlan, heads: Mapping[str, ReplicaHead]) -> str | None:
    if plan.update is None:
        return None
    return serving_hash(update_version(plan.update, plan.committed.source), heads)


def _maybe_supersede(
    spec: RolloutReplicaSpec,
    plan: WeightsPlan,
    target: WeightsVersion,
    heads: Mapping[str, ReplicaHead],
    now: float,
    resting: bool,
) -> None:
    update = plan.update
    if update is None:
        return
    newer = target.identity > update.identity
    if resting:
        why = "the pool is suspended" if spec.suspend else "the pool is going to sleep"
    elif newer and target.identity.epoch > update.epoch:
        why = f"a trainer with epoch {target.identity.epoch} took over"
    elif newer and _has_staging_failed(spec, plan, update, heads, now):
        why = f"{target.identity} is newer"
    else:
        return
    _supersede_update(plan, why)


def _has_staging_failed(
    spec: RolloutReplicaSpec,
    plan: WeightsPlan,
    update: LastUpdate,
    heads: Mapping[str, ReplicaHead],
    now: float,
) -> bool:
    """Staging has failed for good enough to turn to a newer target."""
    if update.phase is UpdatePhase.FAILED:
        return True
    if spec.weights.strategy is not WeightsStrategy.ALL_AT_ONCE:
        return _is_stuck(spec, plan, update, heads, now)
    version = bind_root_hash(update_version(update, plan.committed.source), heads)
    if (
        is_lost_everywhere(version, heads)
        or update.attempts > 1
        or stage_failures(heads.values(), version)
    ):
        return True
    serving = (h for h in heads.values() if h.is_in_service(plan.committed.identity))
    return any(lacks_bytes(h, version) or _has_newer_push(h, version) for h in serving)


def _has_newer_push(head: ReplicaHead, version: WeightsVersion) -> bool:
    return head.newer_push_message(version) is not None and not head.has_staged(version)


def _maybe_retarget(
    spec: RolloutReplicaSpec,
    plan: WeightsPlan,
    target: WeightsVersion,
    heads: Mapping[str, ReplicaHead],
    now: float,
) -> None:
    """Rolling, Eager: turn to a newer target once no replica can finish what it has begun.

    Before that each publish would undo the last one's work, and quick ones leave replicas behind
    for ever. Nor does the pool stay awake for it: nobody is sent away, so it may never be finished.
    """
    update = plan.update
    if update is None:
        return
    falling = spec.state is DesiredState.ASLEEP and not spec.suspend
    if not falling and target.identity <= update.identity:
        return
    if _is_stuck(spec, plan, update, heads, now):
        why = "the pool is going to sleep" if falling else f"{target.identity} is newer"
        _supersede_update(plan, why)


def _is_stuck(
    spec: RolloutReplicaSpec,
    plan: WeightsPlan,
    update: LastUpdate,
    heads: Mapping[str, ReplicaHead],
    now: float,
) -> bool:
    """Rolling stops at the first failure, Eager goes on as long as any replica may.

    Neither waits for who is silent alone: the others would lag behind with it.
    """
    floor = plan.committed.identity
    serving = (h for h in heads.values() if h.is_in_service(floor))
    behind = [h for h in serving if not h.has_at_least(update.identity)]
    if not behind or any(ControlVerb.COMMIT in h.worker.running for h in behind):
        return False
    if deadline_seconds_left(spec, plan, update, now) <= 0:
        return True
    version = bind_root_hash(update_version(update, plan.committed.source), heads)
    given = is_copy_available(version, heads)

    def failed(head: ReplicaHead) -> bool:
        told = head.mismatch_message(version) or head.failure_message(
            version.identity, *WEIGHTS_VERBS
        )
        return (
            bool(told) or _has_newer_push(head, version) or is_stranded(head, version, given=given)
        )

    if spec.weights.strategy is WeightsStrategy.ROLLING and any(failed(h) for h in behind):
        return True
    return all(failed(h) or (h.is_silent and not h.worker.running) for h in behind)


def _supersede_update(plan: WeightsPlan, why: str) -> None:
    if plan.update is None:
        return
    message = f"gave up weights {plan.update.identity}: {why}"
    plan.update = plan.update.model_copy(
        update={"phase": UpdatePhase.SUPERSEDED, "message": message}
    )
    plan.notes.append(EventNote("Normal", "WeightsSuperseded", message))
    plan.barrier = None


def _begin_update(
    spec: RolloutReplicaSpec,
    plan: WeightsPlan,
    target: WeightsVersion,
    heads: Mapping[str, ReplicaHead],
    now: float,
    resting: bool,
) -> None:
    """Start the update to `target`; if no replica is in service, commit it at once.

    Pushed bytes that wait in a slot end with sleep and suspension, and what nobody has is never
    committed: until the trainer publishes again, the old weights are the pool's.
    """
    if resting and target.is_pushed and not is_served(target.identity, heads):
        plan.withheld = is_staged_nowhere(target, heads)
        return
    if resting and plan.update is not None and plan.update.identity == target.identity:
        # Given up for sleep or suspension: loaded on wake-up, and `Superseded` stays visible.
        known = {**target.identity.model_dump(), "root_hash": plan.update.root_hash}
        plan.committed = CommittedWeights(**known, source=target.source)
        return
    plan.update = LastUpdate(
        epoch=target.identity.epoch,
        version=target.identity.version,
        source=target.source,
        phase=UpdatePhase.STAGING,
        attempts=1,
        started_at=datetime.fromtimestamp(now, UTC),
    )
    plan.barrier = None
    floor = plan.committed.identity
    serving = {uid: h for uid, h in heads.items() if h.is_in_service(floor)}
    if (resting or not serving) and not is_staged_nowhere(target, heads):
        finish_update(
            plan, now, "committed while no replica served; each loads it before it serves"
        )
    elif is_served(target.identity, heads):
        enter_committing(plan, serving_hash(target, heads), now)
    elif unsupported_by_pool(spec, serving, target) is None:
        note = f"staging weights {target.identity} on {len(serving)} replicas"
        plan.notes.append(EventNote("Normal", "WeightsStaging", note))


def _complete_after_rest(
    spec: RolloutReplicaSpec, plan: WeightsPlan, heads: Mapping[str, ReplicaHead], now: float
) -> None:
    """Complete an update that was given up for sleep or suspension once all have loaded it."""
    update = plan.update
    if update is None or update.phase is not UpdatePhase.SUPERSEDED:
        return
    there = sum(h.has_at_least(update.identity) for h in heads.values())
    if update.identity == plan.committed.identity and there >= max(spec.replicas, 1):
        finish_update(plan, now, f"{there} of {len(heads)} replicas serve it")
