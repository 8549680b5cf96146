"""Turn what the user wants and what is observed into a plan. Pure: no clock, API or logging."""

from __future__ import annotations

from rollout_operator.api.spec import RolloutReplicaSpec, State
from rollout_operator.api.status import RolloutReplicaStatus

from .gangs import gangs_of, plan_pods
from .heads import Head
from .members import MemberPlanner
from .plan import CallWorker, Plan, SetGate, Wait
from .report import build_status
from .updates.decide import plan_weights
from .updates.weights_plan import target_of
from .view import View
from .world import Observed


def decide(
    spec: RolloutReplicaSpec, seen: Observed, stored: RolloutReplicaStatus, now: float
) -> Plan:
    """Return the pass's plan.

    Args:
        spec: what the user wants.
        seen: the world.
        stored: the status as read from the API server; the one memory that outlives a crash.
        now: wall clock, seconds since the epoch.
    """
    wait = Wait()
    heads = _heads(spec, seen)
    weights = plan_weights(spec, seen, stored.weights, heads, now, wait)
    pods = plan_pods(spec, seen, now, _healthy(spec, heads), wait)
    leaving = {d.uid for d in pods.delete}
    planner = MemberPlanner(spec, seen, weights, now, wait)
    calls: list[CallWorker] = []
    gates: list[SetGate] = []
    for head in heads.values():
        gate = planner.gate(head, head.pod.uid in leaving)
        gates += [gate] if gate else []
        if head.pod.uid not in leaving:
            calls += planner.calls(head)
    gates += _gates_of_leavers(seen, heads, leaving)
    view = View(
        spec,
        seen,
        gangs_of(spec, seen),
        heads,
        pods,
        weights,
        target_of(spec).identity,
        was_at_rest=_was_at_rest(spec, stored),
    )
    status = build_status(view, stored, now)
    return Plan(
        status=status,
        create=tuple(pods.create),
        delete=tuple(pods.delete),
        gates=tuple(gates),
        calls=tuple(calls),
        notes=tuple(weights.notes),
        restarts=pods.restarts,
        barrier=weights.barrier,
        requeue=wait.seconds,
        sentence=status.message,
    )


def _heads(spec: RolloutReplicaSpec, seen: Observed) -> dict[str, Head]:
    """Living heads of wanted replicas by uid, lowest replica first."""
    if spec.suspend:
        return {}
    found = (p for p in seen.pods if p.rank == 0 and not p.deleting and p.owned)
    wanted = sorted((p for p in found if p.replica < spec.replicas), key=lambda p: p.replica)
    return {pod.uid: Head(pod, seen.worker(pod)) for pod in wanted}


def _was_at_rest(spec: RolloutReplicaSpec, stored: RolloutReplicaStatus) -> bool:
    last = stored.last_transition
    return last is not None and last.to == spec.state.value and last.completed_at is not None


def _healthy(spec: RolloutReplicaSpec, heads: dict[str, Head]) -> frozenset[int]:
    """Replicas whose head does what spec asks for."""
    wanted = spec.state
    return frozenset(
        h.pod.replica
        for h in heads.values()
        if (
            h.pod.ready
            if wanted is State.ACTIVE
            else h.worker.state is not None and h.worker.state.lifecycle == wanted.value
        )
    )


def _gates_of_leavers(seen: Observed, heads: dict[str, Head], leaving: set[str]) -> list[SetGate]:
    """Take surplus heads out of the Service before they are deleted."""
    return [
        SetGate(p.name, p.uid, False, p.gate_boot or "", "it is being deleted", p.proven_since)
        for p in seen.pods
        if p.uid in leaving and p.uid not in heads and p.gate and not p.deleting
    ]
