"""One content for one identity, in the whole pool: which bytes heads must have, and which can't.

The hash that the pool is bound to is stored with the decision to commit (`lastUpdate.rootHash`)
and with what is committed. Before that it is what most heads have staged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from rollout_operator.api.spec import RolloutReplicaSpec
from rollout_operator.api.spec_weights import InFlightSpec
from rollout_operator.core.replica_heads import ReplicaHead, WeightsVersion


def bind_root_hash(version: WeightsVersion, heads: Mapping[str, ReplicaHead]) -> WeightsVersion:
    """Return the version with the root hash that its identity has in this pool.

    That is the known one; else that of a replica that serves it; else the one that most have staged,
    where the lowest replica decides a tie; None while no replica has it.
    """
    if version.root_hash is not None:
        return version
    found = serving_hash(version, heads)
    if found is None:
        ordered = sorted(heads.values(), key=lambda h: h.pod.replica)
        staged = [each for h in ordered if (each := h.staged_hash(version))]
        found = Counter(staged).most_common(1)[0][0] if staged else None
    return replace(version, root_hash=found)


def serving_hash(version: WeightsVersion, heads: Mapping[str, ReplicaHead]) -> str | None:
    """Root hash of these weights as the lowest replica that has them active computed it."""
    for head in sorted(heads.values(), key=lambda h: h.pod.replica):
        state = head.worker.state
        active = state.weights.active if state else None
        if active and active.root_hash and active.identity == version.identity:
            return active.root_hash
    return None


def unsupported_by_pool(
    spec: RolloutReplicaSpec, heads: Mapping[str, ReplicaHead], version: WeightsVersion
) -> str | None:
    """What `spec.weights.inFlight` asks that some head's engine can't do; None if all can."""
    behind = (h for h in heads.values() if not h.has_at_least(version.identity))
    found = (unsupported_by_head(h, spec.weights.in_flight) for h in behind)
    return min((text for text in found if text), default=None)


def unsupported_by_head(head: ReplicaHead, wanted: InFlightSpec) -> str | None:
    """What of this a head's engine can't do, with the fix; None if all, or if it is not known."""
    state = head.worker.state
    if state is None or not state.in_flight_policies:
        return None
    able, where = state.in_flight_policies, f"in {head.pod.name}"
    prefix, engine = "spec.weights.inFlight", f"engine {state.engine} can't do"
    if wanted.policy not in able:
        fix = f"use one of {', '.join(able)}"
        return f"{prefix}.policy: {engine} {wanted.policy} {where}: {fix}"
    # Only under these policies may requests still run at the deadline.
    keeps = wanted.on_deadline == "Keep" and wanted.policy in ("Drain", "Pin")
    if keeps and "Keep" not in able:
        return f"{prefix}.onDeadline: {engine} Keep {where}: use Abort"
    return None
