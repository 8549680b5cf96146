"""What passes over a pool remember, so that each parses only what changed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from weakref import WeakValueDictionary

import orjson

from rollout_operator.api.names import ANNOTATION_RETRY, ConditionType
from rollout_operator.api.objects import Obj
from rollout_operator.api.shared_models import share_field_names
from rollout_operator.api.spec import RolloutReplicaSpec, parse_spec
from rollout_operator.api.status import RolloutReplicaStatus, parse_status
from rollout_operator.core.observed_pool import Pod
from rollout_operator.core.status_changes import owned_fields
from rollout_operator.core.trainer_pods import TrainerWatch

from .write_obstacles import WriteObstacles


@dataclass(slots=True)
class EndedPodClock:
    """For how long this process has seen pods of a pool end, in monotonic seconds.

    Such an interval holds even if somebody sets a clock.
    """

    _since: dict[tuple[str, bool], float] = field(default_factory=dict)
    """First sight, by uid and whether the pod was terminating."""
    _forced: dict[str, float] = field(default_factory=dict)
    """Last attempt to remove a terminating pod by force, by uid."""

    def note_forced(self, uid: str, now: float) -> None:
        """Note that this pod is about to be removed by force."""
        self._forced[uid] = now

    def with_seen_seconds(self, pods: Iterable[Pod], now: float) -> tuple[Pod, ...]:
        """Return the pods with what was seen of their end, and forget those that are gone."""
        before, self._since = self._since, {}

        def with_seconds(pod: Pod) -> Pod:
            if not pod.is_deleting and not pod.is_finished:
                return pod
            key = (pod.uid, pod.is_deleting)
            since = self._since[key] = before.get(key, now)
            forced = self._forced.get(pod.uid)
            forced_ago = None if forced is None else now - forced
            return replace(pod, seen_seconds=now - since, forced_ago=forced_ago)

        found = tuple(with_seconds(pod) for pod in pods)
        left = {uid for uid, _ in self._since}
        self._forced = {uid: at for uid, at in self._forced.items() if uid in left}
        return found


@dataclass(slots=True)
class PoolMemory:
    """What a process remembers of a pool between passes; losing it costs time, not truth."""

    barrier: frozenset[str] | None = None
    obstacles: WriteObstacles = field(default_factory=WriteObstacles)
    wishes: tuple[object, ...] | None = None
    """What the user wanted when those were met."""
    polled: frozenset[str] = frozenset()
    ended_pods: EndedPodClock = field(default_factory=EndedPodClock)
    trainers: TrainerWatch = field(default_factory=TrainerWatch)
    first_look: float | None = None
    """When this process first looked at the pool, monotonic."""
    first_polls_done: bool = False
    """Each head was polled once, or had its time: a decision is not a guess now."""
    overtaken: str = ""
    """Version of the object in whose place another client's write came before our status."""
    written_at: float | None = None
    """When status was last written, monotonic."""
    sentence: str = ""
    pool: Obj | None = None
    """The object that `stored` was read from; the store never changes one."""
    stored: RolloutReplicaStatus = field(default_factory=RolloutReplicaStatus)
    unreadable: str | None = None
    """What of the object's status could not be read: the operator may write none of it then."""
    unwritten: RolloutReplicaStatus | None = None
    """The newest status, while the API server does not take it."""
    spec: tuple[Obj, RolloutReplicaSpec] | None = None
    """The last spec that could be read, after its text."""

    def recall_obstacles(self) -> None:
        """Believe in what the last process met until this one has tried the write itself."""
        before = self.stored.find_condition(ConditionType.DEGRADED)
        if before is not None and before.status == "True":
            self.obstacles.recall_obstacle(before.reason, before.message)

    def notice_user_change(self, pool: Obj) -> None:
        """Try at once what was refused, if the user has changed spec or asked for it.

        A trainer's publishes and turns do not count: they come each second, for days.
        """
        if self.pool is pool:
            return
        spec, notes = pool["spec"], pool["metadata"].get("annotations") or {}
        weights = {**(spec.get("weights") or {}), "target": None}
        wishes = {**spec, "weights": weights, "state": None}, notes.get(ANNOTATION_RETRY, "")
        if self.wishes not in (None, wishes):
            self.obstacles.retry_now()
        self.wishes = wishes

    @property
    def believed_status(self) -> RolloutReplicaStatus:
        """What the next status follows: the newest one, with the weights of the written one.

        A pass decides again what was decided about weights and could not be written, so no commit
        rests on it; counts, times and events go on.
        """
        if self.unwritten is None:
            return self.stored
        return self.unwritten.model_copy(update={"weights": self.stored.weights})

    def read_status(self, pool: Obj) -> RolloutReplicaStatus:
        """Return `believed_status`; the object's status is parsed once."""
        if self.pool is not pool:
            self.pool, before = pool, self.stored
            self.stored, self.unreadable = parse_status(pool)
            share_field_names(self.stored)
            if self.unwritten is not None and owned_fields(before) != owned_fields(self.stored):
                self.unwritten = None  # it was written after all
        return self.believed_status

    def read_spec(self, pool: Obj) -> RolloutReplicaSpec:
        """Return the object's spec, parsed once; after a restore of etcd one generation may have two.

        Raises:
            InvalidSpec: this operator can't read it.
        """
        same = self.spec is not None and self.spec[0] == pool["spec"]
        parsed = self.spec[1] if self.spec is not None and same else _read_shared_spec(pool)
        self.spec = (pool["spec"], parsed)  # of objects that came before nothing is kept
        return parsed


_shared_specs: WeakValueDictionary[bytes, RolloutReplicaSpec] = WeakValueDictionary()
"""By their text: many pools are made from one manifest."""


def _read_shared_spec(pool: Obj) -> RolloutReplicaSpec:
    text = orjson.dumps(pool["spec"])
    spec = _shared_specs.get(text)
    if spec is None:
        spec = _shared_specs[text] = parse_spec(pool)
        share_field_names(spec)
    return spec
