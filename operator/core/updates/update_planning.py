"""The door: which update is under way, and what each head must do for it.

The case table of the public contract: stored status, target and the workers' answers in, one
`WeightsPlan` out. First `lifecycle` settles which update runs, then the phase it is in takes it
one step further (`staging`, `committing`), then replicas below the committed weights are told to
load them (`joining`), and from whom, if a trainer pushed them (`copies`).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from rollout_operator.api.spec import RolloutReplicaSpec, WeightsStrategy
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
    WeightsPlan,
    committed_weights,
    deadline_seconds_left,
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

    Args:
        spec: the wanted pool.
        seen: the world; its `barrier` is what this process remembers.
        stored: `status.weights` as read from the API server.
        heads: living heads of wanted replicas, by pod uid.
        now: wall clock, seconds.
        wait: told when to look again.
    """
    plan = WeightsPlan(committed_weights(stored), stored.last_update, seen.barrier)
    target = target_version(spec)
    plan.fence_epoch = max(target.identity.epoch, plan.committed.epoch)
    if has_unpolled_head(heads):
        wait.at_most(1.0)
        if plan.running_identity is None:
            return plan
    settle_update(spec, plan, target, heads, now)
    begun = plan.has_commit_begun
    if plan.update is not None and plan.running_identity is not None:
        _advance_update(spec, plan, plan.update, heads, now, wait)
    else:
        plan.barrier = None
    ended = plan.running_identity is None and stored.last_update != plan.update
    if ended and target.identity > plan.committed.identity:
        wait.at_most(0.0)  # nothing else may happen that would begin the next one
    learn_root_hash(plan, heads)
    assign_joiners(spec, plan, heads, begun=begun)
    assign_peers(plan, heads)
    return plan


def _advance_update(
    spec: RolloutReplicaSpec,
    plan: WeightsPlan,
    update: LastUpdate,
    heads: Mapping[str, ReplicaHead],
    now: float,
    wait: RequeueAfter,
) -> None:
    """Take the update under way one step further."""
    update = _with_phase_start(plan, update, now)
    left = deadline_seconds_left(spec, plan, update, now)
    plan.overdue = left <= 0
    if not plan.overdue:
        wait.at_most(left)
    if plan.has_commit_begun:
        advance_commit(spec, plan, update, heads, now)
    elif spec.weights.strategy is WeightsStrategy.ALL_AT_ONCE:
        advance_barrier(spec, plan, update, heads, now)
    else:
        advance_singly(spec, plan, update, heads, now)


def _with_phase_start(plan: WeightsPlan, update: LastUpdate, now: float) -> LastUpdate:
    """Note when the phase began where status doesn't say: its deadline must count from something."""
    began = "commit_started_at" if plan.has_commit_begun else "started_at"
    if getattr(update, began) is not None:
        return update
    return update.model_copy(update={began: datetime.fromtimestamp(now, UTC)})
