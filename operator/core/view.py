"""What there is to report about, put together: spec, world and what this pass decided. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollout_operator.api.spec import RolloutReplicaSpec, State
from rollout_worker.schemas import Lifecycle, WeightsId

from .ailments import Ailments
from .gangs import Gang, PodPlan
from .heads import Head
from .updates.weights_plan import WeightsPlan
from .world import Observed, is_asleep


@dataclass(frozen=True, slots=True)
class View:
    """All that the checks may look at."""

    spec: RolloutReplicaSpec
    seen: Observed
    gangs: Mapping[int, Gang]
    heads: Mapping[str, Head]
    pods: PodPlan
    weights: WeightsPlan
    target: WeightsId
    ailments: Ailments
    was_at_rest: bool = False
    """Status says that the pool has come to the rest that spec asks for still."""

    @property
    def wanted(self) -> int:
        """Replicas that should run."""
        return 0 if self.spec.suspend else self.spec.replicas

    @property
    def ready(self) -> int:
        """Replicas whose head is Ready: it serves."""
        return sum(h.serves for h in self.heads.values())

    def count(self, lifecycle: Lifecycle) -> int:
        """Replicas whose worker says that it is in this state."""
        return sum(
            h.worker.state is not None and h.worker.state.lifecycle is lifecycle
            for h in self.heads.values()
        )

    @property
    def asleep(self) -> int:
        """Replicas whose worker says that it sleeps, with all its memory given back."""
        return sum(
            h.worker.state is not None and is_asleep(h.worker.state) for h in self.heads.values()
        )

    @property
    def unknown(self) -> int:
        """Replicas that did once what was asked of them and do not say what they do now."""
        return sum(
            h.worker.state is None and h.pod.proven_since is not None and not h.finished
            for h in self.heads.values()
        )

    @property
    def at_rest(self) -> int:
        """Replicas that are paused or asleep, as spec wants them; unknown is not changed."""
        paused = self.spec.state is State.PAUSED
        known = self.count(Lifecycle.PAUSED) if paused else self.asleep
        return known + (self.unknown if self.was_at_rest else 0)

    @property
    def reached(self) -> bool:
        """Every replica is where spec wants it."""
        if self.spec.suspend:
            return not self.seen.pods
        if self.spec.state is State.ACTIVE:
            return self.ready >= self.wanted
        return self.at_rest >= self.wanted
