"""A pod that stays Terminating, because the kubelet that should end it is gone."""

from __future__ import annotations

import time
from dataclasses import dataclass

from apiclient import PODS, Api, Obj
from scalelab import NAMESPACE, Lab, processless_pool
from waiting import eventually

POOL, NODE = "stuck", "dead"
GRACE_SECONDS = 1
NODES = "/api/v1/nodes"


@dataclass(frozen=True, slots=True)
class StuckPod:
    """The pod's uid and the monotonic time of its deletion."""

    uid: str
    deleted_at: float


def make_stuck(lab: Lab) -> StuckPod:
    """Make a pool on a node that nobody plays, and delete its pod."""
    _make_node(lab.api)
    where = {"nodeSelector": {"kubernetes.io/hostname": NODE}}
    lab.create(processless_pool(POOL, podTemplate=where))
    path = f"{PODS.format(NAMESPACE)}/{POOL}-0-0"

    def bound() -> list[Obj]:
        return [p for p in lab.pods(POOL) if p["spec"].get("nodeName") == NODE]

    pod = eventually("the pod is bound to the dead node", bound, 30)[0]
    # As the kubelet had reported it before it died.
    running = {"phase": "Running", "podIP": "192.0.2.1", "podIPs": [{"ip": "192.0.2.1"}]}
    lab.api.patch(f"{path}/status", {"status": running})
    lab.api.delete(path, gracePeriodSeconds=GRACE_SECONDS)
    return StuckPod(pod["metadata"]["uid"], time.monotonic())


def _make_node(api: Api) -> None:
    node = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": NODE, "labels": {"kubernetes.io/hostname": NODE}},
    }
    api.create(NODES, node)
    capacity = {"cpu": "8", "memory": "64Gi", "pods": "100"}
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
    status = {"capacity": capacity, "allocatable": capacity, "conditions": [ready]}
    api.patch(f"{NODES}/{NODE}/status", {"status": status})
