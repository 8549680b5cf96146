"""Heads outside the update: one below the committed weights loads them before it serves."""

from __future__ import annotations

from collections.abc import Mapping

from rollout_operator.api.spec import RolloutReplicaSpec, Strategy
from rollout_operator.core.heads import Head, Version
from rollout_operator.core.plan import Verb

from .content import bound
from .copies import is_given, stranded
from .weights_plan import WeightsPlan, version_of

PATIENCE = 4
"""Failures in a row, with back-off, after which a joiner turns from what is served to what others move to."""


def assign_joiners(
    spec: RolloutReplicaSpec, plan: WeightsPlan, heads: Mapping[str, Head], *, begun: bool
) -> None:
    """Tell heads below the committed weights what to load; they may commit that at any time.

    Without a barrier that is what the others move to, once it is `begun` in status. They finish it
    before the newest is taken, so that quick publishes let a joiner finish, too.
    Who can't take it loads what is served: else it would not serve at all.
    """
    floor = brought = _committed(plan)
    single = spec.weights.strategy is not Strategy.ALL_AT_ONCE and not plan.unsupported
    if single and plan.update and plan.running:
        brought = bound(version_of(plan.update, plan.committed.source), heads)
    given = (is_given(floor, heads), is_given(brought, heads))
    for uid, head in heads.items():
        if uid in plan.version_for or head.at_least(floor.identity):
            continue
        version = floor if _keeps_to(floor, head, brought, given) else brought
        plan.version_for[uid] = version
        if begun or version is floor:
            plan.may_commit.add(uid)


def _keeps_to(floor: Version, head: Head, brought: Version, given: tuple[bool, bool]) -> bool:
    """Whether a head that could not take what the others move to loads what is served.

    Who can take neither tries one in its turn, then the other: each attempt at once would have no end.
    """
    lost = stranded(head, floor, given=given[0])
    if stranded(head, brought, given=given[1]):
        return not lost
    if lost:
        return False
    slot, failed = head.staged, head.worker.failures.get(Verb.STAGE)
    if failed is not None and failed.about == floor.identity:
        return failed.count < PATIENCE or failed.retry_in > 0
    if slot is not None and (slot.epoch, slot.version) == floor.identity.as_tuple():
        return slot.phase != "Failed"  # it has begun to
    return head.failure(brought.identity, Verb.STAGE, Verb.COMMIT) is not None


def learn_hash(plan: WeightsPlan, heads: Mapping[str, Head]) -> None:
    """Note the content hash of what is committed, so that no replica commits other bytes."""
    if plan.committed.root_hash is None:
        found = bound(_committed(plan), heads).root_hash
        plan.committed = plan.committed.model_copy(update={"root_hash": found})


def _committed(plan: WeightsPlan) -> Version:
    committed = plan.committed
    return Version(committed.identity, committed.source, committed.root_hash)
