"""Turns what the user wants and what is observed into a plan: the entry of this package. Pure."""

from __future__ import annotations

from dataclasses import replace

from rollout_common.wire import WorkerState
from rollout_operator.api.spec import DesiredState, PoolMode, RolloutReplicaSpec
from rollout_operator.api.status import RolloutReplicaStatus
from rollout_operator.core.replicas.disruption import plan_budget
from rollout_operator.core.replicas.head_planner import HeadPlanner
from rollout_operator.core.replicas.hybrid import plan_hybrid_pods, with_member_count
from rollout_operator.core.replicas.pod_planning import group_gangs, plan_pods
from rollout_operator.core.replicas.replica_choice import ReplicaChoice, choose_wanted_replicas
from rollout_operator.core.replicas.replica_troubles import find_replica_troubles
from rollout_operator.core.replicas.surge import CopyMove, choose_surge, find_copy_move

from .findings import PoolView
from .observed_pool import UNKNOWN_WORKER, ObservedPool, Pod, is_loaded
from .pass_plan import ControlVerb, EventNote, PassPlan, RequeueAfter, SetGate
from .replica_heads import ReplicaHead, WeightsVersion
from .settings import KUBELET_READY_SECONDS
from .status_report import build_status
from .updates.pushed_copies import is_copy_available
from .updates.update_planning import plan_weights
from .updates.weights_plan import (
    WeightsPlan,
    committed_version,
    committed_weights,
    target_version,
)

CONTROL_VERBS = (
    ControlVerb.REQUIRE,
    ControlVerb.PAUSE,
    ControlVerb.RESUME,
    ControlVerb.SLEEP,
    ControlVerb.WAKE,
)


def plan_pass(
    spec: RolloutReplicaSpec, seen: ObservedPool, stored: RolloutReplicaStatus, now: float
) -> PassPlan:
    """Return the pass's plan.

    `stored` is the status as read from the API server, the one memory that outlives a crash; `now` is the wall
    clock, in seconds since the epoch.
    """
    wait = RequeueAfter()
    spec = with_member_count(spec, seen)
    living = _living_heads(spec, seen)
    version = committed_version(committed_weights(stored.weights))
    healthy = _healthy_replicas(spec, living, version)
    choice, move = _choose_replicas(spec, seen, living, healthy, version)
    heads = {uid: head for uid, head in living.items() if head.pod.replica in choice.living}
    weights = plan_weights(spec, seen, stored.weights, heads, now, wait)
    if spec.mode is PoolMode.HYBRID:
        pods = plan_hybrid_pods(spec, seen)
    else:
        settling = _settling_replicas(spec, heads, weights, now, wait)
        pods = plan_pods(spec, seen, now, healthy, wait, settling, choice=choice)
    going = {d.uid for d in pods.delete}
    # A pod whose deletion the API server refuses stays: an update of weights would wait for it forever.
    leaving = going - seen.undeleted
    planner = HeadPlanner(spec, seen, weights, now, wait)
    gates, calls = _gates_to_close(seen, heads, going), []
    for uid, head in heads.items():
        gates += filter(None, [planner.plan_gate(head, uid in leaving)])
        calls += [] if uid in leaving else planner.plan_calls(head)
    gangs, errors = group_gangs(spec, seen, choice.running), stored.last_errors
    troubles = find_replica_troubles(
        spec, seen, gangs, choice.running, heads.values(), pods, errors, now, wait
    )
    target, at_rest = target_version(spec).identity, _was_at_rest(spec, stored)
    view = PoolView(
        spec, seen, gangs, heads, pods, weights, target, troubles, at_rest, choice, move
    )
    status = build_status(view, stored, now)
    failed = [EventNote("Warning", "ReplicaFailed", why) for why in pods.failed.values()]
    theirs = spec.mode is PoolMode.HYBRID
    return PassPlan(
        status=status,
        budget=None if theirs else plan_budget(spec, heads.values(), weights),
        seek=tuple(pods.seek),
        create=tuple(pods.create),
        delete=tuple(pods.delete),
        gates=tuple(gates),
        calls=tuple(calls),
        notes=(*failed, *weights.notes),
        restarts=pods.restarts,
        barrier=weights.barrier,
        replicas=choice.running,
        requeue=wait.seconds,
        unreachable=len(troubles.unreachable),
        in_a_row=troubles.in_a_row,
    )


def _living_heads(spec: RolloutReplicaSpec, seen: ObservedPool) -> dict[str, ReplicaHead]:
    """Living heads by uid, lowest replica first, also of replicas beyond the wanted ones; none of a suspended pool."""
    if spec.suspend:
        return {}
    theirs = spec.mode is PoolMode.HYBRID
    found = (p for p in seen.pods if p.rank == 0 and not p.is_deleting and (p.owned or theirs))
    members: dict[int, list[Pod]] = {}
    for pod in sorted(seen.pods, key=lambda p: p.rank):
        if pod.rank and pod.owned and not pod.is_deleting:
            members.setdefault(pod.replica, []).append(pod)
    heads = {}
    for pod in sorted(found, key=lambda p: p.replica):
        known = seen.workers.get(pod.uid, UNKNOWN_WORKER)
        head = ReplicaHead(pod, known, tuple(members.get(pod.replica, ())))
        # After a member has ended, the answers of its head mean nothing.
        heads[pod.uid] = replace(head, worker=UNKNOWN_WORKER) if head.lost_member else head
    return heads


def _choose_replicas(
    spec: RolloutReplicaSpec,
    seen: ObservedPool,
    living: dict[str, ReplicaHead],
    healthy: frozenset[int],
    committed: WeightsVersion,
) -> tuple[ReplicaChoice, CopyMove | None]:
    wanted = choose_wanted_replicas(spec, seen, living.values(), healthy, committed)
    move = find_copy_move(spec, seen, living.values(), committed, wanted)
    surge = choose_surge(spec, seen, wanted, healthy, move)
    return ReplicaChoice(wanted, surge, frozenset() if move is None else move.kept), move


def _was_at_rest(spec: RolloutReplicaSpec, stored: RolloutReplicaStatus) -> bool:
    last = stored.last_transition
    return last is not None and last.to == spec.state.value and last.completed_at is not None


def _healthy_replicas(
    spec: RolloutReplicaSpec, heads: dict[str, ReplicaHead], committed: WeightsVersion
) -> frozenset[int]:
    """Replicas whose head does what spec asks for, or would if no other caller held it."""
    # A head at rest that has yet to fetch pushed weights has no copy of them: if the others went because of it, none would.
    given = committed.is_pushed and is_copy_available(committed, heads)

    def works(head: ReplicaHead) -> bool:
        if spec.state is DesiredState.ACTIVE and head.pod.ready and not head.is_finished:
            return True
        if head.worker.state is None or (given and not head.has_staged(committed)):
            return False
        return _is_at_rest(spec, head.worker.state)

    return frozenset(h.pod.replica for h in heads.values() if works(h))


def _is_at_rest(spec: RolloutReplicaSpec, state: WorkerState) -> bool:
    """It is paused or asleep, as spec or the hold of another caller wants it."""
    reached = spec.state is not DesiredState.ACTIVE and state.lifecycle == spec.state.value
    return reached or (is_loaded(state) and state.held_by_others)


def _may_be_at_rest(spec: RolloutReplicaSpec, head: ReplicaHead) -> bool:
    """It is silent, and was at rest when it last answered: silence proves nothing.

    If this process has had no answer yet, only the pod says whether it ever did what was asked.
    """
    if head.worker.last is not None:
        return head.is_silent and _is_at_rest(spec, head.worker.last)
    proven = head.pod.proven_since is not None
    return spec.state is not DesiredState.ACTIVE and head.is_silent and proven


def _settling_replicas(
    spec: RolloutReplicaSpec,
    heads: dict[str, ReplicaHead],
    weights: WeightsPlan,
    now: float,
    wait: RequeueAfter,
) -> frozenset[int]:
    """Replicas on their way from state to state, or silent: nothing is known to be wrong."""

    def settles(head: ReplicaHead) -> bool:
        state, since = head.worker.state, head.pod.gate_since
        if state is None:
            return _may_be_at_rest(spec, head)
        if not head.worker.is_loaded or not head.has_at_least(weights.committed.identity):
            return False
        if any(head.worker.failures.get(verb) for verb in CONTROL_VERBS):
            return False
        if not (state.serving and head.pod.gate):
            return True
        # All that is left is for the kubelet to do.
        left = 0.0 if since is None else since + KUBELET_READY_SECONDS - now
        if left > KUBELET_READY_SECONDS + 1:  # the clock was set back, perhaps by an hour
            left = 0.0
        if left > 0 and not head.pod.ready:
            wait.at_most(left)
        return left > 0

    return frozenset(h.pod.replica for h in heads.values() if settles(h))


def _gates_to_close(
    seen: ObservedPool, heads: dict[str, ReplicaHead], leaving: set[str]
) -> list[SetGate]:
    """Take surplus heads out of the Service before they are deleted."""
    return [
        SetGate(p.name, p.uid, False, p.gate_boot or "", "it is being deleted", p.proven_since)
        for p in seen.pods
        if p.uid in leaving and p.uid not in heads and p.gate and not p.is_deleting
    ]
