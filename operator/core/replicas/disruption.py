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
from rollout_operator.core.pass_plan import DisruptionBudget
from rollout_operator.core.replica_heads import ReplicaHead
from rollout_operator.core.services import child_metadata, metadata_difference, metadata_patch
from rollout_operator.core.updates.pushed_copies import copy_certainty
from rollout_operator.core.updates.weights_plan import WeightsPlan


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
        sure, maybe = ([h for h in heads if copy_certainty(h, version) == n] for n in (2, 1))
        # While only silent replicas may have one, none of them may go: nobody knows which of them has it.
        copies = len(sure) or min(1, len(maybe))
        is_last = copies > 0 and (copies <= allowed or _would_go_together(sure or maybe))
        if copies:
            # An added replica counts as well: of two pods with the only copies, one must stay.
            living = sum(1 + len(h.members) for h in heads)
            least = max(least, max(pods, living) - copies + 1)
    return DisruptionBudget(max(least, 0), unready_go=not is_last)


def _would_go_together(holders: Collection[ReplicaHead]) -> bool:
    """Whether one node's drain takes them all: it has pods of each, and a budget that lets unready pods go counts none."""
    nodes = ({h.pod.node, *(member.node for member in h.members)} for h in holders)
    return not any(h.pod.ready for h in holders) and bool(set.intersection(*nodes))


def disruption_budget(name: str, namespace: str, uid: str, wanted: DisruptionBudget) -> Obj:
    """Return the PodDisruptionBudget of a pool."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": child_metadata(name, name, namespace, uid),
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
    changed = next((f"spec.{k}" for k, v in fields.items() if stored.get(k) != v), None)
    return changed or metadata_difference(want, have)


def budget_patch(want: Mapping[str, Any], have: Mapping[str, Any]) -> Obj:
    """Return the merge patch that makes a stored budget what it should be."""
    return {
        "metadata": metadata_patch(want, have),
        "spec": {**want["spec"], "maxUnavailable": None},
    }
