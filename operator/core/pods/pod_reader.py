"""Reads pods: objects as the API server has them become plain values, which are all that is kept of them. Pure."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from rollout_operator.api import names
from rollout_operator.api.objects import Obj
from rollout_operator.api.revision import is_current_revision
from rollout_operator.api.spec import RolloutReplicaSpec
from rollout_operator.api.spec_colocation import DEVICES_CLAIM_NAME
from rollout_operator.core.observed_pool import Pod
from rollout_operator.core.trainer_pods import RecordedPlacement

from .pod_trouble import (
    container_statuses,
    describe_startup_wait,
    describe_trouble,
    failed_container_log,
    is_booting,
    is_gated,
    is_unschedulable,
    memory_limits,
    parse_timestamp,
    unscheduled_since,
)

MAX_RESTARTS = 1_000_000


class Controller(NamedTuple):
    """The object that an owner reference names as the controller; a pod has one at most."""

    kind: str
    name: str
    uid: str


_shared_controller = lru_cache(maxsize=16_384)(Controller)
"""All pods of a pool have the same one."""


def _find_controller(obj: Obj) -> Controller | None:
    for ref in obj["metadata"].get("ownerReferences") or ():
        if ref.get("controller"):
            return _shared_controller(ref.get("kind", ""), ref.get("name", ""), ref["uid"])
    return None


@dataclass(frozen=True, slots=True)
class PodRecord:
    """All that is kept of a pod with our labels: what it is, and what shows whose it is."""

    name: str
    pod: Pod | None
    """None: its labels don't say of which replica it is."""
    controller: Controller | None
    operator_class: str | None
    account: str
    hostname: str | None
    subdomain: str | None


def read_pod(obj: Obj) -> PodRecord:
    """Return what is kept of a pod; strings that many pods share are kept once."""
    meta, spec = obj["metadata"], obj.get("spec") or {}
    hostname = spec.get("hostname")
    return PodRecord(
        name=meta["name"],
        pod=parse_pod(obj),
        controller=_find_controller(obj),
        operator_class=(meta.get("labels") or {}).get(names.LABEL_CLASS),
        account=sys.intern(spec.get("serviceAccountName") or "default"),
        hostname=meta["name"] if hostname == meta["name"] else hostname,
        subdomain=_shared(spec.get("subdomain")),
    )


def _shared(text: str | None) -> str | None:
    return None if text is None else sys.intern(text)


def parse_pod(obj: Obj) -> Pod | None:
    """Parse a labelled pod; None if its labels are not ours."""
    meta = obj["metadata"]
    labels: Mapping[str, str] = meta.get("labels") or {}
    notes: Mapping[str, str] = meta.get("annotations") or {}
    spec, status = obj.get("spec") or {}, obj.get("status") or {}
    numbers = _parse_numbers(labels, notes)
    if numbers is None:
        return None
    replica, rank, restarts = numbers
    if not meta["name"].endswith(f"-{replica}-{rank}"):
        return None  # somebody changed its labels
    wanted = names.worker_labels(labels.get(names.LABEL_POOL, ""), replica, rank)
    conditions = _read_conditions(spec, status)
    gate = conditions.get(names.GATE_SERVING, {})
    proven = conditions.get(names.CONDITION_PROVEN, {})
    reported = describe_trouble(status, {}, memory_limits(obj))
    phase, lingers = _worker_phase(status)
    ended_at = max(_container_end_times(status), default=None)
    # Of a pod that has not ended nobody asks, and each condition that the kubelet sets would be a change.
    is_silent_end = ended_at is None and phase in ("Failed", "Succeeded")
    return Pod(
        name=meta["name"],
        uid=meta["uid"],
        replica=replica,
        rank=rank,
        revision=sys.intern(labels.get(names.LABEL_REVISION, "")),
        phase=sys.intern(phase),
        lingers=lingers,
        mislabelled=not wanted.items() <= labels.items(),
        owned=_find_controller(obj) is not None,
        deletion_at=parse_timestamp(meta.get("deletionTimestamp")),
        grace=meta.get("deletionGracePeriodSeconds"),
        finalizers=tuple(meta.get("finalizers") or ()),
        started=has_container_run(status),
        ready=conditions.get("Ready", {}).get("status") == "True",
        gate=gate.get("status") == "True",
        gate_boot=parse_boot_id(gate.get("message", "")),
        own_grace=spec.get("terminationGracePeriodSeconds"),
        gate_since=parse_timestamp(gate.get("lastTransitionTime")),
        proven_since=parse_timestamp(proven.get("lastTransitionTime")),
        ip=status.get("podIP"),
        node=_shared(spec.get("nodeName")),
        restarts=restarts,
        retry=sys.intern(notes.get(names.ANNOTATION_RETRY, "")),
        is_surge=names.ANNOTATION_SURGE in notes,
        followed=_has_followed_gang(status),
        finished_at=ended_at,
        last_known_at=_last_known_time(meta, status) if is_silent_end else 0.0,
        trouble=reported or describe_trouble(status, conditions),
        lacks_node=not reported and is_unschedulable(conditions),
        last_log=failed_container_log(status),
        waits_on=describe_startup_wait(obj, conditions),
        is_gated=is_gated(conditions),
        unscheduled_since=unscheduled_since(conditions),
        is_booting=is_booting(status),
        colocated=_is_colocated(obj),
        taken=_recorded_placement(notes),
    )


def _read_conditions(spec: Obj, status: Obj) -> dict[str, Obj]:
    """Conditions of a pod, by type."""
    conditions = {c["type"]: c for c in status.get("conditions") or ()}
    if spec.get("nodeName"):
        # A scheduler that could not bind an earlier pod of this name may write its failure here, by name.
        conditions.pop("PodScheduled", None)
    return conditions


def _parse_numbers(
    labels: Mapping[str, str], notes: Mapping[str, str]
) -> tuple[int, int, int] | None:
    """Replica, rank and restarts of a pod, if labels and annotations have them."""
    try:
        replica, rank = int(labels[names.LABEL_REPLICA]), int(labels[names.LABEL_RANK])
        restarts = int(notes.get(names.ANNOTATION_RESTARTS, "0"))
    except (KeyError, ValueError):
        return None
    # Any user who may patch pods can write any number there: status must hold it, and greater ones.
    return replica, rank, min(max(0, restarts), MAX_RESTARTS)


def _worker_phase(status: Obj) -> tuple[str, bool]:
    """The pod's phase, and whether other containers outlive its worker: then it is the worker's.

    An admission webhook may add containers, and the kubelet calls a pod Running until the last of them ends.
    """
    phase = status.get("phase", "Pending")
    end = _worker_end(status)
    if phase != "Running" or end is None:
        return phase, False
    return "Failed" if end.get("exitCode") else "Succeeded", True


def _worker_end(status: Obj) -> Obj | None:
    """How the worker's container ended, if it has."""
    for container in status.get("containerStatuses") or ():
        if container["name"] == names.WORKER_CONTAINER:
            end: Obj | None = (container.get("state") or {}).get("terminated")
            return end
    return None


def _is_colocated(obj: Obj) -> bool:
    """Its spec says so, which can't change; annotations can."""
    claims = (obj.get("spec") or {}).get("resourceClaims") or ()
    return any(claim["name"] == DEVICES_CLAIM_NAME for claim in claims)


def _recorded_placement(notes: Mapping[str, str]) -> RecordedPlacement | None:
    try:
        return RecordedPlacement(
            trainer=notes[names.ANNOTATION_TRAINER],
            claim_uid=notes[names.ANNOTATION_CLAIM],
            devices=tuple(notes[names.ANNOTATION_DEVICES].split(",")),
        )
    except KeyError:
        return None


BOOT_PREFIX = "boot "


def parse_boot_id(message: str) -> str | None:
    """The boot id that a gate's message names."""
    head, found, rest = message.partition(BOOT_PREFIX)
    return rest.split(":")[0].strip() if found and not head else None


def _container_end_times(status: Obj) -> list[float]:
    """When containers ended; an init container that fails ends its pod, too."""
    states = (
        container.get(part) or {}
        for container in container_statuses(status)
        for part in ("state", "lastState")
    )
    ends = (parse_timestamp((state.get("terminated") or {}).get("finishedAt")) for state in states)
    return [end for end in ends if end]


def _has_followed_gang(status: Obj) -> bool:
    """Whether the worker says by its exit status that it gave its gang up."""
    return (_worker_end(status) or {}).get("exitCode") == names.GANG_EXIT_CODE


def has_container_run(status: Obj) -> bool:
    """Return whether a container has run, init containers aside."""
    states = (
        container.get(part) or {}
        for container in status.get("containerStatuses") or ()
        for part in ("state", "lastState")
    )
    runs = (state.get("terminated") or state.get("running") or {} for state in states)
    return any(run.get("startedAt") for run in runs)


def _last_known_time(meta: Obj, status: Obj) -> float:
    """Latest time of a pod that a container need not have run for: the kubelet may refuse it."""
    changes = (
        condition.get("lastTransitionTime")
        for condition in status.get("conditions") or ()
        if condition["type"]
        not in (names.GATE_SERVING, names.CONDITION_PROVEN)  # these are written by us
    )
    moments = (meta.get("creationTimestamp"), status.get("startTime"), *changes)
    return max((found for moment in moments if (found := parse_timestamp(moment))), default=0.0)


def is_leftover(obj: Obj, pool: str, owner_uid: str) -> bool:
    """Whether an object is left of a deleted RolloutReplica of this name: it will be collected."""
    return _is_former(_find_controller(obj), pool, owner_uid)


def _is_former(controller: Controller | None, pool: str, owner_uid: str) -> bool:
    if controller is None or controller.uid == owner_uid:
        return False
    return (controller.kind, controller.name) == (names.KIND, pool)


class PoolPods(NamedTuple):
    """The pods with a pool's labels, by whose they are."""

    ours: tuple[Pod, ...]
    """Our object controls them."""
    predecessors: tuple[Pod, ...]
    """Those of a deleted object of its name."""
    strangers: tuple[str, ...]
    """A sentence on each that looks like ours and is not."""


def sort_pods(
    records: Iterable[PodRecord],
    pool: str,
    owner_uid: str,
    spec: RolloutReplicaSpec | None = None,
) -> PoolPods:
    """Tell the pods with a pool's labels apart.

    A pod of another owner is none of these; it shows when its name is taken. Without a spec no service account counts.
    """
    strangers: list[str] = []
    ours: list[Pod] = []
    predecessors: list[Pod] = []
    for record in records:
        pod, controller = record.pod, record.controller
        if pod is None or controller is None:
            continue
        if controller.uid == owner_uid:
            if spec is not None and spec.operator_class not in (None, record.operator_class):
                pod = replace(pod, mislabelled=True)  # one made by an older operator has no label
            why = _foreign_reason(record, pod, pool, spec)
            strangers += [why] if why else []
            ours += [] if why else [pod]
        elif _is_former(controller, pool, owner_uid):
            predecessors.append(pod)
    return PoolPods(tuple(ours), tuple(predecessors), tuple(strangers))


def _foreign_reason(
    record: PodRecord, pod: Pod, pool: str, spec: RolloutReplicaSpec | None
) -> str | None:
    name = names.pod_name(pool, pod.replica, pod.rank)
    account = None if spec is None else spec.service_account_name
    current = spec is not None and is_current_revision(pod.revision, spec)
    return foreign_pod_reason(record, name, names.heads_service(pool), account, current=current)


def foreign_pod_reason(
    found: PodRecord, name: str, subdomain: str, account: str | None, *, current: bool
) -> str | None:
    """Return why a pod is not ours although its labels and its controller say so; None: it is.

    Any user may patch these, but a pod's name and most of its spec can't change. Its account is the
    pool's, or was when it was made: then it is of an older revision (not the `current` one), and has the
    host name that the operator gives. No `account`: it is not known, and not looked at.
    """
    older = not current and (found.hostname, found.subdomain) == (name, subdomain)
    if found.name != name:
        what = f"is not called {name!r}"
    elif account is None or found.account == account or older:
        return None
    else:
        what = f"runs under service account {found.account!r}, not {account!r}"
    return (
        f"{found.name}: it has the labels and the owner reference of this pool's pods, but "
        f"{what}, so it gets no calls: delete it, or take both off it"
    )
