"""A cluster for scale: a control plane, kwok's nodes, pods without processes, the real operator.

The chart is installed with no replica, so CRD, rights and admission policy are the real ones; the
operator runs on this machine as a process of its own, under the chart's service account, so that
the API server's audit log shows everything it does. Control ports are answered by
`processless`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from localkube import Cluster, ClusterError, network, processes
from localkube.settings import free_ports
from tests.support.api.apiclient import PODS, POOLS, Api, Obj
from tests.support.clusters import await_crd
from tests.support.manifests import replica
from tests.support.waiting import eventually

ROOT = Path(__file__).parents[3]
SYSTEM, ACCOUNT = "rollout-system", "rollout-operator"
NAMESPACE = "scale"
USER = f"system:serviceaccount:{SYSTEM}:{ACCOUNT}"
WRITES = ("create", "update", "patch", "delete", "deletecollection")
ENGINES = ("hf", "vllm")
FAKE_GPUS = 10_000
CONTROL = "http://127.0.0.1:8001"
"""Where `processless` tells what it was asked, and takes what a trainer pushes."""
GANG: Obj = {
    "engine": {"type": "vllm"},
    "parallelism": {"tensor": 2, "nodes": 2},
    "accelerator": {"resource": "nvidia.com/gpu"},
}
"""Spec of a pool whose replicas are two pods each."""
TICKS = os.sysconf("SC_CLK_TCK")
HURRIED = """
from rollout_operator.core import settings
settings.FORCED_DELETION_SECONDS = {}
from rollout_operator.__main__ import main
main()
"""
"""The operator with another time until it removes a pod by force."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request of the operator, as the audit log has it."""

    verb: str
    resource: str
    name: str
    code: int

    @property
    def is_write(self) -> bool:
        """Whether it changes an object; minting a token does not."""
        return self.verb in WRITES and self.resource != "serviceaccounts/token"


class AuditLog:
    """What one account asks of an API server, as its log has it; watches are left out."""

    def __init__(self, cluster: Cluster, user: str) -> None:
        self._path = cluster.audit_log
        self._user = user
        self._at = 0

    def calls(self) -> list[Call]:
        """Its requests since this was last asked."""
        found = []
        with self._path.open() as log:
            log.seek(self._at)
            while (line := log.readline()).endswith("\n"):
                self._at = log.tell()
                event = json.loads(line)
                if event["user"]["username"] == self._user and event["verb"] != "watch":
                    found.append(_call(event))
        return found


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process has used: CPU seconds, resident bytes, at a monotonic time."""

    cpu: float
    resident: int
    at: float


class Lab:
    """See the module; made by `scale_lab`."""

    def __init__(self, cluster: Cluster, api: Api) -> None:
        self.cluster = cluster
        self.api = api
        self.port = 0
        self.forced_after: float | None = None
        """Seconds until the operator removes a pod by force that outlived its grace period; None: its own 30."""
        self.defaults: Obj = {"image": "localhost/none"}
        """What an operator that is started gives each engine."""
        self.calls = AuditLog(cluster, USER).calls
        """The operator's requests since this was last asked."""

    def start_operator(
        self,
        *flags: str,
        seconds: float = 30.0,
        name: str = "operator",
        elect: bool = False,
        source: Path | None = None,
    ) -> None:
        """Start the operator and wait until it has listed everything.

        Args:
            flags: More of its flags.
            seconds: Until it must be ready.
            name: Of the process, if there are several; `metrics` asks the one that was started last.
            elect: It leads only while it holds a Lease, as several must.
            source: Folder of the packages, if they are of another version.
        """
        self.port = free_ports(1)[0]
        config = self.cluster.state / "operator.json"
        config.write_text(json.dumps({"engines": dict.fromkeys(ENGINES, self.defaults)}))
        account = self.cluster.service_account_kubeconfig(SYSTEM, ACCOUNT)
        forced = self.forced_after
        program = ["-m", "rollout_operator"] if forced is None else ["-c", HURRIED.format(forced)]
        command: list[str | Path] = [
            sys.executable, *program, "run",
            "--leader-elect" if elect else "--no-leader-elect",
            "--config", config, "--http-host", "127.0.0.1", "--http-port", str(self.port),
            "--service-account", ACCOUNT, "--lease-namespace", SYSTEM, *flags,
        ]  # fmt: skip
        environment = {"KUBECONFIG": str(account), "OMP_NUM_THREADS": "1"}
        if source is not None:
            environment["PYTHONPATH"] = str(source)
        processes.spawn(self.cluster.state, name, command, environment)
        eventually("the operator is ready", partial(self._is_ready, name), seconds, every=0.02)

    def install_chart(self, verb: str, tree: Path = ROOT) -> None:
        """`helm install` or `upgrade` with the chart of a tree, without an operator."""
        self.cluster.helm(
            verb, ACCOUNT, tree / "charts/rollout-operator", "--namespace", SYSTEM,
            "--create-namespace", "--set", "replicaCount=0",
            "--set", f"workers.namespaces={{{NAMESPACE}}}",
        )  # fmt: skip

    def stop_operator(self, name: str = "operator") -> None:
        processes.stop(self.cluster.state, name)

    def _is_ready(self, name: str) -> bool:
        processes.require_alive(self.cluster.state, name)
        try:
            url = f"http://127.0.0.1:{self.port}/readyz"
            return httpx.get(url, timeout=5, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def usage(self, name: str = "operator") -> Usage:
        """What a process of this cluster, else the operator, has used so far."""
        process = processes.recorded(self.cluster.state, name)
        assert process is not None, f"{name} does not run"
        return usage_of(process.pid)

    def metrics(self) -> dict[str, dict[tuple[str, ...], float]]:
        """The operator's samples: name → label values → value."""
        page = self._metrics_page()
        found: dict[str, dict[tuple[str, ...], float]] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
        return found

    def samples(self, name: str) -> list[float]:
        """Return the values of one metric; reading the whole page of a thousand pools takes seconds."""
        begins = (f"{name}{{", f"{name} ")
        lines = self._metrics_page().splitlines()
        return [float(line.rpartition(" ")[2]) for line in lines if line.startswith(begins)]

    def _metrics_page(self) -> str:
        url = f"http://127.0.0.1:{self.port}/metrics"
        return httpx.get(url, timeout=10, trust_env=False).text

    def writes(self) -> list[Call]:
        """Those of `calls` that changed something or tried to."""
        return [call for call in self.calls() if call.is_write]

    def push(self, version: int, nth: int) -> None:
        """Let a trainer push this version of epoch 1 to every nth pod that has ever been asked."""
        params = {"epoch": 1, "version": version, "nth": nth}
        answer = httpx.post(f"{CONTROL}/push", params=params, timeout=30, trust_env=False)
        answer.raise_for_status()

    def counts(self) -> Counter[str]:
        """How often each route of the control ports was asked."""
        answer = httpx.get(f"{CONTROL}/counts", timeout=5, trust_env=False)
        return Counter(answer.json())

    def create(self, *pools: Obj) -> None:
        for pool in pools:
            self.api.create(POOLS.format(NAMESPACE), pool)

    def patch(self, name: str, **spec: Any) -> None:
        self.api.patch(f"{POOLS.format(NAMESPACE)}/{name}", {"spec": spec})

    def pools(self) -> dict[str, Obj]:
        found = self.api.items(POOLS.format(NAMESPACE))
        return {pool["metadata"]["name"]: pool for pool in found}

    def pool(self, name: str) -> Obj:
        return self.api.get(f"{POOLS.format(NAMESPACE)}/{name}")

    def await_pods(self, count: int, seconds: float) -> None:
        """Wait until there are so many pods; they are counted without their transfer."""

        def found() -> int:
            page = self.api.get(PODS.format(NAMESPACE), limit="1")
            return len(page["items"]) + int(page["metadata"].get("remainingItemCount", 0))

        eventually(f"there are {count} pods", lambda: found() == count, seconds, 1.0, seen=found)

    def pods(self, pool: str | None = None) -> list[Obj]:
        selector = f"rollout.dev/pool={pool}" if pool else ""
        return self.api.items(PODS.format(NAMESPACE), selector)

    def await_condition(self, kind: str, names: set[str], seconds: float) -> float:
        """Wait until the condition is True for all of these pools; return the seconds it took."""
        began = time.monotonic()

        def missing() -> dict[str, Obj | None]:
            pools = self.pools()
            return {n: pools.get(n) for n in sorted(names) if not holds(pools.get(n), kind)}

        def example() -> str:
            left = missing()
            name = next(iter(left), "")
            return f"{len(left)} of {len(names)} not, as {name!r}: {left.get(name)}"

        # A list of a thousand pools costs the API server and this process 0.1 s each.
        every = max(0.1, len(names) / 1000)
        eventually(f"the pools are {kind}", lambda: not missing(), seconds, every, seen=example)
        return time.monotonic() - began

    def await_silence(self, quiet: float, seconds: float) -> float:
        """Wait until the operator has written nothing for `quiet` seconds.

        Returns: how long it took until the last write, from now.
        """
        began = last = time.monotonic()
        while time.monotonic() - last < quiet:
            if self.writes():
                last = time.monotonic()
            if time.monotonic() - began > seconds:
                raise AssertionError(f"the operator still writes after {seconds:g} s")
            time.sleep(0.1)
        return last - began


def _call(event: Mapping[str, Any]) -> Call:
    ref = event.get("objectRef", {})
    parts = (ref.get("resource", ""), ref.get("subresource", ""))
    code = event.get("responseStatus", {}).get("code", 0)
    return Call(event["verb"], "/".join(filter(None, parts)), ref.get("name", ""), code)


def usage_of(pid: int) -> Usage:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    cpu = (int(fields[11]) + int(fields[12])) / TICKS
    resident = int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    return Usage(cpu, resident, time.monotonic())


def holds(pool: Obj | None, kind: str) -> bool:
    """Whether a condition is True for the pool's current generation."""
    if pool is None:
        return False
    generation = pool["metadata"]["generation"]
    return any(
        c["type"] == kind and c["status"] == "True" and c.get("observedGeneration") == generation
        for c in (pool.get("status") or {}).get("conditions", ())
    )


def processless_pool(name: str, **spec: Any) -> Obj:
    """A pool for kwok's nodes; `nodeSelector` keeps it off nodes that nobody plays."""
    body = {
        "engine": {"type": "hf"},
        "model": {"source": {"path": "/models/tiny"}},
        "drainSeconds": 0,
        "podTemplate": {"nodeSelector": {"kubernetes.io/hostname": "fake-1"}},
    } | spec
    return replica(body, name=name, namespace=NAMESPACE)


@contextmanager
def scale_lab(name: str) -> Iterator[Lab]:
    """Start the cluster with everything but the operator; remove it at the end.

    Raises:
        ClusterError: not root (the pods' addresses are routed to this machine).
    """
    if os.geteuid() != 0:
        raise ClusterError(
            "pods without processes need root, as their addresses are routed here: run it with sudo"
        )
    cluster = Cluster.start(name)
    try:
        with Api(cluster) as api:
            lab = Lab(cluster, api)
            _prepare(lab)
            yield lab
    finally:
        network.deliver_nowhere(cluster.settings.network)
        if not os.environ.get("ROLLOUT_KEEP_CLUSTER"):
            Cluster.remove(name)


def _prepare(lab: Lab) -> None:
    cluster = lab.cluster
    server = [sys.executable, "-m", "tests.support.cluster.processless"]
    path = os.pathsep.join(filter(None, sys.path))
    processes.spawn(cluster.state, "processless", server, {"PYTHONPATH": path})
    cluster.start_kwok(gpus=FAKE_GPUS, local=True)
    cluster.kubectl("create", "namespace", NAMESPACE)
    lab.install_chart("install")
    await_crd(cluster)

    def answers() -> bool:
        processes.require_alive(cluster.state, "processless")
        try:
            httpx.get(f"{CONTROL}/counts", timeout=5, trust_env=False)
        except httpx.TransportError:
            return False
        return True

    eventually("the control ports answer", answers, every=0.05)
