"""For how long this process has seen pods end: intervals that hold whatever is done to clocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from rollout_operator.core.observed_pool import Pod


@dataclass(slots=True)
class EndedPodClock:
    """What was seen of the pods of one pool that finished or terminate, in monotonic seconds."""

    _since: dict[tuple[str, bool], float] = field(default_factory=dict)
    """First sight, by uid and whether the pod was terminating."""
    _forced: dict[str, float] = field(default_factory=dict)
    """Last attempt to remove a terminating pod by force, by uid."""

    def note_forced(self, uid: str, now: float) -> None:
        """Note that this pod is about to be removed by force."""
        self._forced[uid] = now

    def with_seen_seconds(self, pods: Iterable[Pod], now: float) -> tuple[Pod, ...]:
        """Return the pods with what was witnessed of them, and forget those that are gone."""
        before, self._since = self._since, {}
        told = tuple(self._pod_with_seen_seconds(pod, before, now) for pod in pods)
        left = {uid for uid, _ in self._since}
        self._forced = {uid: at for uid, at in self._forced.items() if uid in left}
        return told

    def _pod_with_seen_seconds(
        self, pod: Pod, before: dict[tuple[str, bool], float], now: float
    ) -> Pod:
        if not pod.is_deleting and not pod.is_finished:
            return pod
        key = (pod.uid, pod.is_deleting)
        since = self._since[key] = before.get(key, now)
        forced = self._forced.get(pod.uid)
        return replace(
            pod, witnessed=now - since, forced_ago=None if forced is None else now - forced
        )
