"""What passes over a pool remember, so that each parses only what changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rollout_operator.api.names import ANNOTATION_RETRY, ConditionType
from rollout_operator.api.objects import Obj
from rollout_operator.api.spec import RolloutReplicaSpec, parse_spec
from rollout_operator.api.status import RolloutReplicaStatus, parse_status
from rollout_operator.core.pods.pod_reader import PodReader
from rollout_operator.core.status_report import owned_fields
from rollout_operator.core.trainer_pods import TrainerWatch

from .ended_pod_clock import EndedPodClock
from .write_obstacles import WriteObstacles


@dataclass(slots=True)
class PoolMemory:
    """What a process remembers of a pool between passes; losing it costs time, not truth."""

    barrier: frozenset[str] | None = None
    obstacles: WriteObstacles = field(default_factory=WriteObstacles)
    wishes: tuple[object, ...] | None = None
    """What the user wanted when those were met."""
    polled: frozenset[str] = frozenset()
    pods: PodReader = field(default_factory=PodReader)
    witness: EndedPodClock = field(default_factory=EndedPodClock)
    trainers: TrainerWatch = field(default_factory=TrainerWatch)
    first_look: float | None = None
    """When this process first looked at the pool, monotonic."""
    first_polls_done: bool = False
    """Each head was polled once, or had its time: what is decided now is not a guess."""
    overtaken: str = ""
    """Version of the object over which somebody else's write was faster than its status."""
    written_at: float | None = None
    """When status was last written, monotonic."""
    sentence: str = ""
    pool: Obj | None = None
    """The object that `stored` was read from; the store never changes one."""
    stored: RolloutReplicaStatus = field(default_factory=RolloutReplicaStatus)
    unreadable: str | None = None
    """What of the object's status could not be read: none of it may be written then."""
    stored_fields: dict[str, Any] = field(default_factory=dict)
    """What of `stored` the operator owns, as a document."""
    unwritten: RolloutReplicaStatus | None = None
    """The newest status, while the API server does not take it."""
    spec: tuple[tuple[str, int], RolloutReplicaSpec] | None = None
    """The last spec that could be read, and of which object and generation it is."""

    def recall_obstacles(self) -> None:
        """Take for true, until it is tried, what the last process met: it has not gone since."""
        before = self.stored.find_condition(ConditionType.DEGRADED)
        if before is not None and before.status == "True":
            self.obstacles.recall_obstacle(before.reason, before.message)

    def notice_user_change(self, pool: Obj) -> None:
        """Try at once what was refused, if the user has changed spec or asked for it.

        A trainer's publishes and turns are no such change: they come each second, for days.
        """
        if self.pool is pool:
            return
        wishes = _user_wishes(pool)
        if self.wishes not in (None, wishes):
            self.obstacles.retry_now()
        self.wishes = wishes

    @property
    def believed_status(self) -> RolloutReplicaStatus:
        """What the next status follows: the newest one, with what stands written about weights.

        Whatever was decided about weights and can't be written is decided anew, so no commit rests
        on it; counts, times and events go on.
        """
        if self.unwritten is None:
            return self.stored
        return self.unwritten.model_copy(update={"weights": self.stored.weights})

    def read_status(self, pool: Obj) -> RolloutReplicaStatus:
        """Return `believed_status`; the object's status is parsed once."""
        if self.pool is not pool:
            self.pool = pool
            self.stored, self.unreadable = parse_status(pool)
            fields = owned_fields(self.stored)
            if fields != self.stored_fields:
                self.unwritten = None  # it was written after all
            self.stored_fields = fields
        return self.believed_status

    def read_spec(self, pool: Obj) -> RolloutReplicaSpec:
        """Return the object's spec, parsed once for each generation.

        Raises:
            InvalidSpec: this operator can't read it.
        """
        generation = _spec_generation(pool)
        if self.spec is None or self.spec[0] != generation:
            self.spec = (generation, parse_spec(pool))
        return self.spec[1]


def _user_wishes(pool: Obj) -> tuple[object, ...]:
    spec, notes = pool["spec"], pool["metadata"].get("annotations") or {}
    weights = {**(spec.get("weights") or {}), "target": None}
    return {**spec, "weights": weights, "state": None}, notes.get(ANNOTATION_RETRY, "")


def _spec_generation(pool: Obj) -> tuple[str, int]:
    return pool["metadata"]["uid"], pool["metadata"].get("generation", 0)
