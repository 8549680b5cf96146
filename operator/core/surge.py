"""How many replicas a rolling update adds until it is over. Pure.

As in LeaderWorkerSet they are the replicas with the numbers after the wanted ones. Their pods say so in an annotation:
what a scale-down leaves for a moment has such numbers, too.
"""

from __future__ import annotations

from collections.abc import Collection

from rollout_operator.api.spec import PoolMode, RolloutReplicaSpec

from .observed_pool import ObservedPool
from .pod_planning import group_gangs


def count_surge(spec: RolloutReplicaSpec, seen: ObservedPool, healthy: Collection[int]) -> int:
    """Return how many replicas there are to be in addition to `spec.replicas`, at most `maxSurge`.

    Args:
        spec: the wanted pool.
        seen: the world.
        healthy: replicas that do what the spec asks for.
    """
    strategy = spec.update_strategy
    if not strategy.max_surge or spec.suspend or spec.mode is not PoolMode.STANDALONE:
        return 0
    gangs = group_gangs(spec, seen)
    rolled = [
        gangs[index] for index in range(min(strategy.partition, spec.replicas), spec.replicas)
    ]
    begins = any(gang.living and not gang.is_current(spec) for gang in rolled)
    goes_on = any(
        pod.is_surge and pod.replica >= spec.replicas and not pod.is_deleting for pod in seen.pods
    )
    behind = sum(
        not (gang.is_complete and gang.is_current(spec) and gang.index in healthy)
        for gang in rolled
    )
    return min(strategy.max_surge, behind) if begins or goes_on else 0
