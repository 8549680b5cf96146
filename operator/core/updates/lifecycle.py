"""How an update begins, is superseded and ends; afterwards at most one is under way."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from rollout_operator.api.spec import RolloutReplicaSpec, State, Strategy
from rollout_operator.api.status import CommittedWeights, LastUpdate, UpdatePhase
from rollout_operator.core.heads import Head, Version, stage_failures
from rollout_operator.core.plan import Note

from .weights_plan import WeightsPlan


def settle(
    spec: RolloutReplicaSpec,
    plan: WeightsPlan,
    target: Version,
    heads: Mapping[str, Head],
    now: float,
) -> None:
    """Finish, supersede or begin an update."""
    running = plan.running
    if running is not None and any(h.at_least(running) for h in heads.values()):
        _enter_committing(plan)  # some worker serves it already: there is no way back
    resting = spec.suspend or spec.state is State.ASLEEP
    if running is not None and not plan.committing:
        _maybe_supersede(spec, plan, target, heads, resting)
    elif plan.committing and spec.weights.strategy is not Strategy.ALL_AT_ONCE:
        _maybe_retarget(plan, target)
    if plan.committing and spec.suspend:
        finish(plan, now, "committed while the pool is suspended; loaded before it serves again")
    if plan.running is None and target.identity > plan.committed.identity:
        _begin(plan, target, heads, now, resting)
    _complete_after_rest(spec, plan, heads, now)


def finish(plan: WeightsPlan, now: float, message: str) -> None:
    """Complete the update under way: its weights are now the committed ones."""
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
    plan.notes.append(Note("Normal", "WeightsCommitted", f"weights {update.identity}: {message}"))


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
        or stage_failures(heads.values(), update.identity)
    )
    newer = target.identity > update.identity
    if resting:
        why = "the pool is suspended" if spec.suspend else "the pool is going to sleep"
    elif newer and target.identity.epoch > update.epoch:
        why = f"a trainer with epoch {target.identity.epoch} took over"
    elif newer and (failed or spec.weights.strategy is not Strategy.ALL_AT_ONCE):
        why = f"{target.identity} is newer"
    else:
        return
    _supersede(plan, why)


def _maybe_retarget(plan: WeightsPlan, target: Version) -> None:
    """Turn to a newer target at once: Rolling and Eager have no barrier to keep."""
    if plan.update is not None and target.identity > plan.update.identity:
        _supersede(plan, f"{target.identity} is newer")


def _supersede(plan: WeightsPlan, why: str) -> None:
    if plan.update is None:
        return
    message = f"gave up weights {plan.update.identity}: {why}"
    plan.update = plan.update.model_copy(
        update={"phase": UpdatePhase.SUPERSEDED, "message": message}
    )
    plan.notes.append(Note("Normal", "WeightsSuperseded", message))
    plan.barrier = None


def _begin(
    plan: WeightsPlan, target: Version, heads: Mapping[str, Head], now: float, resting: bool
) -> None:
    """Start the update to `target`; if no replica is in service, commit it at once."""
    if resting and plan.update is not None and plan.update.identity == target.identity:
        # Given up for sleep or suspension: loaded on wake-up, and `Superseded` stays visible.
        identity = target.identity.model_dump()
        plan.committed = CommittedWeights(**identity, source=target.source)
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
    serving = [h for h in heads.values() if h.in_service(floor)]
    if resting or not serving:
        finish(plan, now, "committed while no replica served; each loads it before it serves")
    elif any(h.at_least(target.identity) for h in heads.values()):
        _enter_committing(plan)
    else:
        note = f"staging weights {target.identity} on {len(serving)} replicas"
        plan.notes.append(Note("Normal", "WeightsStaging", note))


def _complete_after_rest(
    spec: RolloutReplicaSpec, plan: WeightsPlan, heads: Mapping[str, Head], now: float
) -> None:
    """Complete an update that was given up for sleep or suspension once all have loaded it."""
    update = plan.update
    if update is None or update.phase is not UpdatePhase.SUPERSEDED:
        return
    there = sum(h.at_least(update.identity) for h in heads.values())
    if update.identity == plan.committed.identity and there >= max(spec.replicas, 1):
        finish(plan, now, f"{there} of {len(heads)} replicas serve it")
