"""Which replicas a pool has: what a scale-down leaves, and what a scale-up adds. Pure.

A replica's number says nothing of what it does. So a scale-down deletes those that would be missed least, as a ReplicaSet does
and a StatefulSet doesn't, and the numbers of the others stay as they are. A scale-up, or the replacement of a replica whose pods
are gone, takes the lowest number that is free. Nothing is stored: the pods that exist say which replicas a pool has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import count, islice

from rollout_operator.api.spec import PoolMode, RolloutReplicaSpec
from rollout_operator.core.observed_pool import ObservedPool, Pod
from rollout_operator.core.replica_heads import ReplicaHead, WeightsVersion
from rollout_operator.core.updates.pushed_copies import copy_certainty


@dataclass(frozen=True, slots=True)
class ReplicaChoice:
    """Numbers of the replicas that a pool is to have."""

    wanted: frozenset[int]
    """As many as spec asks for; none of a suspended pool."""
    surge: frozenset[int] = frozenset()
    """Replicas in addition to them, for a time."""
    kept: frozenset[int] = frozenset()
    """Replicas that are neither and are not deleted yet: they alone have a copy of the pushed weights."""

    running: frozenset[int] = field(init=False)
    """Replicas that must have pods."""
    living: frozenset[int] = field(init=False)
    """Replicas that may have pods."""

    def __post_init__(self) -> None:
        """Join them once: a pass asks for each pod."""
        object.__setattr__(self, "running", self.wanted | self.surge)
        object.__setattr__(self, "living", self.running | self.kept)


def fixed_choice(spec: RolloutReplicaSpec) -> ReplicaChoice:
    """Return the lowest numbers, as a pool has them before its first scale-down."""
    return ReplicaChoice(frozenset(range(0 if spec.suspend else spec.replicas)))


def surplus_replicas(spec: RolloutReplicaSpec, seen: ObservedPool) -> frozenset[int]:
    """Return the replicas of which a scale-down has yet to choose: more of them live than are wanted."""
    if spec.suspend or spec.mode is not PoolMode.STANDALONE:
        return frozenset()
    living = frozenset(p.replica for p in _own_pods(seen) if not p.is_deleting)
    return living if len(living) > spec.replicas else frozenset()


def choose_wanted_replicas(
    spec: RolloutReplicaSpec,
    seen: ObservedPool,
    heads: Iterable[ReplicaHead],
    healthy: Collection[int],
    committed: WeightsVersion,
) -> frozenset[int]:
    """Return the numbers of the replicas that spec asks for.

    If more are there, those stay that are whole, have a copy of the pushed weights, are healthy and have most
    requests, in this order of importance; among equals the lowest. Devices and members of the other modes go by number,
    so they keep the lowest ones.
    """
    if spec.suspend or spec.mode is not PoolMode.STANDALONE:
        return fixed_choice(spec).wanted
    # The failures of one whose pods are gone are counted by its number: see `restarts_of`.
    there = {pod.replica for pod in _own_pods(seen)} | seen.restarts_of.keys()
    if len(there) > spec.replicas:
        by_replica = {head.pod.replica: head for head in heads}
        whole = _whole_replicas(spec, (pod for pod in seen.pods if pod.owned))

        def keep_rank(index: int) -> tuple[bool, int, bool, int, int]:
            head = by_replica.get(index)
            if head is None:
                return False, 0, False, 0, -index
            copies = copy_certainty(head, committed)
            return index in whole, copies, index in healthy, head.requests, -index

        there = set(sorted(there, key=keep_rank, reverse=True)[: spec.replicas])
    taken = there | {pod.replica for pod in seen.pods if pod.is_surge and pod.owned}
    return frozenset(there | set(islice(free_numbers(taken), spec.replicas - len(there))))


def _own_pods(seen: ObservedPool) -> Iterable[Pod]:
    """Pods that make a replica one of the pool's; strangers and what is there for a time don't."""
    return (pod for pod in seen.pods if pod.owned and not pod.is_surge)


def free_numbers(taken: Collection[int]) -> Iterable[int]:
    """Yield the numbers that are not taken, from 0 on."""
    return (index for index in count() if index not in taken)


def _whole_replicas(spec: RolloutReplicaSpec, pods: Iterable[Pod]) -> frozenset[int]:
    """Replicas all of whose pods run, and are to go on."""
    working = Counter(p.replica for p in pods if not (p.is_deleting or p.is_finished))
    return frozenset(i for i, pods in working.items() if pods == spec.parallelism.nodes)
