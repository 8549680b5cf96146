"""Whether a head is in the data Service: its readiness gate, bound to the process that earned it. Pure."""

from __future__ import annotations

from rollout_operator.api.spec import RolloutReplicaSpec, State

from .heads import Head
from .plan import SetGate, Verb
from .updates.weights_plan import WeightsPlan


def gate_change(
    spec: RolloutReplicaSpec,
    weights: WeightsPlan,
    head: Head,
    now: float,
    *,
    leaving: bool,
    unfit: str | None = None,
) -> SetGate | None:
    """Return the change of the readiness gate, if one is due; `unfit`: why it can't serve."""
    pod, state = head.pod, head.worker.state
    active = spec.state is State.ACTIVE and not spec.suspend
    if leaving:
        return _off(head, "it is being deleted")
    if head.lost is not None:
        return _off(head, f"{head.lost.name} of its gang has ended")
    if not active:
        return _off(head, "the pool is not active") or _prove(spec, head, now)
    if pod.uid in weights.out_of_service:
        return _off(head, "it failed to commit the weights that the others serve")
    if unfit is not None:
        return _off(head, unfit)
    if state is None or Verb.COMMIT in head.worker.running:
        return None  # silence proves nothing, and a commit flips no gate
    if not (state.serving and head.at_least(weights.committed.identity)):
        return _off(head, f"the worker is {state.lifecycle} and not serving")
    if pod.gate and pod.gate_boot == state.boot_id:
        return None
    proven = now if pod.proven_since is None else pod.proven_since
    return SetGate(pod.name, pod.uid, True, state.boot_id, "Serving", proven)


def _prove(spec: RolloutReplicaSpec, head: Head, now: float) -> SetGate | None:
    """Note that a worker has come to rest that has never served."""
    pod, state = head.pod, head.worker.state
    if spec.suspend or pod.proven_since is not None:
        return None
    if state is None or state.lifecycle != spec.state.value:
        return None
    reason = f"the pool is {state.lifecycle}"
    return SetGate(pod.name, pod.uid, False, state.boot_id, reason, now)


def _off(head: Head, reason: str) -> SetGate | None:
    pod = head.pod
    if not pod.gate:
        return None
    return SetGate(pod.name, pod.uid, False, head.boot or "", reason, pod.proven_since)
