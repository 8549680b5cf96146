"""A RolloutReplica on a real cluster, as a test drives it: the API, HTTP, signals and kubectl; the operator that leads.

Tests look often: they ask the API server themselves, without a process for each look. kubectl is
for what people do with it.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import httpx

import rollout_local
from localkube import Cluster
from localkube.processes import process_in, processes_in
from tests.support.api.apiclient import PODS, POOLS, SERVICES, SLICES, Obj, api_of
from tests.support.manifests import replica
from tests.support.waiting import eventually

PROMPT = [5, 6, 7, 8, 9, 100, 200, 300]
START_SECONDS = 180.0
"""A worker imports torch and loads its model on a busy core."""


T = TypeVar("T")

_HTTP = httpx.Client(
    trust_env=False,
    # The address of a dead pod answers nothing at all.
    timeout=httpx.Timeout(60, connect=10),
    # Every request is a new connection: the Service chooses a replica for each.
    limits=httpx.Limits(max_keepalive_connections=0),
)


def manifest(name: str, **spec: Any) -> dict[str, Any]:
    """The pool of examples/hf.yaml with these top-level spec fields changed."""
    base: dict[str, Any] = {
        "replicas": 1,
        "engine": {"type": "hf"},
        "model": {"source": {"claim": {"name": "models", "subPath": "tiny"}}},
        "weights": {"volume": {"claim": {"name": "weights"}}},
        "drainSeconds": 5,
    }
    base.update(spec)
    return replica(base, name=name)


class Pool:
    """One RolloutReplica; every wait has a deadline and says what it saw."""

    def __init__(self, cluster: Cluster, namespace: str, name: str) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.name = name
        self.api = api_of(cluster)
        self.path = f"{POOLS.format(namespace)}/{name}"
        self.selector = f"rollout.dev/pool={name}"

    def eventually(
        self, what: str, look: Callable[[], T], seconds: float = 30.0, every: float = 0.1
    ) -> T:
        """Wait for something about this pool; what fails shows its status."""
        return eventually(what, look, seconds, every, seen=self.status)

    def kubectl(self, *words: str, **options: Any) -> str:
        return self.cluster.kubectl("-n", self.namespace, *words, **options)

    def apply(self, **spec: Any) -> Pool:
        """Create the pool, or change it as `kubectl apply` does."""
        self.kubectl("apply", "-f", "-", input=json.dumps(manifest(self.name, **spec)))
        return self

    def patch(self, **spec: Any) -> None:
        self.api.patch(self.path, {"spec": spec})

    def annotate(self, **notes: str | None) -> None:
        """Set annotations of our group; None drops one."""
        annotations = {f"rollout.dev/{name.replace('_', '-')}": v for name, v in notes.items()}
        self.api.patch(self.path, {"metadata": {"annotations": annotations}})

    def target(self, epoch: int, version: int, path: str, **weights: Any) -> None:
        where: dict[str, Any] = {"checkpoint": {}} if path == "checkpoint" else {"path": path}
        source = {"path": None, "checkpoint": None, "pushed": None, **where}
        self.patch(
            weights={"target": {"epoch": epoch, "version": version, "source": source}, **weights}
        )

    def get(self) -> Obj:
        return self.api.get(self.path)

    def status(self) -> dict[str, Any]:
        """Its status, empty before the first write."""
        answer: dict[str, Any] = self.get().get("status") or {}
        return answer

    def condition(self, kind: str) -> tuple[str, str]:
        """Status and reason of a condition, of the current generation only."""
        pool = self.get()
        for condition in (pool.get("status") or {}).get("conditions", ()):
            if condition["type"] == kind:
                current = condition.get("observedGeneration") == pool["metadata"]["generation"]
                return (condition["status"] if current else "Stale", condition["reason"])
        return ("Missing", "")

    def wait(self, kind: str, status: str = "True", seconds: float = START_SECONDS) -> None:
        self.eventually(f"{kind} is {status}", lambda: self.condition(kind)[0] == status, seconds)

    def committed(self) -> tuple[int, int]:
        weights = self.status()["weights"]["committed"]
        return weights["epoch"], weights["version"]

    def pods(self) -> list[Obj]:
        return self.api.items(PODS.format(self.namespace), self.selector, fresh=True)

    def pod(self, replica: int = 0) -> Obj:
        """The head pod of a replica."""
        return self.api.get(f"{PODS.format(self.namespace)}/{self.name}-{replica}-0")

    def service(self) -> Obj:
        return self.api.get(f"{SERVICES.format(self.namespace)}/{self.name}")

    def endpoints(self) -> list[str]:
        """Ready addresses behind the data Service."""
        selector = f"kubernetes.io/service-name={self.name}"
        return [
            address
            for piece in self.api.items(SLICES.format(self.namespace), selector, fresh=True)
            for endpoint in piece.get("endpoints") or ()
            if endpoint.get("conditions", {}).get("ready")
            for address in endpoint["addresses"]
        ]

    def url(self, replica: int | None = None) -> str:
        """Data port of the Service, or of one replica's head."""
        if replica is not None:
            return f"http://{self.pod(replica)['status']['podIP']}:8000"
        return f"http://{self.service()['spec']['clusterIP']}:8000"

    def generate(self, replica: int | None = None, tokens: int = 8, **body: Any) -> dict[str, Any]:
        """Greedy tokens from the Service, or from one replica's head."""
        request: Mapping[str, Any] = {
            "token_ids": PROMPT,
            "sampling": {"temperature": 0, "max_tokens": tokens, "ignore_eos": True},
            **body,
        }
        answer = _HTTP.post(f"{self.url(replica)}/v1/generate", json=request)
        assert answer.status_code == 200, answer.text
        parsed: dict[str, Any] = answer.json()
        return parsed

    def identities(self, answer: dict[str, Any]) -> list[tuple[int, int]]:
        """Identities of an answer's first output, in order."""
        return [(s["epoch"], s["version"]) for s in answer["outputs"][0]["weights"]]

    def metric(self, name: str, replica: int = 0) -> float:
        """Sum of a worker's metric over its labels."""
        page = _HTTP.get(f"{self.url(replica)}/metrics", timeout=10).text
        values = [
            float(line.rsplit(" ", 1)[1])
            for line in page.splitlines()
            if line.split("{")[0].split(" ")[0] == name
        ]
        assert values, f"{name} is not on the page"
        return sum(values)

    def pid(self, replica: int = 0) -> int:
        """Process of the worker, as this machine numbers it."""
        return process_in(self.pod(replica)["metadata"]["uid"], "rollout-worker")

    def kill(self, replica: int = 0) -> None:
        """Kill -9 the worker."""
        os.kill(self.pid(replica), signal.SIGKILL)

    @contextmanager
    def frozen(self, replica: int = 0) -> Iterator[None]:
        """SIGSTOP the worker: it answers nothing, as one that hangs."""
        pid = self.pid(replica)
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def delete(self, seconds: float = 60.0) -> None:
        """Delete the pool and wait until nothing of it is left."""
        self.api.delete(self.path)
        eventually(f"{self.name} is gone", lambda: not self.left(), seconds, seen=self.left)

    def left(self) -> list[str]:
        """Names of what is left of the pool, as `<kind>/<name>`."""
        return [
            f"{kind}/{child['metadata']['name']}"
            for kind, path in (("pod", PODS), ("service", SERVICES))
            for child in self.api.items(path.format(self.namespace), self.selector, fresh=True)
        ]


LEASE = (
    f"/apis/coordination.k8s.io/v1/namespaces/{rollout_local.SYSTEM}/leases/{rollout_local.RELEASE}"
)
TAKEOVER_SECONDS = 60.0
"""The Lease of a killed leader runs out after 15 s; then the standby reads everything anew."""


def leader(cluster: Cluster) -> str:
    """Identity of the operator that leads: `<pod>_<uuid>`; empty if nobody does."""
    holder: str = api_of(cluster).get(LEASE)["spec"].get("holderIdentity") or ""
    return holder


def kill_leader(cluster: Cluster) -> str:
    """Kill -9 the leading operator; returns its identity."""
    holder = leader(cluster)
    pod = api_of(cluster).get(f"{PODS.format(rollout_local.SYSTEM)}/{holder.split('_')[0]}")
    found = processes_in(pod["metadata"]["uid"], "rollout-operator")
    assert found, f"no process of {holder}"
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    return holder


def await_takeover(cluster: Cluster, before: str) -> None:
    what = f"somebody but {before} leads"
    eventually(what, lambda: leader(cluster) not in (before, ""), TAKEOVER_SECONDS)
