"""Builds a pool's two Services, and says how a stored one differs from them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_operator.api import names
from rollout_operator.api.objects import Obj

_DATA_PORT_ENTRY = {
    "name": "data",
    "port": names.DATA_PORT,
    "targetPort": "data",
    "protocol": "TCP",
}
_CONTROL_PORT_ENTRY = {
    "name": "control",
    "port": names.CONTROL_PORT,
    "targetPort": "control",
    "protocol": "TCP",
}


def pool_services(
    name: str,
    namespace: str,
    uid: str,
    weights_port: int = names.WEIGHTS_PORT,
    *,
    selecting: bool = True,
) -> list[Obj]:
    """Return the data Service and the headless Service of a pool.

    With `selecting` False they select no pods: their EndpointSlices are ours (`endpoints.py`).
    """
    heads = {names.LABEL_POOL: name, names.LABEL_ROLE: names.ROLE_HEAD}
    data: Obj = {"type": "ClusterIP", "selector": heads, "ports": [_DATA_PORT_ENTRY]}
    weights = {
        "name": "weights",
        "port": weights_port,
        "targetPort": "weights",
        "protocol": "TCP",
    }
    everyone: Obj = {
        "type": "ClusterIP",
        "clusterIP": "None",
        # Trainers and gangs must find workers that load, sleep or wait for weights, too.
        "publishNotReadyAddresses": True,
        "selector": {names.LABEL_POOL: name},
        "ports": [_DATA_PORT_ENTRY, _CONTROL_PORT_ENTRY, weights],
    }
    if not selecting:
        del data["selector"], everyone["selector"]
    wanted = {names.data_service(name): data, names.heads_service(name): everyone}
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {
                "name": service,
                "namespace": namespace,
                "labels": names.pool_labels(name),
                "ownerReferences": [names.controller_reference(name, uid)],
            },
            "spec": spec,
        }
        for service, spec in wanted.items()
    ]


def service_difference(want: Mapping[str, Any], have: Mapping[str, Any]) -> str | None:
    """Return which part of a stored Service is not as wanted, or None."""
    labels = have["metadata"].get("labels") or {}
    for key, value in want["metadata"]["labels"].items():
        if labels.get(key) != value:
            return f"label {key}"
    spec = have["spec"]
    for field in ("selector", "publishNotReadyAddresses"):
        if (spec.get(field) or False) != (want["spec"].get(field) or False):
            return f"spec.{field}"
    stored = [{k: p.get(k) for k in _DATA_PORT_ENTRY} for p in spec.get("ports") or ()]
    return None if stored == want["spec"]["ports"] else "spec.ports"


def service_patch(want: Mapping[str, Any], uid: str) -> list[Obj]:
    """Return the JSON patch that brings the stored Service `uid` back, and no other of its name.

    A merge patch would leave keys that somebody else added to the selector.
    """
    spec = want["spec"]
    fields = {
        "selector": spec.get("selector"),
        "ports": spec["ports"],
        "publishNotReadyAddresses": spec.get("publishNotReadyAddresses", False),
    }
    patch: list[Obj] = [{"op": "test", "path": "/metadata/uid", "value": uid}]
    patch += [{"op": "add", "path": f"/spec/{k}", "value": v} for k, v in fields.items()]
    for key, value in want["metadata"]["labels"].items():
        path = "/metadata/labels/" + key.replace("~", "~0").replace("/", "~1")
        patch.append({"op": "add", "path": path, "value": value})
    return patch
