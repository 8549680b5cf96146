"""A pool's two Services, and the EndpointSlices and gates of a Hybrid pool. Pure.

In the other modes Kubernetes makes the slices from the gate on each pod. The pods of a Hybrid pool
are the trainer's, so there a ready endpoint of the data Service is the gate itself, and an annotation
of its slice says for which process it was set.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rollout_operator.api import names
from rollout_operator.api.objects import Obj

from .observed_pool import Pod
from .pass_plan import SetGate

ENDPOINTS_PER_SLICE = 100
"""As many as in Kubernetes' own slices: each node gets that much when one of them changes."""


def _port_entry(name: str, port: int, **target: str) -> Obj:
    return {"name": name, "port": port, **target, "protocol": "TCP"}


def pool_services(
    name: str,
    namespace: str,
    uid: str,
    weights_port: int = names.WEIGHTS_PORT,
    *,
    selecting: bool = True,
) -> list[Obj]:
    """Return the data Service and the headless Service of a pool.

    With `selecting` False they select no pods: the operator writes their EndpointSlices.
    """
    ports = {"data": names.DATA_PORT, "control": names.CONTROL_PORT, "weights": weights_port}
    entries = [_port_entry(n, port, targetPort=n) for n, port in ports.items()]
    heads = {names.LABEL_POOL: name, names.LABEL_ROLE: names.ROLE_HEAD}
    data: Obj = {"type": "ClusterIP", "selector": heads, "ports": entries[:1]}
    everyone: Obj = {
        "type": "ClusterIP",
        "clusterIP": "None",
        # Trainers and gangs must find workers that load, sleep or wait for weights, too.
        "publishNotReadyAddresses": True,
        "selector": {names.LABEL_POOL: name},
        "ports": entries,
    }
    if not selecting:
        del data["selector"], everyone["selector"]
    wanted = {names.data_service(name): data, names.heads_service(name): everyone}
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": child_metadata(service, name, namespace, uid),
            "spec": spec,
        }
        for service, spec in wanted.items()
    ]


def child_metadata(
    name: str, pool: str, namespace: str, uid: str, labels: Mapping[str, str] | None = None
) -> Obj:
    """Return the metadata of a child: the pool's labels and these, and the RolloutReplica as its controller."""
    return {
        "name": name,
        "namespace": namespace,
        "labels": {**names.pool_labels(pool), **(labels or {})},
        "ownerReferences": [names.controller_reference(pool, uid)],
    }


def metadata_difference(want: Mapping[str, Any], have: Mapping[str, Any]) -> str | None:
    """Return which label or annotation of a stored object is not as wanted, or None; it may have others."""
    for field in ("labels", "annotations"):
        stored = have["metadata"].get(field) or {}
        for key, value in (want["metadata"].get(field) or {}).items():
            if stored.get(key) != value:
                return f"metadata.{field}[{key}]"
    return None


def metadata_patch(want: Mapping[str, Any], have: Mapping[str, Any]) -> Obj:
    """Return what a merge patch says of the metadata of a stored object.

    The API server refuses it (`Conflict`) if another client has written the object since it was read.
    """
    fields = {f: want["metadata"][f] for f in ("labels", "annotations") if f in want["metadata"]}
    return {**fields, "resourceVersion": have["metadata"]["resourceVersion"]}


def service_difference(want: Mapping[str, Any], have: Mapping[str, Any]) -> str | None:
    """Return which part of a stored Service is not as wanted, or None."""
    spec = have["spec"]
    for field in ("selector", "publishNotReadyAddresses"):
        if (spec.get(field) or False) != (want["spec"].get(field) or False):
            return f"spec.{field}"
    ports = want["spec"]["ports"]
    stored = [{key: p.get(key) for key in ports[0]} for p in spec.get("ports") or ()]
    return metadata_difference(want, have) if stored == ports else "spec.ports"


def service_patch(want: Mapping[str, Any], have: Mapping[str, Any]) -> Obj:
    """Return the merge patch that makes a stored Service what it should be."""
    spec, selector = want["spec"], want["spec"].get("selector")
    # A merge would leave the keys that another client added to the selector.
    added = dict.fromkeys(have["spec"].get("selector") or ())
    fields = {
        "selector": {**added, **selector} if selector else None,
        "ports": spec["ports"],
        "publishNotReadyAddresses": spec.get("publishNotReadyAddresses", False),
    }
    return {"metadata": metadata_patch(want, have), "spec": fields}


@dataclass(frozen=True, slots=True)
class EndpointGate:
    """What the slices say of a member; times are wall-clock seconds."""

    on: bool = False
    boot: str | None = None
    since: float | None = None
    proven: float | None = None


def read_gates(slices: Iterable[Obj], pool: str, uid: str) -> dict[str, EndpointGate]:
    """Return the gates by pod uid, from those slices of the data Service that object `uid` controls."""
    found: dict[str, EndpointGate] = {}
    for each in slices:
        labels = each["metadata"].get("labels") or {}
        if not is_controlled_by(each, uid) or labels.get(names.LABEL_SERVICE) != pool:
            continue
        found |= _parse_gates_annotation(each)
        for endpoint in each.get("endpoints") or ():
            pod = (endpoint.get("targetRef") or {}).get("uid", "")
            if (endpoint.get("conditions") or {}).get("ready") is not False:
                found[pod] = replace(found.get(pod, EndpointGate()), on=True)
    return found


def is_controlled_by(obj: Obj, uid: str) -> bool:
    """Whether object `uid` is the controller of this one."""
    refs = obj["metadata"].get("ownerReferences") or ()
    return any(ref.get("controller") and ref.get("uid") == uid for ref in refs)


def _parse_gates_annotation(each: Obj) -> dict[str, EndpointGate]:
    """What the annotation holds; nothing, if somebody wrote something else into it."""
    text = (each["metadata"].get("annotations") or {}).get(names.ANNOTATION_GATES, "")
    try:
        notes = {pod: EndpointGate(False, **note) for pod, note in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError):
        return {}
    times = (at for note in notes.values() for at in (note.since, note.proven))
    return notes if all(at is None or isinstance(at, int | float) for at in times) else {}


def with_gates(members: Iterable[Pod], gates: Iterable[SetGate], now: float) -> tuple[Pod, ...]:
    """Return the members as they are once these gates are set."""
    changes = {gate.uid: gate for gate in gates}

    def changed(pod: Pod) -> Pod:
        gate = changes.get(pod.uid)
        if gate is None:
            return pod
        since = pod.gate_since if pod.gate == gate.serving else float(int(now))
        boot, proven = gate.boot or None, gate.proven_since
        return replace(
            pod, gate=gate.serving, gate_boot=boot, gate_since=since, proven_since=proven
        )

    return tuple(changed(pod) for pod in members)


def pool_slices(
    pool: str, namespace: str, uid: str, members: Iterable[Pod], stored: Iterable[Obj]
) -> list[Obj]:
    """Return the slices as they should be; those that are left over become empty.

    `members` are the trainer's pods by index, with their gates, and `stored` the pool's slices that are there.
    """
    chunks: defaultdict[tuple[str, int], list[Pod]] = defaultdict(list)
    for place, pod in enumerate(pod for pod in members if pod.ip is not None):
        family = "IPv6" if ":" in (pod.ip or "") else "IPv4"
        chunks[family, place // ENDPOINTS_PER_SLICE].append(pod)
    wanted: dict[str, Obj] = {}
    for service in (names.data_service(pool), names.heads_service(pool)):
        data = service == names.data_service(pool)
        for (family, number), pods in chunks.items():
            name = f"{service}-{family.lower()}-{number}"
            wanted[name] = made = _empty_slice(pool, namespace, uid, service, name, family)
            made["endpoints"] = [_make_endpoint(pool, namespace, pod, data=data) for pod in pods]
            if data:
                made["metadata"]["annotations"] = {names.ANNOTATION_GATES: _gates_annotation(pods)}
    for each in stored:
        name = each["metadata"]["name"]
        if is_controlled_by(each, uid) and name not in wanted:
            service = each["metadata"]["labels"].get(names.LABEL_SERVICE, "")
            wanted[name] = _empty_slice(pool, namespace, uid, service, name, each["addressType"])
    return list(wanted.values())


def _empty_slice(pool: str, namespace: str, uid: str, service: str, name: str, family: str) -> Obj:
    ports = {"data": names.DATA_PORT}
    if service != names.data_service(pool):
        ports |= {"control": names.CONTROL_PORT, "weights": names.WEIGHTS_PORT}
    labels = {names.LABEL_SERVICE: service, names.LABEL_SLICE_MANAGER: names.MANAGER_NAME}
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": child_metadata(name, pool, namespace, uid, labels),
        "addressType": family,
        "ports": [_port_entry(*each) for each in ports.items()],
        "endpoints": [],
    }


def _make_endpoint(pool: str, namespace: str, pod: Pod, *, data: bool) -> Obj:
    """The data Service leads to members that serve; the headless one to all, by name."""
    serves = is_serving(pod)
    endpoint: Obj = {
        "addresses": [pod.ip],
        "conditions": {
            "ready": serves if data else True,
            "serving": serves if data else pod.ready,
            "terminating": pod.is_deleting,
        },
        "targetRef": {"kind": "Pod", "name": pod.name, "namespace": namespace, "uid": pod.uid},
    }
    if not data:
        endpoint["hostname"] = names.pod_name(pool, pod.replica, 0)
    if pod.node is not None:
        endpoint["nodeName"] = pod.node
    return endpoint


def is_serving(pod: Pod) -> bool:
    """Whether a member belongs into the data Service."""
    return pod.gate and not pod.is_deleting and not pod.is_finished


def _gates_annotation(pods: Iterable[Pod]) -> str:
    """The gates of members that have one or had one: they must outlive the operator's process."""
    notes = {
        pod.uid: {"boot": pod.gate_boot, "since": pod.gate_since, "proven": pod.proven_since}
        for pod in pods
        if pod.gate_boot is not None
    }
    return json.dumps(notes, sort_keys=True, separators=(",", ":"))


def slice_difference(want: Mapping[str, Any], have: Mapping[str, Any]) -> str | None:
    """Return which part of a stored slice is not as wanted, or None."""
    for field in ("endpoints", "ports"):
        if (have.get(field) or []) != want[field]:
            return field
    return metadata_difference(want, have)


def slice_patch(want: Mapping[str, Any], have: Mapping[str, Any]) -> Obj:
    """Return the merge patch that makes a stored slice what it should be."""
    fields = {"endpoints": want["endpoints"], "ports": want["ports"]}
    return {"metadata": metadata_patch(want, have), **fields}
