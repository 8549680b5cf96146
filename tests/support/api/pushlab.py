"""A trainer that pushes to a pool of real workers through the real operator and API server.

Pods are without processes; each worker is one of this machine, over the tiny engine, at its pod's
loopback address. The trainer is in this process, and so is the operator.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch

from localkube import Cluster
from localkube.settings import free_ports
from rollout_client import Hook, Published
from rollout_client.cluster_client import ClusterClient, load_access
from rollout_client.discovery.pool_members import Member
from rollout_client.steering.cluster_steering import ClusterSteering
from rollout_client.steering.control_ports import ControlPorts
from rollout_client.steering.steering_protocol import OnProgress
from rollout_client.steering.steering_verbs import SteeringVerbs
from tests.support.api.poollab import PoolLab, Workers, pool_lab
from tests.support.cluster.scalelab import holds
from tests.support.unit.tiny_engine import write_weights
from tests.support.waiting import until

PROGRAM = Path(__file__).parents[1] / "unit" / "tiny_serve.py"
POOL = "pushed"
READY_SECONDS = 60.0


class PodWorker:
    """The process of a pod, at its address."""

    def __init__(
        self, command: Sequence[str], address: str, ports: tuple[int, int], log: Path
    ) -> None:
        self.address, (data, self.control) = address, ports
        self.url = f"http://{address}:{data}"
        path = os.pathsep.join(filter(None, sys.path))
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [
                    sys.executable, *command, "--data-host", address, "--control-host", address,
                    "--data-port", str(data), "--control-port", str(self.control),
                ],
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                stdout=out, stderr=out,
            )  # fmt: skip

    @property
    def serving(self) -> bool:
        """Whether it says so: the kubelet's readiness probe."""
        with suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/ready", trust_env=False, timeout=2).status_code == 200
        return False

    def end_process(self) -> None:
        self.process.kill()
        self.process.wait(30)


class Worker(PodWorker):
    """A worker over the tiny engine, which tells what it was asked."""

    def __init__(self, folder: Path, number: int, ports: list[int]) -> None:
        data, control, weights = ports
        self._counts = folder / f"{number}.counts"
        command = [str(PROGRAM), str(self._counts), "--model", str(folder / "model")]
        command += ["--weights-port", str(weights)]
        log = folder / f"{number}.log"
        super().__init__(command, f"127.77.0.{number + 1}", (data, control), log)

    @property
    def member(self) -> Member:
        """As discovery would find it."""
        url = f"http://{self.address}:{self.control}"
        return Member(url, self.address, url)

    def asked(self) -> Counter[str]:
        """How often its control port was asked so far: to look (get), to stage (create), else (update)."""
        return Counter(self._counts.read_text().split())


@dataclass
class PushLab:
    """See the module; made by `push_lab`."""

    lab: PoolLab
    workers: list[Worker]
    trainer: SteeringVerbs
    version: int = 0

    async def publish(self, progress: OnProgress = lambda progress: None) -> Published:
        """Push the next version; `progress` is told how far it is."""
        self.version += 1
        number = torch.tensor([self.version % 100], dtype=torch.uint8)
        tensors = {"number": number, "rest": torch.zeros(1, dtype=torch.uint8)}
        return await self.trainer.publish_weights(
            self.version, tensors=tensors, seconds=60, progress=progress
        )

    def calls(self) -> list[int]:
        """How often each worker's control port was asked so far."""
        return [worker.asked().total() for worker in self.workers]


@asynccontextmanager
async def push_lab(cluster: Cluster, namespace: str, replicas: int) -> AsyncIterator[PushLab]:
    """Start everything, a pool that serves included."""
    with tempfile.TemporaryDirectory(prefix="pushlab-") as home:
        write_weights(Path(home) / "model", 100)
        ports = free_ports(3)
        workers = [Worker(Path(home), number, ports) for number in range(replicas)]
        by_address = Workers({each.address: each for each in workers}, ports[1])
        try:
            await until(
                lambda: all(each.serving for each in workers), READY_SECONDS, what="workers"
            )
            async with pool_lab(cluster, namespace, by_address) as lab:
                lab.create(POOL, replicas=replicas)
                try:
                    await lab.until(
                        "the pool is Ready", lambda: holds(lab.get(POOL), "Ready"), READY_SECONDS
                    )
                except AssertionError as error:
                    found = {n: p["status"].get("podIP") for n, p in lab.pods(POOL).items()}
                    raise AssertionError(f"{error}; addresses: {found}") from None
                heads = ControlPorts(lambda: [each.member for each in workers], None)
                kube = ClusterClient(load_access(os.environ["KUBECONFIG"]))
                steering = ClusterSteering(kube, POOL, namespace, heads)
                try:
                    yield PushLab(lab, workers, SteeringVerbs(steering, Hook()))
                finally:
                    await steering.close()
        finally:
            for each in workers:
                each.end_process()
