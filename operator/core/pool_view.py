"""What there is to report about, put together: spec, world and what this pass decided. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollout_common.wire import Lifecycle, WeightsId
from rollout_operator.api.spec import DesiredState, RolloutReplicaSpec

from .observed_pool import ObservedPool, is_asleep
from .pod_planning import PodGang, PodPlan
from .replica_heads import ReplicaHead
from .replica_troubles import ReplicaTroubles
from .updates.weights_plan import WeightsPlan


@dataclass(frozen=True, slots=True)
class PoolView:
    """All that the checks may look at."""

    spec: RolloutReplicaSpec
    seen: ObservedPool
    gangs: Mapping[int, PodGang]
    heads: Mapping[str, ReplicaHead]
    pods: PodPlan
    weights: WeightsPlan
    target: WeightsId
    ailments: ReplicaTroubles
    was_at_rest: bool = False
    """Status says that the pool has come to the rest that spec asks for still."""

    @property
    def wanted_replicas(self) -> int:
        """Replicas that should run."""
        return 0 if self.spec.suspend else self.spec.replicas

    @property
    def ready_replicas(self) -> int:
        """Replicas whose head is Ready: it serves."""
        return sum(h.is_serving for h in self.heads.values())

    def count_in_lifecycle(self, lifecycle: Lifecycle) -> int:
        """Replicas whose worker says that it is in this state."""
        return sum(
            h.worker.state is not None and h.worker.state.lifecycle is lifecycle
            for h in self.heads.values()
        )

    @property
    def asleep_replicas(self) -> int:
        """Replicas whose worker says that it sleeps, with all its memory given back."""
        return sum(
            h.worker.state is not None and is_asleep(h.worker.state) for h in self.heads.values()
        )

    @property
    def unknown_replicas(self) -> int:
        """Replicas that did once what was asked of them and do not say what they do now."""
        return sum(
            h.worker.state is None and h.pod.proven_since is not None and not h.is_finished
            for h in self.heads.values()
        )

    @property
    def replicas_at_rest(self) -> int:
        """Replicas that are paused or asleep, as spec wants them; unknown is not changed."""
        paused = self.spec.state is DesiredState.PAUSED
        known = self.count_in_lifecycle(Lifecycle.PAUSED) if paused else self.asleep_replicas
        return known + (self.unknown_replicas if self.was_at_rest else 0)

    @property
    def is_settled(self) -> bool:
        """Every replica is where spec wants it."""
        if self.spec.suspend:
            return not self.seen.pods
        if self.spec.state is DesiredState.ACTIVE:
            return self.ready_replicas >= self.wanted_replicas
        return self.replicas_at_rest >= self.wanted_replicas
