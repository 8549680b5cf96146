"""What a pass decides about weights, and the few values that every phase reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollout_common.wire import CHECKPOINT, Checkpoint, WeightsId, WeightsSource
from rollout_operator.api.spec import RolloutReplicaSpec
from rollout_operator.api.status import CommittedWeights, LastUpdate, UpdatePhase, WeightsStatus
from rollout_operator.core.pass_plan import EventNote
from rollout_operator.core.replica_heads import ReplicaHead, WeightsVersion

UNDER_WAY_PHASES = (UpdatePhase.STAGING, UpdatePhase.COMMITTING, UpdatePhase.FAILED)


@dataclass(slots=True)
class WeightsPlan:
    """What is decided about weights; the maps are by pod uid."""

    committed: CommittedWeights
    update: LastUpdate | None
    barrier: frozenset[str] | None = None
    version_for: dict[str, WeightsVersion] = field(default_factory=dict)
    """The version that each of these heads must move to."""
    may_commit: set[str] = field(default_factory=set)
    """Of those, heads that may commit now."""
    peers: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Addresses of pods from which each of these heads can fetch pushed weights that it lacks."""
    no_copy: str | None = None
    """That nobody has the pushed weights any more that some head needs."""
    withheld: bool = False
    """The target is not committed while the pool rests: its pushed bytes ended with the workers' rest."""
    out_of_service: set[str] = field(default_factory=set)
    """Heads that failed to commit what the others serve: they get no traffic."""
    fence_epoch: int = 0
    failures: list[str] = field(default_factory=list)
    overdue: bool = False
    """The phase under way has taken longer than its deadline."""
    unsupported: bool = False
    """The engine can't do what the spec asks of a commit: nothing is staged."""
    notes: list[EventNote] = field(default_factory=list)

    @property
    def running_identity(self) -> WeightsId | None:
        """Identity of the update under way."""
        if self.update is None or self.update.phase not in UNDER_WAY_PHASES:
            return None
        return self.update.identity

    @property
    def is_committing(self) -> bool:
        """A commit has begun and is not finished."""
        return self.update is not None and self.update.phase is UpdatePhase.COMMITTING

    @property
    def has_commit_begun(self) -> bool:
        """Workers were told to commit the update under way: some may have it without our knowing."""
        running, update = self.running_identity, self.update
        begun = update is not None and update.commit_started_at is not None
        return self.is_committing or (running is not None and begun)


def target_version(spec: RolloutReplicaSpec) -> WeightsVersion:
    """The target, or the checkpoint where a trainer has set none."""
    if spec.target is None:
        return WeightsVersion(CHECKPOINT, WeightsSource(checkpoint=Checkpoint()))
    return WeightsVersion(spec.target.identity, spec.target.source)


def committed_weights(weights: WeightsStatus) -> CommittedWeights:
    """The stored committed weights; a new pool begins with the checkpoint."""
    if weights.committed is not None:
        return weights.committed
    return CommittedWeights(epoch=0, version=0, source=WeightsSource(checkpoint=Checkpoint()))


def update_version(update: LastUpdate, fallback: WeightsSource) -> WeightsVersion:
    """The version that an update moves to, bound to its content once commits have begun."""
    return WeightsVersion(update.identity, update.source or fallback, update.root_hash)


def deadline_seconds_left(
    spec: RolloutReplicaSpec, plan: WeightsPlan, update: LastUpdate, now: float
) -> float:
    """What is left of the deadline; staging and committing have one each."""
    began = update.commit_started_at if plan.has_commit_begun else update.started_at
    return (began.timestamp() if began else now) + spec.weights.deadline_seconds - now


def has_unpolled_head(heads: Mapping[str, ReplicaHead]) -> bool:
    """Some running worker has not been polled yet: its silence proves nothing."""
    return any(
        h.pod.started and not h.is_finished and h.worker.state is None and h.worker.error is None
        for h in heads.values()
    )
