"""Whether a head is in the data Service: its readiness gate, bound to the process that earned it. Pure."""

from __future__ import annotations

from rollout_operator.api.spec import DesiredState, RolloutReplicaSpec

from .pass_plan import ControlVerb, SetGate
from .replica_heads import ReplicaHead
from .updates.weights_plan import WeightsPlan


def gate_change(
    spec: RolloutReplicaSpec,
    weights: WeightsPlan,
    head: ReplicaHead,
    now: float,
    *,
    leaving: bool,
    unfit: str | None = None,
) -> SetGate | None:
    """Return the change of the readiness gate, if one is due; `unfit`: why it can't serve."""
    pod, state = head.pod, head.worker.state
    active = spec.state is DesiredState.ACTIVE and not spec.suspend
    if leaving:
        return _close_gate(head, "it is being deleted")
    if head.lost_member is not None:
        return _close_gate(head, f"{head.lost_member.name} of its gang has ended")
    if not active:
        return _close_gate(head, "the pool is not active") or _mark_proven(spec, head, now)
    if pod.uid in weights.out_of_service:
        return _close_gate(head, "it failed to commit the weights that the others serve")
    if unfit is not None:
        return _close_gate(head, unfit)
    if state is None or ControlVerb.COMMIT in head.worker.running:
        return None  # silence proves nothing, and a commit flips no gate
    if not (state.serving and head.has_at_least(weights.committed.identity)):
        return _close_gate(head, f"the worker is {state.lifecycle} and not serving")
    if pod.gate and pod.gate_boot == state.boot_id:
        return None
    proven = now if pod.proven_since is None else pod.proven_since
    return SetGate(pod.name, pod.uid, True, state.boot_id, "Serving", proven)


def _mark_proven(spec: RolloutReplicaSpec, head: ReplicaHead, now: float) -> SetGate | None:
    """Note that a worker has come to rest that has never served."""
    pod, state = head.pod, head.worker.state
    if spec.suspend or pod.proven_since is not None:
        return None
    if state is None or state.lifecycle != spec.state.value:
        return None
    reason = f"the pool is {state.lifecycle}"
    return SetGate(pod.name, pod.uid, False, state.boot_id, reason, now)


def _close_gate(head: ReplicaHead, reason: str) -> SetGate | None:
    pod = head.pod
    if not pod.gate:
        return None
    return SetGate(pod.name, pod.uid, False, head.boot_id or "", reason, pod.proven_since)
