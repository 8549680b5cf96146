"""Which update is under way, and what each head must do for it: the entry of this package.

The case table of the public contract: stored status, target and the workers' answers in, one
`WeightsPlan` out. First `update_lifecycle` settles which update runs, then its phase takes it one
step further (`staging_phase`, `committing_phase`). `joining_heads` has replicas below the committed
weights load them, and `pushed_copies` names the peers that give them what a trainer pushed.
"""

from __future__ import annotations

from collections.abc import Mapping

from rollout_operator.api.spec import RolloutReplicaSpec
from rollout_operator.api.status import LastUpdate, WeightsStatus
from rollout_operator.core.observed_pool import ObservedPool
from rollout_operator.core.pass_plan import RequeueAfter
from rollout_operator.core.replica_heads import ReplicaHead

from .committing_phase import advance_commit
from .joining_heads import assign_joiners, learn_root_hash
from .pushed_copies import assign_peers
from .staging_phase import advance_barrier, advance_singly
from .update_lifecycle import settle_update
from .weights_plan import (
    WeightsPass,
    WeightsPlan,
    committed_weights,
    has_unpolled_head,
    target_version,
)


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
    learn_root_hash(run)
    assign_joiners(run, begun=begun)
    assign_peers(plan, heads)
    return plan


def _advance_update(run: WeightsPass, update: LastUpdate, wait: RequeueAfter) -> None:
    """Take the update under way one step further."""
    plan = run.plan
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
