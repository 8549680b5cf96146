"""The places of a pool's pods in one pass: which may be made, and what is in the way. Pure.

A pool of its own accelerators has no places, and its pods may always be made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rollout_operator.api import names
from rollout_operator.api.spec import RolloutReplicaSpec

from .observed_pool import ObservedPool, Pod
from .pass_plan import RequeueAfter
from .placement import PlacementPending, PlacementPlanner, PlacementProblem, PodPlacement


class PoolPlacements:
    """Gives places to the pods of a pool, and notes what replicas without one wait for."""

    def __init__(self, spec: RolloutReplicaSpec, seen: ObservedPool) -> None:
        self._placement = None if spec.colocation is None else PlacementPlanner(spec, seen.trainers)
        self._pool, self._replicas = seen.name, spec.replicas
        claims = (seen.trainers.claims or {}).values()
        self._users = {user for claim in claims for user in claim.users}
        self._held: dict[str, Pod] = {}
        """Devices that pods have, or have yet to give back."""
        for pod in (*seen.pods, *seen.predecessors):
            taken = pod.taken if pod.owned and not pod.is_finished else None
            for device in () if taken is None else taken.devices:
                self._held.setdefault(device, pod)
        self.waiting: dict[int, str] = {}
        """What replicas without pods wait for, of the trainer."""
        self.misplaced: list[PlacementProblem] = []
        """What a person has to change, each thing once."""

    def place_ranks(
        self, replica: int, ranks: Iterable[int]
    ) -> list[tuple[int, PodPlacement | None]]:
        """Return these ranks with their places; none of them while one has no place."""
        found: list[tuple[int, PodPlacement | None]] = []
        for rank in ranks:
            place = self._free_placement(replica, rank)
            if isinstance(place, PlacementPending):
                self.waiting[replica] = place.why
                return []
            if isinstance(place, PlacementProblem):
                self.misplaced += [] if place in self.misplaced else [place]
                return []
            found.append((rank, place))
        return found

    def unlabelled_ranks(self, replica: int, ranks: Iterable[int]) -> list[int]:
        """Return those of the missing ranks that a claim names: their pods exist without our labels."""
        return [r for r in ranks if names.pod_name(self._pool, replica, r) in self._users]

    def lost_reason(self, pods: Iterable[Pod]) -> str | None:
        """Why one of these pods, and its gang with it, has to leave its place."""
        if self._placement is None:
            return None
        reasons = (self._placement.lost_reason(pod) for pod in pods if pod.owned)
        return next((why for why in reasons if why), None)

    def plan_moves(
        self,
        replicas: Mapping[int, Sequence[Pod]],
        healthy: frozenset[int],
        wait: RequeueAfter,
        *,
        busy: bool,
        pushed: bool = False,
    ) -> list[tuple[int, str]]:
        """Return which replica leaves its place for the one where it belongs, and why: one at most.

        One after the other, as in a rolling update: an engine that moves loads its model again, and
        gets pushed weights only from the others. A replica that does nothing useful goes first, then
        one whose new place is free; if none is, one gives its own up. None moves while the pool is `busy`:
        pods are made or deleted for other reasons. If weights are `pushed`, in the replicas' memory alone,
        the last copy stays where it is.
        """
        if self._placement is None:
            return []
        there = {i: pods for i, pods in replicas.items() if pods and i < self._replicas}
        found = {index: self._replica_move(pods) for index, pods in there.items()}
        if self._placement.moves_in is not None:
            wait.at_most(self._placement.moves_in)
        drifts = {index: drift for index, drift in found.items() if drift is not None}
        # A replica that is down in its right place has just moved, or has a trouble of its own.
        if busy or not drifts or any(i not in healthy and i not in drifts for i in there):
            return []
        first = min(drifts, key=lambda index: (index in healthy, drifts[index][0], index))
        if pushed and not (healthy & there.keys()) - {first}:
            return []
        return [(first, drifts[first][1])]

    def _replica_move(self, pods: Sequence[Pod]) -> tuple[bool, str] | None:
        """Whether the place where a replica belongs is taken, and why it belongs there; None: it is there."""
        assert self._placement is not None
        whys = [why for pod in pods if (why := self._placement.move_reason(pod))]
        taken = any(
            isinstance(self._free_placement(pod.replica, pod.rank), PlacementPending)
            for pod in pods
        )
        return (taken, whys[0]) if whys else None

    @property
    def strangers(self) -> list[PlacementProblem]:
        """Pods that have the trainer's labels and don't count, and why."""
        return [] if self._placement is None else self._placement.strangers

    def _free_placement(
        self, replica: int, rank: int
    ) -> PodPlacement | PlacementPending | PlacementProblem | None:
        """The place of a pod, once no other pod of this pool has its devices."""
        if self._placement is None:
            return None
        place = self._placement.placement_for(replica, rank)
        if not isinstance(place, PodPlacement):
            return place
        holder = next((self._held[each] for each in place.devices if each in self._held), None)
        if holder is not None:
            return PlacementPending(
                f"waits for pod {holder.name!r} to give {place.devices[0]} back"
            )
        return place
