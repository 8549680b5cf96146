"""What of a new status is worth a write. Pure."""

from __future__ import annotations

from typing import Any

from rollout_operator.api.names import ConditionType
from rollout_operator.api.status import RolloutReplicaStatus, WeightsStatus

_OUR_CONDITIONS = frozenset(c.value for c in ConditionType)

_PROGRESS_FIELDS = frozenset(
    {
        "members", "message", "lastErrors",
        "replicas", "readyReplicas", "updatedReplicas", "asleepReplicas",
    }
)  # fmt: skip


def owned_fields(status: RolloutReplicaStatus) -> dict[str, Any]:
    """The part of status that the operator owns, as a document: no conditions of others."""
    document = status.to_document()
    kept = [c for c in document.get("conditions", ()) if c["type"] in _OUR_CONDITIONS]
    document["conditions"] = sorted(kept, key=lambda c: str(c["type"]))
    return document


def is_same_decision(before: WeightsStatus, after: WeightsStatus) -> bool:
    """Whether a new status decides nothing about weights that the old one doesn't say."""
    return _weights_decision(before) == _weights_decision(after)


def _weights_decision(weights: WeightsStatus) -> tuple[object, ...]:
    update = weights.last_update
    if update is None:
        return (weights.committed,)
    return weights.committed, update.identity, update.source, update.phase, update.root_hash


def without_progress(document: dict[str, Any]) -> dict[str, Any]:
    """Status without the texts and counts that change with mere progress."""
    out = {k: v for k, v in document.items() if k not in _PROGRESS_FIELDS}
    out["conditions"] = [(c["type"], c["status"], c["reason"]) for c in document["conditions"]]
    weights = {**out.get("weights", {})}
    weights.pop("active", None)
    weights.pop("stagedReplicas", None)
    update = {**weights.get("lastUpdate", {})}
    update.pop("message", None)
    out["weights"] = {**weights, "lastUpdate": update}
    transition = {**out.get("lastTransition", {})}
    transition.pop("message", None)
    out["lastTransition"] = transition
    return out
