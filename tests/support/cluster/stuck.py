"""A pod that stays Terminating, because the kubelet that should end it is gone with its node.

Kubernetes itself evicts it from the node that is no longer heard of, as from one that lost its power.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from tests.support.api.apiclient import PODS, Api, Obj
from tests.support.cluster.scalelab import NAMESPACE, Lab, processless_pool
from tests.support.waiting import eventually

POOL, NODE, OTHER = "stuck", "dead", "fake-1"
LABEL = "example.org/stuck"
"""Of the nodes that the pool may use: first the one that dies, then another one."""

GRACE_SECONDS = 15
"""Grace period of a pod whose pool does not drain."""

STUCK_SECONDS = 5.0
"""After that a pod of the tier is removed by force, instead of 30: what is done does not depend on it."""

NODES = "/api/v1/nodes"


@dataclass(frozen=True, slots=True)
class StuckPod:
    """The pod's uid and the monotonic time of its eviction."""

    uid: str
    deleted_at: float


def make_stuck(lab: Lab) -> StuckPod:
    """Make a pool on a node that nobody plays, and let the node die; another one is there for it."""
    _make_node(lab.api)
    leave_soon = {
        "key": "node.kubernetes.io/unreachable",
        "operator": "Exists",
        "effect": "NoExecute",
        "tolerationSeconds": 1,
    }
    where = {"nodeSelector": {LABEL: "yes"}, "tolerations": [leave_soon]}
    lab.create(processless_pool(POOL, podTemplate=where))
    path = f"{PODS.format(NAMESPACE)}/{POOL}-0-0"

    def bound() -> list[Obj]:
        return [p for p in lab.pods(POOL) if p["spec"].get("nodeName") == NODE]

    pod = eventually("the pod is bound to the dead node", bound, 30)[0]
    # As the kubelet had reported it before it died.
    running = {"phase": "Running", "podIP": "192.0.2.1", "podIPs": [{"ip": "192.0.2.1"}]}
    lab.api.patch(f"{path}/status", {"status": running})
    lab.api.patch(f"{NODES}/{OTHER}", {"metadata": {"labels": {LABEL: "yes"}}})
    _tell_ready(lab.api, "Unknown")
    eventually(
        "the pod is evicted", lambda: "deletionTimestamp" in lab.api.get(path)["metadata"], 30
    )
    return StuckPod(pod["metadata"]["uid"], time.monotonic())


def _make_node(api: Api) -> None:
    node = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": NODE, "labels": {"kubernetes.io/hostname": NODE, LABEL: "yes"}},
    }
    api.create(NODES, node)
    capacity = {"cpu": "8", "memory": "64Gi", "pods": "100"}
    api.patch(f"{NODES}/{NODE}/status", {"status": {"capacity": capacity, "allocatable": capacity}})
    _tell_ready(api, "True")


def _tell_ready(api: Api, status: str) -> None:
    """Tell of the node what its kubelet does, or, `Unknown`, whoever misses its kubelet."""
    ready = {"type": "Ready", "status": status, "reason": "Test"}
    api.patch(f"{NODES}/{NODE}/status", {"status": {"conditions": [ready]}})
