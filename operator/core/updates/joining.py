"""Heads outside the update: one below the committed weights loads them before it serves."""

from __future__ import annotations

from collections.abc import Mapping

from rollout_operator.api.spec import RolloutReplicaSpec, Strategy
from rollout_operator.core.heads import Head, Version

from .weights_plan import WeightsPlan


def assign_joiners(
    spec: RolloutReplicaSpec, plan: WeightsPlan, target: Version, heads: Mapping[str, Head]
) -> None:
    """Tell heads below the committed weights what to load; they may commit at any time."""
    committed = plan.committed
    floor = Version(committed.identity, committed.source, committed.root_hash)
    no_barrier = spec.weights.strategy is not Strategy.ALL_AT_ONCE and plan.running is not None
    for uid, head in heads.items():
        if uid in plan.version_for or head.at_least(floor.identity):
            continue
        plan.version_for[uid] = target if no_barrier else floor
        plan.may_commit.add(uid)


def learn_hash(plan: WeightsPlan, heads: Mapping[str, Head]) -> None:
    """Note the content hash of what is committed, as the lowest replica computed it."""
    if plan.committed.root_hash is not None:
        return
    wanted = plan.committed.identity
    for head in sorted(heads.values(), key=lambda h: h.pod.replica):
        state = head.worker.state
        active = state.weights.active if state else None
        if active and active.root_hash and active.identity == wanted:
            plan.committed = plan.committed.model_copy(update={"root_hash": active.root_hash})
            return
