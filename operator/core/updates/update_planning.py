"""Which update is under way, and what each head must do for it: the entry of this package.

The case table of the public contract: stored status, target and the workers' answers in, one
`WeightsPlan` out. First `update_lifecycle` settles which update runs, then its phase takes it one
step further (`staging_phase`, `committing_phase`). Replicas below the committed weights load them before they serve, and
`pushed_copies` names the peers that give them what a trainer pushed.
"""

from __future__ import annotations

from collections.abc import Mapping

from rollout_operator.api.spec import RolloutReplicaSpec
from rollout_operator.api.status import LastUpdate, WeightsStatus
from rollout_operator.core.observed_pool import ObservedPool
from rollout_operator.core.pass_plan import ControlVerb, RequeueAfter
from rollout_operator.core.replica_heads import ReplicaHead, WeightsVersion

from .committing_phase import advance_commit
from .content_hashes import bind_root_hash
from .pushed_copies import assign_peers, is_copy_available, is_stranded
from .staging_phase import advance_barrier, advance_singly
from .update_lifecycle import keeps_old_weights, settle_update
from .weights_plan import (
    WeightsPass,
    WeightsPlan,
    committed_weights,
    has_unpolled_head,
    target_version,
)

JOIN_FAILURES_BEFORE_SWITCH = 4
"""Failures in a row, with back-off, after which a joiner loads what the others move to instead of
what they serve."""


def plan_weights(
    spec: RolloutReplicaSpec,
    seen: ObservedPool,
    stored: WeightsStatus,
    heads: Mapping[str, ReplicaHead],
    now: float,
    wait: RequeueAfter,
) -> WeightsPlan:
    """Decide the update's next phase and what each head must do.

    `stored` is `status.weights` as read from the API server, `seen.barrier` what this process remembers; `heads` are
    the living ones of wanted replicas, by pod uid.
    """
    plan = WeightsPlan(committed_weights(stored), stored.last_update, seen.barrier)
    run = WeightsPass(spec, plan, target_version(spec), heads, now)
    plan.fence_epoch = max(run.target.identity.epoch, plan.committed.epoch)
    if has_unpolled_head(heads):
        wait.at_most(1.0)
        if plan.running_update is None:
            return plan
    settle_update(run)
    begun = plan.has_commit_begun
    if plan.running_update is not None:
        _advance_update(run, plan.running_update, wait)
    else:
        plan.barrier = None
    ended = plan.running_update is None and stored.last_update != plan.update
    if ended and run.target.identity > plan.committed.identity:
        wait.at_most(0.0)  # nothing else may happen that would begin the next one
    _learn_root_hash(run)
    _assign_joiners(run, begun=begun)
    assign_peers(plan, heads)
    return plan


def _advance_update(run: WeightsPass, update: LastUpdate, wait: RequeueAfter) -> None:
    """Take the update under way one step further."""
    plan = run.plan
    if (run.is_resting or not run.heads_in_service) and keeps_old_weights(run, update):
        plan.barrier = None  # tried again once the old weights serve, by those that do
        return
    began = "commit_started_at" if plan.has_commit_begun else "started_at"
    if getattr(update, began) is None:
        # Status doesn't say when the phase began, and its deadline must count from something.
        update = update.model_copy(update={began: run.time})
    left = run.seconds_left(update)
    plan.overdue = left <= 0
    if not plan.overdue:
        wait.at_most(left)
    if plan.has_commit_begun:
        advance_commit(run, update)
    elif run.is_all_at_once:
        advance_barrier(run, update)
    else:
        advance_singly(run, update)


def _assign_joiners(run: WeightsPass, *, begun: bool) -> None:
    """Assign to heads below the committed weights what to load; they may commit that at any time.

    Without a barrier that is what the others move to, once it is `begun` in status. They finish it
    before they take the newest, so that a joiner finishes under quick publishes, too. A joiner that
    can't load it loads what the others serve: else it would not serve at all.
    """
    plan, heads = run.plan, run.heads
    floor = brought = plan.committed_version
    if plan.running_update is not None and not run.is_all_at_once and not plan.unsupported:
        brought = run.bound_version(plan.running_update)
    given = (is_copy_available(floor, heads), is_copy_available(brought, heads))
    for uid, head in heads.items():
        if uid in plan.version_for or head.has_at_least(floor.identity):
            continue
        version = floor if _should_load_committed(floor, head, brought, given) else brought
        plan.version_for[uid] = version
        if begun or version is floor:
            plan.may_commit.add(uid)


def _should_load_committed(
    floor: WeightsVersion, head: ReplicaHead, brought: WeightsVersion, given: tuple[bool, bool]
) -> bool:
    """Whether a head that could not take what the others move to loads what they serve.

    One that can take neither tries them in turn: to start both again at each failure would never end.
    """
    lost = is_stranded(head, floor, given=given[0])
    if is_stranded(head, brought, given=given[1]):
        return not lost
    if lost:
        return False
    slot, failed = head.staged_slot, head.worker.failures.get(ControlVerb.STAGE)
    if failed is not None and failed.about == floor.identity:
        return failed.count < JOIN_FAILURES_BEFORE_SWITCH or failed.retry_in > 0
    if slot is not None and head.staged_identity == floor.identity:
        return slot.phase != "Failed"  # it has begun to
    return head.failure_message(brought.identity, ControlVerb.STAGE, ControlVerb.COMMIT) is not None


def _learn_root_hash(run: WeightsPass) -> None:
    """Note the content hash of what is committed, so that no replica commits other bytes."""
    plan = run.plan
    if plan.committed.root_hash is None:
        found = bind_root_hash(plan.committed_version, run.heads).root_hash
        plan.committed = plan.committed.model_copy(update={"root_hash": found})
