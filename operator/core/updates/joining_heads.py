"""Heads outside the update: one below the committed weights loads them before it serves."""

from __future__ import annotations

from rollout_operator.core.pass_plan import ControlVerb
from rollout_operator.core.replica_heads import ReplicaHead, WeightsVersion

from .content_hashes import bind_root_hash
from .pushed_copies import is_copy_available, is_stranded
from .weights_plan import WeightsPass

JOIN_FAILURES_BEFORE_SWITCH = 4
"""Failures in a row, with back-off, after which a joiner loads what the others move to instead of
what they serve."""


def assign_joiners(run: WeightsPass, *, begun: bool) -> None:
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


def learn_root_hash(run: WeightsPass) -> None:
    """Note the content hash of what is committed, so that no replica commits other bytes."""
    plan = run.plan
    if plan.committed.root_hash is None:
        found = bind_root_hash(plan.committed_version, run.heads).root_hash
        plan.committed = plan.committed.model_copy(update={"root_hash": found})
