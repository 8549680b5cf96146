"""The members of a Hybrid pool: the trainer's own pods, read as other modes' pods are. Pure.

The operator creates and changes none of them. A container may end and start again in its pod: that
is another process of the same member, which begins fenced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from rollout_common.device_claims import natural_sort_key
from rollout_operator.api import names
from rollout_operator.api.objects import Obj
from rollout_operator.api.spec import PoolMode, RolloutReplicaSpec
from rollout_operator.core.observed_pool import ObservedPool, Pod
from rollout_operator.core.placement import foreign_pod_problems
from rollout_operator.core.pods.pod_reader import has_container_run
from rollout_operator.core.pods.pod_trouble import describe_trouble, memory_limits, parse_timestamp
from rollout_operator.core.replica_heads import ReplicaHead
from rollout_operator.core.services import EndpointGate
from rollout_operator.core.trainer_pods import may_be_trainer

from .pod_planning import PodPlan


@dataclass(frozen=True, slots=True)
class MemberCandidate:
    """A pod that the pool's `trainerSelector` selects, as yet without a number or a gate."""

    pod: Pod
    account: str
    """The service account that it runs under; it can't change."""


def parse_candidate(obj: Obj) -> MemberCandidate | None:
    """Read a pod; None if it is not a trainer's: it has ended, or a pool of ours has it."""
    meta, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    if not may_be_trainer(obj):
        return None
    conditions = {c["type"]: c for c in status.get("conditions") or ()}
    containers = _worker_containers(spec, status)
    pod = Pod(
        name=meta["name"],
        uid=meta["uid"],
        replica=0,
        rank=0,
        revision="",
        phase=status.get("phase", "Pending"),
        owned=False,
        deletion_at=parse_timestamp(meta.get("deletionTimestamp")),
        started=has_container_run(status),
        ready=conditions.get("Ready", {}).get("status") == "True",
        ip=status.get("podIP"),
        node=spec.get("nodeName"),
        restarts=sum(container.get("restartCount", 0) for container in containers),
        trouble=describe_trouble(status, conditions, memory_limits(obj)),
        ended=_has_worker_ended(containers),
    )
    return MemberCandidate(pod, spec.get("serviceAccountName") or "default")


def _worker_containers(spec: Obj, status: Obj) -> list[Obj]:
    """States of the containers that declare the control port; of all, if none does."""
    declared = {
        container["name"]
        for container in spec.get("containers") or ()
        if any(p.get("containerPort") == names.CONTROL_PORT for p in container.get("ports") or ())
    }
    states = status.get("containerStatuses") or ()
    return [state for state in states if not declared or state["name"] in declared]


def _has_worker_ended(containers: Iterable[Obj]) -> bool:
    """None of them runs, and one has run: the worker's last answer is of a process that is gone."""
    states = [container.get("state") or {} for container in containers]
    ended = (
        (container.get(part) or {}).get("terminated")
        for container in containers
        for part in ("state", "lastState")
    )
    return not any(state.get("running") for state in states) and any(ended)


def select_members(
    spec: RolloutReplicaSpec,
    candidates: Iterable[MemberCandidate],
    gates: Mapping[str, EndpointGate],
) -> tuple[Pod, ...]:
    """Return the pods as members, numbered by name.

    Only pods of the right service account are members, and get the operator's token. Anybody may label
    a pod that exists, but its account can't change.
    """
    own = (each.pod for each in candidates if each.account == spec.service_account_name)
    ordered = sorted(own, key=lambda pod: (natural_sort_key(pod.name), pod.name))

    def to_member(index: int, pod: Pod) -> Pod:
        gate = gates.get(pod.uid, EndpointGate())
        return replace(
            pod,
            replica=index,
            gate=gate.on,
            gate_boot=gate.boot,
            gate_since=gate.since,
            proven_since=gate.proven,
        )

    return tuple(to_member(index, pod) for index, pod in enumerate(ordered))


def foreign_pod_messages(
    spec: RolloutReplicaSpec, candidates: Iterable[MemberCandidate]
) -> tuple[str, ...]:
    """Return a sentence on each selected pod that is not a member, ordered by name."""
    wanted = spec.service_account_name
    return tuple(
        f"{each.pod.name}: it runs under service account {each.account!r}, so it is not a member and gets no "
        f"calls: give the trainer's pods {wanted!r}, set spec.serviceAccountName, or remove the labels of "
        "spec.colocation.trainerSelector from it"
        for each in sorted(candidates, key=lambda each: each.pod.name)
        if each.account != wanted
    )


def unfit_reason(head: ReplicaHead, *, others_answer: bool) -> str | None:
    """Why a member can't serve; in other modes the kubelet's probes show it.

    A silent member leaves if others answer; if none does, the fault may be the operator's own.
    """
    if head.is_finished or not head.pod.ready:
        return "its pod is not Ready"
    if head.pod.ip is None:
        return "it is not to be called"
    silent = head.worker.state is None and head.worker.error is not None
    return "it does not answer" if silent and others_answer else None


def with_member_count(spec: RolloutReplicaSpec, seen: ObservedPool) -> RolloutReplicaSpec:
    """Return the spec with as many replicas as there are members; at least one is wanted."""
    if spec.mode is not PoolMode.HYBRID:
        return spec
    return spec.model_copy(update={"replicas": max(1, len(seen.pods))})


def plan_hybrid_pods(spec: RolloutReplicaSpec, seen: ObservedPool) -> PodPlan:
    """Return the plan for the trainer's pods: the operator creates, deletes and replaces none."""
    plan = PodPlan(strangers=foreign_pod_problems(seen))
    if not seen.pods and spec.colocation is not None:
        selector = spec.colocation.trainer_selector.to_query()
        plan.waiting[0] = (
            f"waits for a pod that spec.colocation.trainerSelector selects: {selector}"
        )
    return plan
