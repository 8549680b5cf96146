"""A pool's PodDisruptionBudget: how many of its replicas evictions may take at a time. Pure.

It counts pods: a replica of several is down once one of them is. So the least number of pods that must stay is all of them
but one for each replica that may go. (`maxUnavailable` of a budget would count the scale subresource, which counts replicas.)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rollout_operator.api import names
from rollout_operator.api.objects import Obj
from rollout_operator.api.spec import RolloutReplicaSpec

from .pass_plan import DisruptionBudget
from .replica_heads import ReplicaHead
from .updates.pushed_copies import can_share_copy, waits_for_wake
from .updates.weights_plan import WeightsPlan


def plan_budget(
    spec: RolloutReplicaSpec, heads: Collection[ReplicaHead], weights: WeightsPlan
) -> DisruptionBudget:
    """Return the budget: none may go while a commit runs, nor the last copy of pushed weights."""
    pods = 0 if spec.suspend else spec.replicas * spec.parallelism.nodes
    most = spec.disruption.max_unavailable
    allowed = 0 if weights.is_committing else most
    version = weights.committed_version
    least, is_last = pods - allowed, False
    if version.is_pushed:
        copies = sum(can_share_copy(h, version) or waits_for_wake(h, version) for h in heads)
        is_last = 0 < copies <= allowed
        if copies:
            # An added replica counts as well: of two pods with the only copies, one must stay.
            living = sum(1 + len(h.members) for h in heads)
            least = max(least, max(pods, living) - copies + 1)
    return DisruptionBudget(max(least, 0), unready_go=not is_last)


def disruption_budget(name: str, namespace: str, uid: str, wanted: DisruptionBudget) -> Obj:
    """Return the PodDisruptionBudget of a pool."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": names.pool_labels(name),
            "ownerReferences": [names.controller_reference(name, uid)],
        },
        "spec": {
            "minAvailable": wanted.min_available,
            "selector": {"matchLabels": {names.LABEL_POOL: name}},
            "unhealthyPodEvictionPolicy": "AlwaysAllow" if wanted.unready_go else "IfHealthyBudget",
        },
    }


def budget_difference(want: Mapping[str, Any], have: Mapping[str, Any]) -> str | None:
    """Return which field of a stored budget is not as wanted, or None."""
    stored = have.get("spec") or {}
    fields = {**want["spec"], "maxUnavailable": None}
    return next((f"spec.{k}" for k, v in fields.items() if stored.get(k) != v), None)
