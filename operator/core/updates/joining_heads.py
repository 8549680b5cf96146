"""Heads outside the update: one below the committed weights loads them before it serves."""

from __future__ import annotations

from collections.abc import Mapping

from rollout_operator.api.spec import RolloutReplicaSpec, WeightsStrategy
from rollout_operator.core.pass_plan import ControlVerb
from rollout_operator.core.replica_heads import ReplicaHead, WeightsVersion

from .content_hashes import bind_root_hash
from .pushed_copies import is_copy_available, is_stranded
from .weights_plan import WeightsPlan, update_version

JOIN_FAILURES_BEFORE_SWITCH = 4
"""Failures in a row, with back-off, after which a joiner turns from what is served to what others move to."""


def assign_joiners(
    spec: RolloutReplicaSpec, plan: WeightsPlan, heads: Mapping[str, ReplicaHead], *, begun: bool
) -> None:
    """Tell heads below the committed weights what to load; they may commit that at any time.

    Without a barrier that is what the others move to, once it is `begun` in status. They finish it
    before the newest is taken, so that quick publishes let a joiner finish, too.
    Who can't take it loads what is served: else it would not serve at all.
    """
    floor = brought = _committed_version(plan)
    single = spec.weights.strategy is not WeightsStrategy.ALL_AT_ONCE and not plan.unsupported
    if single and plan.update and plan.running_identity:
        brought = bind_root_hash(update_version(plan.update, plan.committed.source), heads)
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
    """Whether a head that could not take what the others move to loads what is served.

    Who can take neither tries one in its turn, then the other: each attempt at once would have no end.
    """
    lost = is_stranded(head, floor, given=given[0])
    if is_stranded(head, brought, given=given[1]):
        return not lost
    if lost:
        return False
    slot, failed = head.staged_slot, head.worker.failures.get(ControlVerb.STAGE)
    if failed is not None and failed.about == floor.identity:
        return failed.count < JOIN_FAILURES_BEFORE_SWITCH or failed.retry_in > 0
    if slot is not None and (slot.epoch, slot.version) == floor.identity.as_tuple():
        return slot.phase != "Failed"  # it has begun to
    return head.failure_message(brought.identity, ControlVerb.STAGE, ControlVerb.COMMIT) is not None


def learn_root_hash(plan: WeightsPlan, heads: Mapping[str, ReplicaHead]) -> None:
    """Note the content hash of what is committed, so that no replica commits other bytes."""
    if plan.committed.root_hash is None:
        found = bind_root_hash(_committed_version(plan), heads).root_hash
        plan.committed = plan.committed.model_copy(update={"root_hash": found})


def _committed_version(plan: WeightsPlan) -> WeightsVersion:
    committed = plan.committed
    return WeightsVersion(committed.identity, committed.source, committed.root_hash)
