"""A cluster with real nodes to measure workers on: the running one, or one started for it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import images
import rollout_local
from apiclient import POOLS, Api, Obj
from localkube import Cluster, ClusterError
from localkube.home import DEFAULT_NAME

NAMESPACE = "bench"


@contextmanager
def real_cluster() -> Iterator[Cluster]:
    """Attach to the cluster `rollout`, or start it and remove it afterwards; install the chart.

    Raises:
        ClusterError: this machine can't run a cluster with nodes.
    """
    started = False
    images.build()
    try:
        cluster = Cluster.attach()
    except ClusterError:
        cluster, started = Cluster.start(nodes=1), True
    try:
        images.load(cluster)
        folder = rollout_local.make_models()
        rollout_local.install(cluster, NAMESPACE)
        rollout_local.claims(cluster, NAMESPACE, folder)
        yield cluster
    finally:
        if started:
            Cluster.remove(DEFAULT_NAME)


def pool_manifest(name: str, **spec: Any) -> Obj:
    """Return a pool of the tiny model."""
    body = {
        "engine": {"type": "hf"},
        "model": {"source": {"claim": {"name": "models", "subPath": "tiny"}}},
        "weights": {"volume": {"claim": {"name": "weights"}}},
        "drainSeconds": 0,
    } | spec
    return {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "RolloutReplica",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": body,
    }


def apply(cluster: Cluster, manifest: Obj) -> None:
    """`kubectl apply`, as a person does it."""
    cluster.kubectl("apply", "-f", "-", input=json.dumps(manifest))


def remove(api: Api, name: str, seconds: float = 90.0) -> None:
    """Delete a pool and wait until none of its pods is left."""
    api.delete(f"{POOLS.format(NAMESPACE)}/{name}")
    pods = f"/api/v1/namespaces/{NAMESPACE}/pods"
    await_true(f"{name} is gone", lambda: not api.items(pods, f"rollout.dev/pool={name}"), seconds)


def await_true(what: str, holds: Callable[[], object], seconds: float) -> None:
    """Wait until `holds` does.

    Raises:
        ClusterError: it did not within the time.
    """
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise ClusterError(f"{what}: not within {seconds:g} s")
        time.sleep(0.1)
