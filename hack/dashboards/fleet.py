"""The workers of a recording: a process for each pod of a cluster without nodes, as a kubelet would have it.

The processes are `rollout-worker serve` with Hugging Face's engine over a tiny model, on the loopback addresses that
`tests.support.api.poollab` gives to the pods.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from localkube import Cluster
from localkube.settings import free_ports
from tests.support.api.apiclient import PODS, Api
from tests.support.api.poollab import STRATEGIC, Workers
from tests.support.api.pushlab import PodWorker

Pod = dict[str, Any]
LOOK_SECONDS = 0.2
"""Between two looks at the pods; a recording's scrapes are a second apart."""
KILLED = 137
"""Exit code of a container that SIGKILL ended, as the kernel does when memory is short."""


class Fleet:
    """Starts a worker for each pod, kills it with its pod, and reports those that died; a context manager.

    Args:
        cluster: Without nodes.
        namespace: Of the pools.
        flags: Of the workers of each pool.
        folder: For logs, and for the list of what Prometheus is to scrape.
    """

    def __init__(
        self, cluster: Cluster, namespace: str, flags: dict[str, list[str]], folder: Path
    ) -> None:
        data, control = free_ports(2)
        self._ports = (data, control)
        self._namespace, self._flags, self._folder = namespace, flags, folder
        self._api = Api(cluster)
        self._by_address: dict[str, PodWorker] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow_pods, daemon=True, name="fleet")
        self.workers = Workers(self._by_address, control)
        self.names: dict[str, str] = {}
        """Names of the pods that have a worker, to its address."""
        self.operator: str | None = None
        """`host:port` of the operator's metrics, once it is known."""

    def __enter__(self) -> Fleet:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(timeout=30)
        for worker in self._by_address.values():
            worker.end_process()
        self._api.__exit__()

    def serving_urls(self, pool: str) -> list[str]:
        """Data ports of the pool's workers; some may refuse."""
        found = list(self.names.items())
        return [self._by_address[at].url for name, at in found if name.rsplit("-", 2)[0] == pool]

    def kill_worker(self, pod: str) -> bool:
        """Kill the process of a pod, which then has failed; returns whether it had one."""
        worker = self._by_address.get(self.names.get(pod, ""))
        if worker is None or worker.process.poll() is not None:
            return False
        worker.process.kill()
        return True

    def _follow_pods(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            pods = self._api.get(PODS.format(self._namespace))["items"]
            alive = {p["status"]["podIP"]: p for p in pods if p["status"].get("podIP")}
            for address, worker in list(self._by_address.items()):
                if address not in alive:
                    worker.end_process()
                elif worker.process.poll() is not None:
                    self._report_failed(alive[address])
            for address, pod in alive.items():
                if address not in self._by_address:
                    self._start_worker(address, pod)
            self.names = {p["metadata"]["name"]: address for address, p in alive.items()}
            self._write_targets()

    def _start_worker(self, address: str, pod: Pod) -> None:
        meta = pod["metadata"]
        pool = meta["labels"]["rollout.dev/pool"]
        serve = ("-m", "rollout_worker", "serve", "--auth", "none", *self._flags[pool])
        command = [*serve, "--pool", pool, "--namespace", self._namespace]
        log = self._folder / f"{meta['name']}.log"
        self._by_address[address] = PodWorker(command, address, self._ports, log)

    def _report_failed(self, pod: Pod) -> None:
        if pod["status"]["phase"] == "Failed":
            return
        ended = {"exitCode": KILLED, "reason": "OOMKilled"}
        container = {
            "name": "worker", "image": "none", "imageID": "", "ready": False, "restartCount": 0,
            "state": {"terminated": ended},
        }  # fmt: skip
        body = {"status": {"phase": "Failed", "containerStatuses": [container]}}
        path = f"{PODS.format(self._namespace)}/{pod['metadata']['name']}/status"
        self._api.patch(path, body, kind=STRATEGIC, missing=True)

    def _write_targets(self) -> None:
        """Name what Prometheus scrapes, with the labels that the chart's PodMonitors give."""
        targets = [
            {
                "targets": [f"{address}:{self._ports[0]}"],
                "labels": {"job": "rollout-workers", "namespace": self._namespace, "pod": name,
                           "pool": name.rsplit("-", 2)[0]},
            }
            for name, address in self.names.items()
        ]  # fmt: skip
        if self.operator is not None:
            labels = {"job": "rollout-operator", "namespace": "rollout-system", "pod": "operator-0"}
            targets.append({"targets": [self.operator], "labels": labels})
        new = self._folder / "targets.new"
        new.write_text(json.dumps(targets))
        new.replace(self._folder / "targets.json")
