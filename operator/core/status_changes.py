"""Which changes of a status are worth a write at once, and which are mere progress. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_common.wire import CHECKPOINT
from rollout_operator.api.names import ConditionType
from rollout_operator.api.status import PoolPhase, RolloutReplicaStatus, WeightsStatus

_OUR_CONDITIONS = frozenset(c.value for c in ConditionType)

_PROGRESS_FIELDS = frozenset(
    {
        "members", "message", "lastErrors",
        "replicas", "readyReplicas", "updatedReplicas", "asleepReplicas",
    }
)  # fmt: skip
"""Fields of status that change with mere progress."""

_LOADING = (ConditionType.WEIGHTS_SYNCED.value, "False", "Loading")
_LOADED = (ConditionType.WEIGHTS_SYNCED.value, "True", "Synced")


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
    if out.get("phase") == PoolPhase.LOADING:
        out["phase"] = PoolPhase.PENDING.value  # the same conditions, further on
    verdicts = [(c["type"], c["status"], c["reason"]) for c in document["conditions"]]
    weights = _without(out.get("weights", {}), "active", "stagedReplicas")
    if _loads_checkpoint(document):
        verdicts = [_LOADING if each == _LOADED else each for each in verdicts]
        weights["committed"] = _without(weights["committed"], "rootHash")
    out["conditions"] = verdicts
    out["weights"] = weights | {"lastUpdate": _without(weights.get("lastUpdate", {}), "message")}
    out["lastTransition"] = _without(out.get("lastTransition", {}), "message")
    return out


def _loads_checkpoint(document: Mapping[str, Any]) -> bool:
    """Whether the pool starts for the first time, with its model's own weights.

    That all replicas have loaded them is worth no write of its own, because Ready follows, and is written at once;
    nor is their hash, which no trainer has published and no call rests on (one that does waits: `is_same_decision`).
    """
    transition, weights = document.get("lastTransition", {}), document.get("weights", {})
    committed = weights.get("committed", {})
    starts = bool(transition) and not {"from", "completedAt"} & transition.keys()
    identity = (committed.get("epoch"), committed.get("version"))
    return starts and "lastUpdate" not in weights and identity == CHECKPOINT.as_tuple()


def _without(document: Mapping[str, Any], *fields: str) -> dict[str, Any]:
    return {k: v for k, v in document.items() if k not in fields}
