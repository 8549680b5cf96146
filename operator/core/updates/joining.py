"""Heads outside the update: one below the committed weights loads them before it serves."""

from __future__ import annotations

from collections.abc import Mapping

from rollout_operator.api.spec import RolloutReplicaSpec, Strategy
from rollout_operator.api.status import UpdatePhase
from rollout_operator.core.heads import Head, Version

from .content import bound
from .weights_plan import WeightsPlan, version_of


def assign_joiners(
    spec: RolloutReplicaSpec, plan: WeightsPlan, heads: Mapping[str, Head], *, begun: bool
) -> None:
    """Tell heads below the committed weights what to load; they may commit that at any time.

    Without a barrier that is what the others move to, once it is `begun` in status. They finish it
    before the newest is taken, so that quick publishes let a joiner finish, too. While it fails, who
    joins loads what is served: weights that nobody can take would keep it from serving at all.
    """
    floor = brought = _committed(plan)
    single = spec.weights.strategy is not Strategy.ALL_AT_ONCE and not plan.unsupported
    failed = plan.update is not None and plan.update.phase is UpdatePhase.FAILED
    if single and plan.update and plan.running and not failed:
        brought = bound(version_of(plan.update, plan.committed.source), heads)
    for uid, head in heads.items():
        if uid in plan.version_for or head.at_least(floor.identity):
            continue
        plan.version_for[uid] = brought
        if begun or brought is floor:
            plan.may_commit.add(uid)


def learn_hash(plan: WeightsPlan, heads: Mapping[str, Head]) -> None:
    """Note the content hash of what is committed, so that no replica commits other bytes."""
    if plan.committed.root_hash is None:
        found = bound(_committed(plan), heads).root_hash
        plan.committed = plan.committed.model_copy(update={"root_hash": found})


def _committed(plan: WeightsPlan) -> Version:
    committed = plan.committed
    return Version(committed.identity, committed.source, committed.root_hash)
