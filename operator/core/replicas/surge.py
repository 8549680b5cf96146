"""How many replicas there are for a time in addition to the wanted ones, and why. Pure.

A rolling update adds up to `maxSurge` until it is over. One is added while the only copy of the pool's pushed weights lies
on a cordoned node: the pool's PodDisruptionBudget would hold back the drain of that node until another copy exists. And if
only a replica beyond the wanted ones has a copy, after such a drain, it stays until a wanted one has it.

They have the lowest free numbers: as a rule those after the wanted ones, as in LeaderWorkerSet. An annotation of their pods distinguishes them
from what a scale-down has yet to delete.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import islice

from rollout_operator.api.spec import DesiredState, PoolMode, RolloutReplicaSpec
from rollout_operator.core.observed_pool import ObservedPool
from rollout_operator.core.replica_heads import ReplicaHead, WeightsVersion
from rollout_operator.core.updates.pushed_copies import can_share_copy

from .pod_planning import group_gangs
from .replica_choice import free_numbers


@dataclass(frozen=True, slots=True)
class CopyMove:
    """The only copy of the pool's pushed weights, on a node that is cordoned or on a replica that is not wanted."""

    replica: int
    pod: str
    """Its head."""
    node: str
    """The cordoned node, if the replica is a wanted one."""
    is_copied: bool = False
    """An added replica has a copy as well: the node's drain may go on."""

    @property
    def kept(self) -> frozenset[int]:
        """The replica that stays, although it is not wanted, until a wanted one has a copy."""
        return frozenset() if self.node else frozenset({self.replica})


def find_copy_move(
    spec: RolloutReplicaSpec,
    seen: ObservedPool,
    heads: Iterable[ReplicaHead],
    committed: WeightsVersion,
    wanted: Collection[int],
) -> CopyMove | None:
    """Return the only copy of the committed weights if a wanted replica without one must take it; else None.

    `heads` are those of all replicas, also of those beyond the wanted ones. Where spec lets no pod be evicted, no
    drain takes a copy.
    """
    fixed = spec.suspend or not spec.replicas or spec.mode is not PoolMode.STANDALONE
    if fixed or not committed.is_pushed:
        return None
    copies = [head for head in heads if can_share_copy(head, committed)]
    there = [head for head in copies if head.pod.replica in wanted]
    if copies and not there:
        kept = min(copies, key=lambda head: head.pod.replica).pod
        return CopyMove(kept.replica, kept.name, node="")
    if len(there) != 1 or not spec.disruption.max_unavailable:
        return None
    if spec.state is DesiredState.ASLEEP:
        return None  # an added replica would fall asleep, and fetch nothing before it wakes
    pods = (there[0].pod, *there[0].members)
    node = next((p.node for p in pods if p.node and p.node in seen.cordoned), None)
    if node is None:
        return None
    return CopyMove(there[0].pod.replica, there[0].pod.name, node, len(copies) > 1)


def choose_surge(
    spec: RolloutReplicaSpec,
    seen: ObservedPool,
    wanted: Collection[int],
    healthy: Collection[int],
    move: CopyMove | None = None,
) -> frozenset[int]:
    """Return the numbers of the replicas that there are to be in addition to the wanted ones."""
    if spec.suspend or spec.mode is not PoolMode.STANDALONE:
        return frozenset()
    there = {
        pod.replica
        for pod in seen.pods
        if pod.owned and pod.is_surge and pod.replica not in wanted and not pod.is_deleting
    }
    surge = _count_surge(spec, seen, wanted, healthy, move, goes_on=bool(there))
    more = islice(free_numbers(there | set(wanted)), max(0, surge - len(there)))
    return frozenset([*sorted(there)[:surge], *more])


def _count_surge(
    spec: RolloutReplicaSpec,
    seen: ObservedPool,
    wanted: Collection[int],
    healthy: Collection[int],
    move: CopyMove | None,
    *,
    goes_on: bool,
) -> int:
    strategy, moves = spec.update_strategy, move is not None and bool(move.node)
    if not strategy.max_surge and not goes_on:
        return int(moves)
    gangs = group_gangs(spec, seen, wanted)
    rolled = [gangs[index] for index in wanted if index >= strategy.partition]
    begins = any(gang.living and not gang.is_current(spec) for gang in rolled)
    behind = sum(
        not (gang.is_complete and gang.is_current(spec) and gang.index in healthy)
        for gang in rolled
    )
    # One that took a copy stays until the replica whose pod was evicted is back.
    most = max(strategy.max_surge, 1) if goes_on else strategy.max_surge
    surge = min(most, behind) if begins or goes_on else 0
    return max(surge, int(moves))
