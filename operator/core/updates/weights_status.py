"""`status.weights`: what was decided about weights, and what the replicas serve."""

from __future__ import annotations

from collections.abc import Mapping

from rollout_operator.api.status import ActiveRange, LastUpdate, StatusId, WeightsStatus
from rollout_operator.core.replica_heads import ReplicaHead

from .weights_plan import WeightsPlan, update_version


def weights_status(plan: WeightsPlan, heads: Mapping[str, ReplicaHead]) -> WeightsStatus:
    """Return `status.weights` for this plan and what was observed."""
    serving = sorted(
        h.worker.active.as_tuple() for h in heads.values() if h.pod.ready and h.worker.active
    )
    update = plan.update if plan.running_identity else None
    running = update_version(update, plan.committed.source) if update else None
    return WeightsStatus(
        committed=plan.committed,
        active=ActiveRange(
            min=StatusId(epoch=serving[0][0], version=serving[0][1]),
            max=StatusId(epoch=serving[-1][0], version=serving[-1][1]),
        )
        if serving
        else None,
        staged_replicas=sum(h.has_staged(running) for h in heads.values()) if running else 0,
        last_update=_revalidate_update(plan.update),
    )


def _revalidate_update(update: LastUpdate | None) -> LastUpdate | None:
    """Cut its texts to their bounds: copies with changes are not validated."""
    return None if update is None else LastUpdate.model_validate(update.model_dump())
