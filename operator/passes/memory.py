"""What passes over a pool remember, so that each parses only what changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rollout_operator.api.names import Condition
from rollout_operator.api.objects import Obj
from rollout_operator.api.spec import RolloutReplicaSpec, parse_spec
from rollout_operator.api.status import RolloutReplicaStatus, parse_status
from rollout_operator.core.podreader import PodReader
from rollout_operator.core.status_changes import owned_fields
from rollout_operator.core.trainers import TrainerWatch
from rollout_operator.core.world import RECALLED

from .witness import Witness
from .writes import Obstacles

OBSTACLE_SECONDS = 10.0
"""How soon a name that was taken or a pod that was rejected is tried again, and told anew."""


@dataclass(slots=True)
class Memory:
    """What a process remembers of a pool between passes; losing it costs time, not truth."""

    barrier: frozenset[str] | None = None
    obstacles: Obstacles = field(default_factory=Obstacles)
    told_at: float | None = None
    """When those were last found, monotonic."""
    polled: frozenset[str] = frozenset()
    pods: PodReader = field(default_factory=PodReader)
    witness: Witness = field(default_factory=Witness)
    trainers: TrainerWatch = field(default_factory=TrainerWatch)
    first_look: float | None = None
    """When this process first looked at the pool, monotonic."""
    first_polls_done: bool = False
    """Each head was polled once, or had its time: what is decided now is not a guess."""
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
    spec: tuple[tuple[str, int], RolloutReplicaSpec] | None = None
    """The last spec that could be read, and of which object and generation it is."""

    def recall(self) -> None:
        """Take for true, until it is tried, what the last process met: it has not gone since."""
        before = self.stored.condition(Condition.DEGRADED)
        if before is None or before.status != "True":
            return
        if before.reason == "NameConflict":
            self.obstacles.conflicts[RECALLED] = before.message
        elif before.reason == "Rejected":
            self.obstacles.rejections[RECALLED] = before.message

    def meets(self, found: Obstacles, now: float) -> bool:
        """Note what is in the way now; return whether something came or went.

        The same in other words (a time, the id of a request) is noted seldom: it would have status
        written anew after each try, and each such write brings the next one.
        """
        changed = found.labels != self.obstacles.labels
        if changed or self.told_at is None or now - self.told_at >= OBSTACLE_SECONDS:
            self.obstacles, self.told_at = found, now
        return changed

    def read_status(self, pool: Obj) -> RolloutReplicaStatus:
        """Return the object's status, parsed once."""
        if self.pool is not pool:
            self.pool = pool
            self.stored, self.unreadable = parse_status(pool)
            self.stored_fields = owned_fields(self.stored)
        return self.stored

    def read_spec(self, pool: Obj) -> RolloutReplicaSpec:
        """Return the object's spec, parsed once for each generation.

        Raises:
            InvalidSpec: this operator can't read it.
        """
        generation = _generation(pool)
        if self.spec is None or self.spec[0] != generation:
            self.spec = (generation, parse_spec(pool))
        return self.spec[1]


def _generation(pool: Obj) -> tuple[str, int]:
    return pool["metadata"]["uid"], pool["metadata"].get("generation", 0)
