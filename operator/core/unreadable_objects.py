"""What to tell of an object that this operator can't read, and leaves alone. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from rollout_operator.api.names import ConditionType
from rollout_operator.api.status import PoolCondition, PoolPhase, RolloutReplicaStatus


def status_for_invalid_spec(
    stored: RolloutReplicaStatus, pool: Mapping[str, Any], why: str, now: float
) -> RolloutReplicaStatus:
    """Return the stored status, Degraded: this operator can't read the spec and touches nothing."""
    degraded = _degraded_condition(stored, pool, why, now, reason="InvalidSpec")
    others = tuple(c for c in stored.conditions if c.type != ConditionType.DEGRADED)
    return stored.model_copy(
        update={
            "observed_generation": degraded.observed_generation,
            "phase": PoolPhase.DEGRADED,
            "message": why[:1024],
            "conditions": (*others, degraded),
        }
    )


def document_for_unreadable_status(
    stored: RolloutReplicaStatus, pool: Mapping[str, Any], why: str, now: float
) -> dict[str, Any] | None:
    """Return the object's own status, with nothing changed but Degraded; None: it says so already.

    What this operator can't read, a newer one needs: a status written from what was understood
    would erase it, committed weights first of all.
    """
    degraded = _degraded_condition(stored, pool, why, now, reason="UnreadableStatus")
    if stored.find_condition(ConditionType.DEGRADED) == degraded:
        return None
    kept = dict(pool["status"])
    found = kept.get("conditions")
    others = [c for c in found if not _is_degraded(c)] if isinstance(found, list) else []
    kept["conditions"] = [*others, degraded.model_dump(by_alias=True)]
    return kept


def _degraded_condition(
    stored: RolloutReplicaStatus, pool: Mapping[str, Any], why: str, now: float, *, reason: str
) -> PoolCondition:
    """Return the condition Degraded, which keeps its time while it stays true."""
    before = stored.find_condition(ConditionType.DEGRADED)
    since = before.last_transition_time if before and before.status == "True" else None
    return PoolCondition(
        type=ConditionType.DEGRADED,
        status="True",
        reason=reason,
        message=why,
        last_transition_time=since or datetime.fromtimestamp(now, UTC),
        observed_generation=pool["metadata"].get("generation", 0),
    )


def _is_degraded(condition: object) -> bool:
    return isinstance(condition, Mapping) and condition.get("type") == ConditionType.DEGRADED
