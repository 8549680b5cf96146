"""Replicas that don't answer, that fail again and again, or that find no node. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from rollout_operator.api.spec import PoolMode, RolloutReplicaSpec
from rollout_operator.api.status import LastError
from rollout_operator.core.observed_pool import ObservedPool, Pod
from rollout_operator.core.pass_plan import RequeueAfter
from rollout_operator.core.replica_heads import ReplicaHead
from rollout_operator.core.settings import (
    FAILURE_RESET_SECONDS,
    UNREACHABLE_AFTER_SECONDS,
    UNSCHEDULABLE_AFTER_SECONDS,
)

from .pod_planning import PodGang, PodPlan, consecutive_failures, failure_message_prefix

CRASH_LOOP_FAILURES = 2
"""Failures in a row from which on a replica is in a crash loop."""


@dataclass(frozen=True, slots=True)
class ReplicaTroubles:
    """What is wrong with single replicas, in sentences."""

    unreachable: Mapping[int, str] = field(default_factory=dict)
    looping: Mapping[int, str] = field(default_factory=dict)
    unscheduled: Mapping[str, str] = field(default_factory=dict)
    """By the name of the pod."""
    in_a_row: int = 0
    """Most failures in a row of a replica that has not proven itself since."""


def find_replica_troubles(
    spec: RolloutReplicaSpec,
    seen: ObservedPool,
    gangs: Mapping[int, PodGang],
    running: Collection[int],
    heads: Iterable[ReplicaHead],
    pods: PodPlan,
    errors: Iterable[LastError],
    now: float,
    wait: RequeueAfter,
) -> ReplicaTroubles:
    """Look at each replica that must have pods; `errors` are those in status, the causes of earlier failures."""
    if spec.suspend:
        return ReplicaTroubles()
    counts = {
        gang.index: _failures_in_a_row(spec, seen, gang, pods, now, wait)
        for gang in gangs.values()
        if gang.index in running and spec.mode is not PoolMode.HYBRID
    }
    known = list(errors)
    looping = {
        index: pods.backing_off.get(index) or _crash_loop_message(index, count, pods, known)
        for index, count in counts.items()
        if count >= CRASH_LOOP_FAILURES
    }
    silent = {head.pod.replica: _unreachable_message(spec, head, wait) for head in heads}
    wanted = [pod for pod in seen.pods if pod.replica in running]
    homeless = {pod.name: _unschedulable_message(spec, pod, now, wait) for pod in wanted}
    return ReplicaTroubles(
        unreachable={replica: text for replica, text in silent.items() if text},
        looping=looping,
        unscheduled={name: text for name, text in homeless.items() if text},
        in_a_row=max(counts.values(), default=0),
    )


def _failures_in_a_row(
    spec: RolloutReplicaSpec,
    seen: ObservedPool,
    gang: PodGang,
    plan: PodPlan,
    now: float,
    wait: RequeueAfter,
) -> int:
    """Failures in a row of a replica: of pods that have ended, of those to come, or of those there."""
    if gang.index in plan.in_a_row:
        return plan.in_a_row[gang.index]
    if not gang.living:
        return seen.restarts_of.get(gang.index, 0)
    pod = gang.living[0]
    count = consecutive_failures(spec, seen, gang.living, pod, now)
    proven = [p.proven_since for p in gang.living if p.proven_since is not None]
    if count and proven:
        wait.at_most(min(proven) + FAILURE_RESET_SECONDS - now)
    return count


def _crash_loop_message(index: int, count: int, plan: PodPlan, errors: Iterable[LastError]) -> str:
    begin = failure_message_prefix(index)
    messages = (plan.failed.get(index, ""), *(error.message for error in errors))
    cause = next((m.removeprefix(begin) for m in messages if m.startswith(begin)), "")
    why = f"; last cause: {cause}" if cause else "; status.lastErrors has the causes"
    minutes = f"{FAILURE_RESET_SECONDS / 60:g} minutes"
    return f"replica {index} failed {count} times in a row and has not yet done its work for {minutes}{why}"


def _unreachable_message(
    spec: RolloutReplicaSpec, head: ReplicaHead, wait: RequeueAfter
) -> str | None:
    """Say that a control port has been silent for too long, and what to look at.

    A new process listens only after it has imported its libraries. In a pool's own pods the kubelet
    says when that is over; a trainer's pod may start its worker at any time.
    """
    worker = head.worker
    if head.is_finished or worker.silent_since is None:
        return None
    was_heard = head.boot_id is not None or head.pod.proven_since is not None
    if not was_heard and (spec.mode is PoolMode.HYBRID or head.pod.is_booting):
        return None
    left = UNREACHABLE_AFTER_SECONDS - worker.silent_seconds
    if left > 0:
        wait.at_most(left)
        return None
    if not head.is_silent:
        return None
    last = "its last answer was at" if worker.last is not None else "it has been asked since"
    at = datetime.fromtimestamp(worker.silent_since, UTC).strftime("%Y-%m-%d %H:%M:%S")
    where = f" on node {head.pod.node!r}" if head.pod.node else ""
    lost = " (the pod is not Ready: see whether its node is)" if not head.pod.ready else ""
    error = (worker.error or "").lower()
    found = (fix for parts, fix in UNREACHABLE_ADVICE if any(part in error for part in parts))
    return (
        f"the control port of {head.pod.name}{where} has not answered for more than "
        f"{UNREACHABLE_AFTER_SECONDS:g} s, {last} {at} UTC{lost}: {worker.error}; {next(found)}"
    )


UNREACHABLE_ADVICE = (
    (
        ("401 ",),
        "check that the worker runs with --auth kubernetes, and the API server's audiences",
    ),
    (
        ("403 ", "503 ", "auth-unavailable"),
        "the worker's service account needs to create tokenreviews and localsubjectaccessreviews: see the chart's "
        "workers.namespaces",
    ),
    (
        ("wrong version number",),
        "the pod speaks plain HTTP; it was made before TLS was set for control ports: delete it",
    ),
    (
        ("certificate", "ssl", "tls"),
        "check --control-ca-file of the operator and the certificate that workers are given",
    ),
    (
        ("refused",),
        "nothing listens on port 8001: look at the pod's log, and for a service mesh in its way",
    ),
    (
        ("no answer",),
        "its process hangs, or a service mesh accepts connections for it: read the pod's log, then delete the pod unless it has the "
        "only copy of pushed weights",
    ),
    (
        ("",),
        "check that a NetworkPolicy or service mesh lets the operator reach port 8001, and that the pod's node is "
        "Ready",
    ),
)
"""What to check if the error has one of these parts in it; every error has the empty one."""


def _unschedulable_message(
    spec: RolloutReplicaSpec, pod: Pod, now: float, wait: RequeueAfter
) -> str | None:
    if pod.unscheduled_since is None or pod.is_deleting or pod.is_finished:
        return None
    left = pod.unscheduled_since + UNSCHEDULABLE_AFTER_SECONDS - now
    if left > 0:
        wait.at_most(left)
        return None
    if pod.is_gated:
        queue = spec.scheduling.queue
        where = f"queue {queue!r}" if queue else "a queue"
        return f"{pod.name}: {pod.trouble}; it may wait in {where}: see its Workload, or remove the gates"
    if "persistentvolumeclaim" in (pod.trouble or "").lower():
        return (
            f"{pod.name}: {pod.trouble}; create the claim, or see why it is not bound: "
            "kubectl describe pvc"
        )
    device = spec.accelerator.resource if spec.accelerator else None
    nodes = (
        f"nodes with free {device} (spec.accelerator.resource)" if device else "a node with room"
    )
    return (
        f"{pod.name}: {pod.trouble}; provide {nodes}, lower spec.replicas, or change what "
        "spec.resources, spec.podTemplate.nodeSelector and tolerations ask for"
    )
