"""What a pass decides about weights, and what each of its steps reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from rollout_common.wire import CHECKPOINT, Checkpoint, WeightsId, WeightsSource
from rollout_operator.api.spec import DesiredState, RolloutReplicaSpec, WeightsStrategy
from rollout_operator.api.status import (
    ActiveRange,
    CommittedWeights,
    LastUpdate,
    StatusId,
    UpdatePhase,
    WeightsStatus,
)
from rollout_operator.core.pass_plan import EventNote
from rollout_operator.core.replica_heads import ReplicaHead, WeightsVersion

from .content_hashes import bind_root_hash

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
    """A sentence if no replica has the pushed weights any more that some head needs."""
    withheld: bool = False
    """The target is not committed while the pool rests: no worker has its pushed bytes."""
    out_of_service: set[str] = field(default_factory=set)
    """Heads that failed to commit what the others serve: they get no traffic."""
    fence_epoch: int = 0
    failures: list[str] = field(default_factory=list)
    overdue: bool = False
    """The current phase has taken longer than its deadline."""
    unsupported: bool = False
    """The engine can't do what the spec asks of a commit: nothing is staged."""
    notes: list[EventNote] = field(default_factory=list)

    @property
    def running_update(self) -> LastUpdate | None:
        """The update under way."""
        running = self.update is not None and self.update.phase in UNDER_WAY_PHASES
        return self.update if running else None

    @property
    def is_committing(self) -> bool:
        """A commit has begun and is not finished."""
        return self.update is not None and self.update.phase is UpdatePhase.COMMITTING

    @property
    def has_commit_begun(self) -> bool:
        """The operator has called commits of this update: some worker may have it, unseen."""
        update = self.running_update
        return self.is_committing or (update is not None and update.commit_started_at is not None)

    @property
    def committed_version(self) -> WeightsVersion:
        """The committed weights as a version."""
        return committed_version(self.committed)

    def version_of(self, update: LastUpdate) -> WeightsVersion:
        """The version that an update moves to, bound to its content once commits have begun."""
        source = update.source or self.committed.source
        return WeightsVersion(update.identity, source, update.root_hash)


@dataclass(frozen=True, slots=True)
class WeightsPass:
    """What the steps of one pass over a pool's weights read, and the plan that they change."""

    spec: RolloutReplicaSpec
    plan: WeightsPlan
    target: WeightsVersion
    heads: Mapping[str, ReplicaHead]
    """Living heads of wanted replicas, by pod uid."""
    now: float
    """Wall clock, seconds."""

    @property
    def time(self) -> datetime:
        """Now, as status has times."""
        return datetime.fromtimestamp(self.now, UTC)

    @property
    def is_all_at_once(self) -> bool:
        """The pool commits only after every serving replica has staged."""
        return self.spec.weights.strategy is WeightsStrategy.ALL_AT_ONCE

    @property
    def is_resting(self) -> bool:
        """The pool is suspended, or is to sleep."""
        return self.spec.suspend or self.spec.state is DesiredState.ASLEEP

    @property
    def heads_in_service(self) -> dict[str, ReplicaHead]:
        """Heads that serve the committed weights or later ones, by pod uid."""
        floor = self.plan.committed.identity
        return {uid: h for uid, h in self.heads.items() if h.is_in_service(floor)}

    def bound_version(self, update: LastUpdate) -> WeightsVersion:
        """The version of an update, with the root hash that it has in this pool."""
        return bind_root_hash(self.plan.version_of(update), self.heads)

    def is_served(self, identity: WeightsId) -> bool:
        """Some worker has exactly these weights, by its last answer."""
        return any(h.last_active == identity for h in self.heads.values())

    def seconds_left(self, update: LastUpdate) -> float:
        """What is left of the deadline; staging and committing have one each."""
        began = update.commit_started_at if self.plan.has_commit_begun else update.started_at
        since = began.timestamp() if began else self.now
        return since + self.spec.weights.deadline_seconds - self.now


def target_version(spec: RolloutReplicaSpec) -> WeightsVersion:
    """The target, or the checkpoint where a trainer has set none."""
    target = spec.weights.target
    if target is None:
        return WeightsVersion(CHECKPOINT, WeightsSource(checkpoint=Checkpoint()))
    return WeightsVersion(target.identity, target.source)


def committed_weights(weights: WeightsStatus) -> CommittedWeights:
    """The stored committed weights; a new pool begins with the checkpoint."""
    if weights.committed is not None:
        return weights.committed
    return CommittedWeights(epoch=0, version=0, source=WeightsSource(checkpoint=Checkpoint()))


def committed_version(committed: CommittedWeights) -> WeightsVersion:
    """Return committed weights as a version."""
    return WeightsVersion(committed.identity, committed.source, committed.root_hash)


def has_unpolled_head(heads: Mapping[str, ReplicaHead]) -> bool:
    """Some running worker has not been polled yet: its silence proves nothing."""
    return any(
        h.pod.started and not h.is_finished and h.worker.state is None and h.worker.error is None
        for h in heads.values()
    )


def weights_status(plan: WeightsPlan, heads: Mapping[str, ReplicaHead]) -> WeightsStatus:
    """Return `status.weights` for this plan and what was observed."""
    serving = [h.worker.active for h in heads.values() if h.pod.ready and h.worker.active]
    running = plan.version_of(plan.running_update) if plan.running_update else None
    active = None
    if serving:
        lowest, highest = (StatusId.from_identity(each) for each in (min(serving), max(serving)))
        active = ActiveRange(min=lowest, max=highest)
    # Copies with changes are not validated, and validation cuts texts to their bounds.
    update = plan.update and LastUpdate.model_validate(plan.update.model_dump())
    return WeightsStatus(
        committed=plan.committed,
        active=active,
        staged_replicas=sum(h.has_staged(running) for h in heads.values()) if running else 0,
        last_update=update,
    )
