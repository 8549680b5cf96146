"""Clusters for tests: session fixtures wrap these context managers.

`with control_plane("api") as cluster:` is a real API server of this test run only.
`ROLLOUT_KEEP_CLUSTER=1` leaves clusters up after the tests, for a look.
`ROLLOUT_TEST_RUN=<pid>` names the program (`hack/run_tests.py`) whose run this is a part of.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from localkube import Cluster
from localkube.home import exclusive
from tests.support.waiting import until_sync

_OURS = re.compile(r"test-[a-z0-9-]+-(?P<pid>\d+)")


def control_plane(purpose: str) -> AbstractContextManager[Cluster]:
    """Yield a control plane without nodes on free ports of loopback; needs no root."""
    return nodes_cluster(purpose, nodes=0)


@contextmanager
def nodes_cluster(purpose: str, nodes: int, gpus: int = 0, devices: int = 0) -> Iterator[Cluster]:
    """Yield a cluster with real nodes; needs root."""
    remove_left_behind()
    name = f"test-{purpose}-{os.getpid()}"
    try:
        yield _start_directly(name, nodes, gpus, devices)
    finally:
        if not os.environ.get("ROLLOUT_KEEP_CLUSTER"):
            Cluster.remove(name)


@contextmanager
def run_cluster(purpose: str, nodes: int, gpus: int, devices: int) -> Iterator[Cluster]:
    """Yield a cluster with real nodes (root) that every pytest process of one `make test` shares.

    What failed is tried again on the very same cluster: `hack/run_tests.py` removes it at the end.
    """
    run = os.environ.get("ROLLOUT_TEST_RUN")
    if run is None:
        with nodes_cluster(purpose, nodes, gpus, devices) as cluster:
            yield cluster
        return
    remove_left_behind()
    yield _start_directly(f"test-{purpose}-{run}", nodes, gpus, devices)


def _start_directly(name: str, nodes: int, gpus: int, devices: int) -> Cluster:
    """Start a cluster, whose API server clients in this process then ask without the machine's proxy."""
    cluster = Cluster.start(name, nodes=nodes, gpus=gpus, devices=devices)
    os.environ |= {
        key: value for key, value in cluster.environment().items() if key.lower() == "no_proxy"
    }
    return cluster


def remove_left_behind() -> None:
    """Remove clusters of test runs that were killed before they could."""
    with exclusive("left-behind"):  # another lane may look at this moment
        for name in Cluster.names():
            match = _OURS.fullmatch(name)
            if match and not Path("/proc", match["pid"]).exists():
                Cluster.remove(name)


def await_crd(cluster: Cluster) -> None:
    """Wait until the API server serves the CustomResourceDefinition.

    Look by look: `kubectl wait` fails at once on a definition that has no conditions yet.
    """
    look = ("get", "crd/rolloutreplicas.rollout.dev", "-o", "jsonpath={.status.conditions}")

    def established() -> bool:
        conditions = json.loads(cluster.kubectl(*look) or "[]") or []
        return any((each["type"], each["status"]) == ("Established", "True") for each in conditions)

    until_sync(established, 30, what="the API server to serve RolloutReplicas")
