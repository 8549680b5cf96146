"""What a RolloutReplica reports about its epoch, its weights and its state. Pure."""

from __future__ import annotations

from typing import Any

from rollout_client.errors import EpochLost, PublishFailed, StateTaken, SteeringFailed, Superseded
from rollout_common.kube.access import Obj
from rollout_common.wire import WeightsId, WeightsSource

from .steering_protocol import PoolState, Published, PublishProgress

ANNOTATION_EPOCH = "rollout.dev/trainer-epoch"

MAX_FAILED_ATTEMPTS = 7
"""Attempts to stage after which the trainer gets an error. With the operator's back-off they take half a
minute: by then a network volume shows every file, and the bytes at a path never change."""


def publish_progress(
    pool: Obj, identity: WeightsId, generation: int, seconds: float
) -> Published | PublishProgress:
    """Return the progress of an update that was asked for `seconds` ago, or its result.

    `generation` is of the spec that asks for it: an older status does not describe it.

    Raises:
        PublishFailed: The operator reports it, or a worker refused the bytes repeatedly.
        Superseded: Newer weights were committed, or are on their way.
    """
    status = pool.get("status") or {}
    weights = status.get("weights") or {}
    counts = int(weights.get("stagedReplicas") or 0), wanted_replicas(pool)
    if _observed_generation(status) < generation:
        why = "waiting for the operator to see the new target"
        return PublishProgress("Staging", *counts, why)
    last, committed = weights.get("lastUpdate") or {}, weights.get("committed") or {}
    phase, message = str(last.get("phase", "")), str(last.get("message", ""))
    ours = bool(last) and _parse_identity(last) == identity
    if committed and _parse_identity(committed) == identity:
        return Published(
            identity=identity,
            root_hash=committed.get("rootHash"),
            replicas=int(status.get("readyReplicas", 0)),
            seconds=seconds,
            pause_seconds=None,
            message=f"weights {identity} are committed" + (f": {message}" if ours else ""),
        )
    newer = [each for each in (committed, last) if each and _parse_identity(each) > identity]
    if newer:
        raise Superseded(f"weights {_parse_identity(newer[0])} took the place of {identity}")
    if ours and phase == "Superseded":
        raise Superseded(message or f"weights {identity} were given up")
    if ours and phase == "Failed":
        raise PublishFailed(message or f"weights {identity} failed")
    if ours and phase == "Staging" and int(last.get("attempts") or 0) >= MAX_FAILED_ATTEMPTS:
        raise PublishFailed(
            f"{message}; tried {last['attempts']} times. Publish sound weights as a higher version; "
            "until then the operator goes on trying"
        )
    if not ours:
        why = f"waiting for the update before it: {message}"
        return PublishProgress("Staging", *counts, why)
    return PublishProgress(phase, *counts, message or str(status.get("message", "")))


def highest_epoch(pool: Obj) -> int:
    """Return the highest epoch that any trainer has taken or used."""
    annotations = pool["metadata"].get("annotations") or {}
    taken = str(annotations.get(ANNOTATION_EPOCH, "0"))
    weights = (pool.get("status") or {}).get("weights") or {}
    used = [
        (pool["spec"].get("weights") or {}).get("target"),
        weights.get("committed"),
        weights.get("lastUpdate"),
    ]
    return max(int(taken) if taken.isdigit() else 0, *(int(u["epoch"]) for u in used if u), 0)


def check_epoch(pool: Obj, epoch: int) -> None:
    """Stop a trainer that was shut out.

    Raises:
        EpochLost: Another trainer has the pool.
    """
    held = highest_epoch(pool)
    if held > epoch:
        raise EpochLost(f"a trainer with epoch {held} has the pool, this one holds {epoch}")


def has_target(pool: Obj, identity: WeightsId, source: WeightsSource) -> bool:
    """Whether the spec asks for these weights already."""
    target = (pool["spec"].get("weights") or {}).get("target")
    if not target or _parse_identity(target) != identity:
        return False
    found = {k: v for k, v in (target.get("source") or {}).items() if v is not None}
    return found == source.model_dump(exclude_none=True)


def wanted_replicas(pool: Obj) -> int:
    """Return how many replicas should run; in mode Hybrid only the status has the number."""
    if pool["spec"].get("mode") == "Hybrid":
        return int((pool.get("status") or {}).get("desiredReplicas", 1))
    return int(pool["spec"].get("replicas", 1))


def wanted_state(pool: Obj) -> PoolState:
    """Return the state that the spec asks for."""
    state: PoolState = pool["spec"].get("state") or "Active"
    return state


def has_reached(pool: Obj, state: PoolState, generation: int) -> bool:
    """Whether every worker has reached a state, by the operator's report.

    Raises:
        StateTaken: Somebody else changed the state.
        SteeringFailed: Somebody suspended the pool.
    """
    wanted = wanted_state(pool)
    if wanted != state:
        raise StateTaken(
            f"somebody set spec.state to {wanted} while it should become {state}", wanted=wanted
        )
    if pool["spec"].get("suspend"):
        raise SteeringFailed(f"the pool is suspended: it can't become {state}")
    status = pool.get("status") or {}
    last = status.get("lastTransition") or {}
    done = last.get("to") == state and last.get("completedAt")
    return bool(_observed_generation(status) >= generation and done)


def _parse_identity(value: Any) -> WeightsId:
    return WeightsId(epoch=value["epoch"], version=value["version"])


def _observed_generation(status: Obj) -> int:
    return int(status.get("observedGeneration") or 0)
