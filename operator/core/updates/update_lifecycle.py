"""How an update begins, is superseded and ends; at most one is under way afterwards."""

from __future__ import annotations

from collections.abc import Iterable

from rollout_operator.api.spec import DesiredState, WeightsStrategy
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
    waits_for_wake,
)
from .weights_plan import WeightsPass, WeightsPlan


def settle_update(run: WeightsPass) -> None:
    """Finish, supersede or begin an update."""
    plan = run.plan
    update = plan.running_update
    if update is not None and not plan.is_committing and run.is_served(update.identity):
        # Some worker serves it already: it can only go forward.
        enter_committing(run, update, serving_hash(plan.version_of(update), run.heads))
    update = plan.running_update
    if update is not None and not plan.is_committing:
        _maybe_supersede(run, update)
    elif update is not None and not run.is_all_at_once:
        _maybe_retarget(run, update)
    update = plan.running_update
    if update is not None and plan.is_committing and run.spec.suspend:
        text = "committed while the pool is suspended; loaded before it serves again"
        finish_update(run, update, text)
    if plan.running_update is None and run.target.identity > plan.committed.identity:
        _begin_update(run)
    _complete_after_rest(run)


def finish_update(run: WeightsPass, update: LastUpdate, message: str) -> None:
    """Complete the update under way: its weights are now the committed ones."""
    plan = run.plan
    plan.committed = CommittedWeights(
        epoch=update.epoch,
        version=update.version,
        source=update.source or plan.committed.source,
        root_hash=update.root_hash,
    )
    done = {"phase": UpdatePhase.COMPLETE, "completed_at": run.time, "message": message}
    plan.update = update.model_copy(update=done)
    plan.barrier = None
    plan.overdue = False
    note = f"weights {update.identity}: {message}"
    plan.notes.append(EventNote("Normal", "WeightsCommitted", note))


def enter_committing(
    run: WeightsPass, update: LastUpdate, root_hash: str | None, message: str | None = None
) -> None:
    """Decide to commit these bytes; the calls follow once status holds the decision."""
    change = {
        "phase": UpdatePhase.COMMITTING,
        "commit_started_at": run.time,
        "root_hash": update.root_hash or root_hash,
        "message": update.message if message is None else message,
    }
    run.plan.update = update.model_copy(update=change)


def report_progress(
    plan: WeightsPlan,
    update: LastUpdate,
    phase: UpdatePhase,
    text: str,
    failed: tuple[str, Iterable[ReplicaHead]],
) -> None:
    """Note how far an update is; post an event when it misses its deadline.

    `failed`: the call whose failures count as attempts, and the heads that may have failed it.
    """
    if phase is UpdatePhase.FAILED and plan.overdue and update.phase is not UpdatePhase.FAILED:
        plan.notes.append(EventNote("Warning", "WeightsDeadlineExceeded", text))
    verb, heads = failed
    failures = (h.worker.failures.get(verb) for h in heads)
    tries = 1 + max((f.count for f in failures if f and f.about == update.identity), default=0)
    change = {"phase": phase, "attempts": max(update.attempts, tries), "message": text}
    plan.update = update.model_copy(update=change)


def refusal_message(head: ReplicaHead, version: WeightsVersion) -> str | None:
    """Why a head can't stage or commit a version, by its own answers."""
    return (
        head.mismatch_message(version)
        or head.failure_message(version.identity, ControlVerb.COMMIT, ControlVerb.STAGE)
        or head.newer_push_message(version)
    )


def keeps_old_weights(run: WeightsPass, update: LastUpdate) -> bool:
    """Whether the committed weights stay while no replica serves: the update has failed.

    Committed, it would be all that workers may load, and some could not. What was pushed has a rule of its own
    (`_begin_update`), and where nobody has the old weights any more the new ones are the only hope.
    """
    if update.phase is not UpdatePhase.FAILED or run.plan.version_of(update).is_pushed:
        return False
    return not is_lost_everywhere(run.plan.committed_version, run.heads)


def _fail_refused_update(run: WeightsPass, update: LastUpdate) -> LastUpdate:
    """Fail an update that some replica has refused, as the last one leaves the Service."""
    version, serving = run.bound_version(update), run.heads_in_service.values()
    refusals = [text for head in serving if (text := refusal_message(head, version))]
    # Where no heads are left, as in a suspended pool, status still knows of a failed attempt.
    if not version.is_pushed and (refusals or update.attempts > 1):
        why = refusals[0] if refusals else update.message
        change = {"phase": UpdatePhase.FAILED, "message": why}
        run.plan.update = update = update.model_copy(update=change)
    return update


def _maybe_supersede(run: WeightsPass, update: LastUpdate) -> None:
    identity = run.target.identity
    newer = identity > update.identity
    if run.is_resting or not run.heads_in_service:
        update = _fail_refused_update(run, update)
    if run.is_resting and not keeps_old_weights(run, update):
        why = "the pool is suspended" if run.spec.suspend else "the pool is going to sleep"
    elif newer and identity.epoch > update.epoch:
        why = f"a trainer with epoch {identity.epoch} took over"
    elif newer and _has_staging_failed(run, update):
        why = f"{identity} is newer"
    else:
        return
    _supersede_update(run.plan, update, why)


def _has_staging_failed(run: WeightsPass, update: LastUpdate) -> bool:
    """Staging has failed for good enough to turn to a newer target."""
    if update.phase is UpdatePhase.FAILED:
        return True
    if not run.is_all_at_once:
        return _is_stuck(run, update)
    version, heads = run.bound_version(update), run.heads
    if is_lost_everywhere(version, heads) or update.attempts > 1:
        return True
    if stage_failures(heads.values(), version):
        return True
    serving = run.heads_in_service.values()
    return any(lacks_bytes(h, version) or h.newer_push_message(version) for h in serving)


def _maybe_retarget(run: WeightsPass, update: LastUpdate) -> None:
    """Rolling, Eager: turn to a newer target once no replica can finish what it has begun.

    Before that each publish would undo the work of the last one, and quick ones would leave replicas
    behind for good. Nor does a pool that is to sleep stay awake for it: no replica leaves the Service
    for it, so the update may never finish.
    """
    falling = run.spec.state is DesiredState.ASLEEP and not run.spec.suspend
    identity = run.target.identity
    if (falling or identity > update.identity) and _is_stuck(run, update):
        if falling and not run.is_served(update.identity):
            update = _fail_refused_update(run, update)
            if keeps_old_weights(run, update):
                return
        why = "the pool is going to sleep" if falling else f"{identity} is newer"
        _supersede_update(run.plan, update, why)


def _is_stuck(run: WeightsPass, update: LastUpdate) -> bool:
    """Rolling stops at the first failure, Eager goes on as long as any replica may.

    Neither waits for silent replicas alone: the others would lag behind with them.
    """
    serving = run.heads_in_service.values()
    behind = [h for h in serving if not h.has_at_least(update.identity)]
    if not behind or any(ControlVerb.COMMIT in h.worker.running for h in behind):
        return False
    if run.seconds_left(update) <= 0:
        return True
    version = run.bound_version(update)
    given = is_copy_available(version, run.heads)

    def failed(head: ReplicaHead) -> bool:
        return bool(refusal_message(head, version)) or is_stranded(head, version, given=given)

    if run.spec.weights.strategy is WeightsStrategy.ROLLING and any(failed(h) for h in behind):
        return True
    return all(failed(h) or (h.is_silent and not h.worker.running) for h in behind)


def _supersede_update(plan: WeightsPlan, update: LastUpdate, why: str) -> None:
    message = f"gave up weights {update.identity}: {why}"
    change = {"phase": UpdatePhase.SUPERSEDED, "message": message}
    plan.update = update.model_copy(update=change)
    plan.notes.append(EventNote("Normal", "WeightsSuperseded", message))
    plan.barrier = None


def _begin_update(run: WeightsPass) -> None:
    """Start the update to the target; if no replica is in service, commit it at once.

    Bytes that no worker goes on having are never committed: until the trainer publishes again, the old
    weights are the pool's. Pushed bytes in the slot of a worker that sleeps stay there until it wakes;
    a worker that falls asleep, or whose pod goes, loses them.
    """
    plan, target, identity = run.plan, run.target, run.target.identity
    root_hash = None
    if run.is_resting and target.is_pushed and not run.is_served(identity):
        if not _is_kept_asleep(run, target):
            plan.withheld = is_staged_nowhere(target, run.heads)
            return
        root_hash = bind_root_hash(target, run.heads).root_hash
    if run.is_resting and plan.update is not None and plan.update.identity == identity:
        # Given up for sleep or suspension: loaded on wake-up, and `Superseded` stays visible.
        known = {**identity.model_dump(), "root_hash": plan.update.root_hash or root_hash}
        plan.committed = CommittedWeights(**known, source=target.source)
        return
    plan.update = update = LastUpdate(
        epoch=identity.epoch,
        version=identity.version,
        source=target.source,
        phase=UpdatePhase.STAGING,
        attempts=1,
        started_at=run.time,
        root_hash=root_hash,
    )
    plan.barrier = None
    serving = run.heads_in_service
    if (run.is_resting or not serving) and not is_staged_nowhere(target, run.heads):
        text = "committed while no replica served; each loads it before it serves"
        finish_update(run, update, text)
    elif run.is_served(identity):
        enter_committing(run, update, serving_hash(target, run.heads))
    elif unsupported_by_pool(run.spec, serving, target) is None:
        note = f"staging weights {identity} on {len(serving)} replicas"
        plan.notes.append(EventNote("Normal", "WeightsStaging", note))


def _is_kept_asleep(run: WeightsPass, target: WeightsVersion) -> bool:
    """Some worker has taken these pushed bytes while it slept, and nothing is about to end its pod."""
    return not run.spec.suspend and any(waits_for_wake(h, target) for h in run.heads.values())


def _complete_after_rest(run: WeightsPass) -> None:
    """Complete an update that was given up for sleep or suspension once all have loaded it."""
    update = run.plan.update
    if update is None or update.phase is not UpdatePhase.SUPERSEDED:
        return
    there = sum(h.has_at_least(update.identity) for h in run.heads.values())
    if update.identity == run.plan.committed.identity and there >= max(run.spec.replicas, 1):
        finish_update(run, update, f"{there} of {len(run.heads)} replicas serve it")
