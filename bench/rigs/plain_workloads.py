"""Deployments and StatefulSets of as many pods, which Kubernetes' own controllers make, alone or with the Services of a pool."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tests.support.api.apiclient import Obj
from tests.support.cluster.scalelab import NAMESPACE, Lab
from tests.support.waiting import eventually

READY_SECONDS = 420.0
MANAGER = "kube-controller-manager"
APPS = f"/apis/apps/v1/namespaces/{NAMESPACE}"
PLAIN_PATHS = {"Deployment": f"{APPS}/deployments", "StatefulSet": f"{APPS}/statefulsets"}
SERVICES = f"/api/v1/namespaces/{NAMESPACE}/services"
SLICES = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"
BUDGETS = f"/apis/policy/v1/namespaces/{NAMESPACE}/poddisruptionbudgets"


def ready_seconds(pods: int) -> float:
    """Return how long so many pods may take, until the measurement is given up."""
    return READY_SECONDS * max(1.0, pods / 1000)


@dataclass(frozen=True, slots=True)
class PlainWorkload:
    """What Kubernetes takes for as many pods of its own kinds."""

    seconds: float
    cpu: float


def measure_plain(
    lab: Lab, kind: str, count: int, replicas: int, *, with_services: bool = False
) -> PlainWorkload:
    """Create as many objects of a kind, wait until their pods are Ready, and delete them.

    `with_services`: each has what a pool has, too: two Services, one of them headless, and a PodDisruptionBudget.
    """
    path, seconds = PLAIN_PATHS[kind], ready_seconds(count * replicas)
    used, began = lab.usage(MANAGER), time.monotonic()
    for index in range(count):
        name = f"plain-{index:03}"
        if with_services:
            _create_services(lab, name)
        lab.api.create(path, _plain_object(kind, name, replicas))

    def ready_pods() -> int:
        return sum(each.get("status", {}).get("readyReplicas", 0) for each in lab.api.items(path))

    # As often as pools are listed, whose list costs as much: neither side is disturbed more.
    every = max(0.1, count / 1000)
    eventually("all are Ready", lambda: ready_pods() == count * replicas, seconds, every)
    took, cpu = time.monotonic() - began, lab.usage(MANAGER).cpu - used.cpu
    delete_objects(lab, path, propagationPolicy="Background")
    lab.await_pods(0, seconds)
    if with_services:
        delete_objects(lab, SERVICES)
        delete_objects(lab, BUDGETS)
        await_no_endpoints(lab, seconds)
    return PlainWorkload(took, cpu)


def delete_objects(lab: Lab, path: str, **options: str) -> None:
    """Delete all objects of a collection, one by one: a request that deletes a thousand outlasts the client's time-out."""
    for each in lab.api.items(path):
        lab.api.delete(f"{path}/{each['metadata']['name']}", **options)


def await_no_endpoints(lab: Lab, seconds: float) -> None:
    eventually("their endpoints are gone", lambda: not lab.api.items(SLICES), seconds, 1.0)


def _create_services(lab: Lab, name: str) -> None:
    labels = {"app": name}
    service = {"selector": labels, "ports": [{"port": 8000}]}
    budget = {"selector": {"matchLabels": labels}, "maxUnavailable": 1}
    heads = f"{name}-heads"
    lab.api.create(SERVICES, {"metadata": {"name": name}, "spec": service})
    lab.api.create(SERVICES, {"metadata": {"name": heads}, "spec": service | {"clusterIP": "None"}})
    lab.api.create(BUDGETS, {"metadata": {"name": name}, "spec": budget})


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
