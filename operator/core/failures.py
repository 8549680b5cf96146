"""How often a replica has failed in a row, and how long its replacement waits for that. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from rollout_operator.api.revision import is_current_revision
from rollout_operator.api.spec import RolloutReplicaSpec

from .observed_pool import ObservedPool, Pod
from .settings import FAILURE_RESET_SECONDS


def consecutive_failures(
    spec: RolloutReplicaSpec,
    seen: ObservedPool,
    gang: Iterable[Pod],
    pod: Pod,
    at: float | None = None,
) -> int:
    """Failures in a row of a replica, the pods `gang`, before its `pod`; 0 after a reset.

    What the head has proven counts for all its ranks.

    Args:
        spec: the pool's.
        seen: the world.
        gang: the replica's pods.
        pod: the one that has failed, or any.
        at: now, if the pod runs, in seconds since the epoch; None: when it ended.
    """
    proven = [p.proven_since for p in gang if p.proven_since is not None]
    moment = pod.ended_at if at is None else at
    if proven and moment - min(proven) >= FAILURE_RESET_SECONDS:
        return 0
    if not is_current_revision(pod.revision, spec) or pod.retry != seen.retry:
        return 0
    return pod.restarts


def backoff_seconds(spec: RolloutReplicaSpec, count: int) -> float:
    """Seconds between the `count`-th failure in a row and its replacement; none after the first."""
    policy = spec.restart_policy
    if count <= 1:
        return 0.0
    doubled: float = policy.base_delay_seconds * 2.0 ** min(count - 2, 30)
    return min(doubled, policy.max_delay_seconds)


def failure_message_prefix(index: int) -> str:
    """Return how the sentence begins that tells of a replica's failure; its cause follows."""
    return f"replica {index} failed and restarts: "
