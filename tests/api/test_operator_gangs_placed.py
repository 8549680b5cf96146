"""The scheduler of scheduler-plugins, compiled from its module: two gangs, and room for one and a half."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from localkube import Cluster
from localkube.build import build
from localkube.home import binaries
from rollout_operator.api.gangs import SCHEDULER_NAMES, GangScheduler
from tests.support.api.apiclient import Obj
from tests.support.api.gang_installs import TWO_PODS, install_schedulers
from tests.support.api.poollab import NO_NODE, PoolLab, pool_lab

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.soak,  # test_operator_gangs.py has the same objects, without a scheduler
]
PLUGINS = GangScheduler.SCHEDULER_PLUGINS
PERMIT_SECONDS = 10
"""For so long the scheduler holds places for a gang that has not got all."""
NODES, FOURTH = ("gang-0", "gang-1", "gang-2"), "gang-3"
ROOM: Obj = {"example.com/gpu": "1", "cpu": "8", "memory": "8Gi", "pods": "10"}
CONFIG = f"""
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
leaderElection: {{leaderElect: false}}
clientConnection: {{kubeconfig: KUBECONFIG}}
profiles:
- schedulerName: {SCHEDULER_NAMES[PLUGINS]}
  plugins:
    multiPoint: {{enabled: [{{name: Coscheduling}}]}}
    queueSort: {{enabled: [{{name: Coscheduling}}], disabled: [{{name: "*"}}]}}
  pluginConfig:
  - name: Coscheduling
    args: {{permitWaitingTimeSeconds: {PERMIT_SECONDS}}}
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(crd: Cluster) -> AsyncIterator[PoolLab]:
    build(["gang-scheduler"])
    async with pool_lab(crd, "gangs-placed", gang_scheduler=PLUGINS) as made:
        yield made


@contextmanager
def scheduling(cluster: Cluster, folder: Path) -> Iterator[None]:
    config = folder / "scheduler.yaml"
    config.write_text(CONFIG.replace("KUBECONFIG", str(cluster.kubeconfig)))
    command: list[str | Path] = [
        binaries() / "gang-scheduler",
        f"--config={config}",
        "--secure-port=0",
    ]
    with (
        (folder / "scheduler.log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
    ):
        try:
            yield
        finally:
            process.terminate()


@contextmanager
def nodes(lab: PoolLab) -> Iterator[None]:
    for name in NODES:
        add_node(lab, name)
    try:
        yield
    finally:
        for name in (*NODES, FOURTH):
            lab.api.delete(f"/api/v1/nodes/{name}")


def add_node(lab: PoolLab, name: str) -> None:
    """Add a node with one device; no kubelet is there, which the pods tolerate."""
    lab.api.create("/api/v1/nodes", {"metadata": {"name": name}})
    status: Obj = {"capacity": ROOM, "allocatable": ROOM}
    lab.api.patch(f"/api/v1/nodes/{name}/status", {"status": status})


def create_two(lab: PoolLab, name: str, **spec: Obj) -> None:
    template = {"labels": {NO_NODE: "x"}, "tolerations": [{"operator": "Exists"}]}
    lab.create(name, replicas=2, podTemplate=template, **TWO_PODS, **spec)


def placed(lab: PoolLab, name: str) -> list[int]:
    """How many pods of each replica have a node, the fewest first."""
    pods = lab.pods(name)
    there = [n for n, pod in pods.items() if pod["spec"].get("nodeName")]
    return sorted(sum(n.startswith(f"{name}-{replica}-") for n in there) for replica in (0, 1))


async def remove_pool(lab: PoolLab, name: str) -> None:
    """Suspend a pool, so that no pod is made again, end its pods as a kubelet would, and delete it."""

    def emptied() -> bool:
        pods = lab.pods(name)
        for pod, body in pods.items():
            if "deletionTimestamp" in body["metadata"]:
                lab.api.delete(lab.path("pods", pod), gracePeriodSeconds=0)
        return not pods

    lab.patch(name, suspend=True)
    await lab.until(f"{name} has no pods", emptied)
    lab.api.delete(lab.path("pools", name))


async def test_one_gang_starts_and_none_holds_half(lab: PoolLab, tmp_path: Path) -> None:
    install_schedulers(lab.api, PLUGINS)
    with nodes(lab):
        create_two(lab, "apart")
        await lab.until("a replica has half", lambda: placed(lab, "apart") == [1, 2])
        await remove_pool(lab, "apart")

        with scheduling(lab.cluster, tmp_path):
            create_two(lab, "gangs", scheduling={"gang": "PodGroup"})
            await lab.until("one gang has nodes", lambda: placed(lab, "gangs") == [0, 2], 60)
            end = time.monotonic() + 2 * PERMIT_SECONDS
            while time.monotonic() < end:
                assert placed(lab, "gangs") == [0, 2]
                await asyncio.sleep(0.5)
            add_node(lab, FOURTH)
            await lab.until("both have nodes", lambda: placed(lab, "gangs") == [2, 2], 60)
            await remove_pool(lab, "gangs")
