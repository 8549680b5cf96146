"""Deployments and StatefulSets of as many pods, which Kubernetes' own controllers make."""

from __future__ import annotations

import time
from dataclasses import dataclass

from localkube import processes
from tests.support.api.apiclient import Obj
from tests.support.cluster.scalelab import NAMESPACE, Lab, usage_of

READY_SECONDS = 420.0
APPS = f"/apis/apps/v1/namespaces/{NAMESPACE}"
PLAIN_PATHS = {"Deployment": f"{APPS}/deployments", "StatefulSet": f"{APPS}/statefulsets"}


def ready_seconds(pods: int) -> float:
    """Return how long so many pods may take, until the measurement is given up."""
    return READY_SECONDS * max(1.0, pods / 1000)


@dataclass(frozen=True, slots=True)
class PlainWorkload:
    """What Kubernetes takes for as many pods of its own kinds."""

    seconds: float
    cpu: float


def measure_plain(lab: Lab, kind: str, count: int, replicas: int) -> PlainWorkload:
    """Create as many objects of a kind, wait until their pods are Ready, and delete them."""
    path, seconds = PLAIN_PATHS[kind], ready_seconds(count * replicas)
    manager = processes.recorded(lab.cluster.state, "kube-controller-manager")
    assert manager is not None, "the controller-manager runs"
    used, began = usage_of(manager.pid), time.monotonic()
    for index in range(count):
        lab.api.create(path, _plain_object(kind, f"plain-{index:03}", replicas))
    _await_pods(lab, count * replicas, seconds)
    took, cpu = time.monotonic() - began, usage_of(manager.pid).cpu - used.cpu
    lab.api.delete(path, propagationPolicy="Background")
    _await_pods(lab, 0, seconds)
    return PlainWorkload(took, cpu)


def _await_pods(lab: Lab, count: int, seconds: float) -> None:
    end = time.monotonic() + seconds
    while (ready := sum(_is_ready(pod) for pod in lab.pods())) != count:
        if time.monotonic() > end:
            raise RuntimeError(f"{ready} pods are Ready after {seconds:g} s, not {count}")
        time.sleep(0.2)


def _is_ready(pod: Obj) -> bool:
    found = (pod.get("status") or {}).get("conditions") or ()
    return any(c["type"] == "Ready" and c["status"] == "True" for c in found)


def _plain_object(kind: str, name: str, replicas: int) -> Obj:
    own = {"serviceName": name, "podManagementPolicy": "Parallel"} if kind == "StatefulSet" else {}
    labels = {"app": name}
    container = {"name": "worker", "image": "localhost/none"}
    pod = {"nodeSelector": {"kubernetes.io/hostname": "fake-1"}, "containers": [container]}
    return {
        "apiVersion": "apps/v1",
        "kind": kind,
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            **own,
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
