"""A RolloutReplica on a real cluster, as a test drives it: kubectl, HTTP and signals."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import httpx

from localkube import Cluster
from localkube.pods import process_in

PROMPT = [5, 6, 7, 8, 9, 100, 200, 300]
START_SECONDS = 180.0
"""A worker imports torch and loads its model on a busy core."""


T = TypeVar("T")


def eventually(what: str, look: Callable[[], T], seconds: float = 30.0, every: float = 0.1) -> T:
    """Return the first truthy answer of `look`; fail with the last one after the deadline."""
    end = time.monotonic() + seconds
    while True:
        answer = look()
        if answer:
            return answer
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds:g} s: {what}; last answer: {answer!r}")
        time.sleep(every)


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
    return {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "RolloutReplica",
        "metadata": {"name": name},
        "spec": base,
    }


class Pool:
    """One RolloutReplica; every wait has a deadline and says what it saw."""

    def __init__(self, cluster: Cluster, namespace: str, name: str) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.name = name

    def kubectl(self, *words: str, **options: Any) -> str:
        """Run kubectl in the pool's namespace."""
        return self.cluster.kubectl("-n", self.namespace, *words, **options)

    def apply(self, **spec: Any) -> Pool:
        """Create the pool, or change it as `kubectl apply` does."""
        self.kubectl("apply", "-f", "-", input=json.dumps(manifest(self.name, **spec)))
        return self

    def patch(self, **spec: Any) -> None:
        """Merge these fields into spec."""
        body = json.dumps({"spec": spec})
        self.kubectl("patch", "rr", self.name, "--type", "merge", "-p", body)

    def target(self, epoch: int, version: int, path: str, **weights: Any) -> None:
        """Move the pointer."""
        source: dict[str, Any] = {"checkpoint": {}} if path == "checkpoint" else {"path": path}
        self.patch(
            weights={"target": {"epoch": epoch, "version": version, "source": source}, **weights}
        )

    def get(self) -> dict[str, Any]:
        """The whole object."""
        answer: dict[str, Any] = json.loads(self.kubectl("get", "rr", self.name, "-o", "json"))
        return answer

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
        """Wait until a condition holds for the current generation."""
        end = time.monotonic() + seconds
        while self.condition(kind)[0] != status:
            if time.monotonic() > end:
                seen = self.status()
                raise AssertionError(f"{kind} is not {status} after {seconds:g} s: {seen}")
            time.sleep(0.1)

    def wait_update(self, phase: str, version: int, seconds: float = 60.0) -> dict[str, Any]:
        """Wait for a phase of the update to `version`; returns the status."""

        def look() -> dict[str, Any] | None:
            status = self.status()
            update = status.get("weights", {}).get("lastUpdate") or {}
            there = update.get("phase") == phase and update.get("version") == version
            return status if there else None

        found = eventually(f"update {version} is {phase}", look, seconds, every=0.05)
        assert found is not None
        return found

    def committed(self) -> tuple[int, int]:
        """Identity of the committed weights."""
        weights = self.status()["weights"]["committed"]
        return weights["epoch"], weights["version"]

    def pods(self) -> list[dict[str, Any]]:
        """All pods of the pool."""
        text = self.kubectl("get", "pods", "-l", f"rollout.dev/pool={self.name}", "-o", "json")
        items: list[dict[str, Any]] = json.loads(text)["items"]
        return items

    def pod(self, replica: int = 0) -> dict[str, Any]:
        """The head pod of a replica."""
        name = f"{self.name}-{replica}-0"
        answer: dict[str, Any] = json.loads(self.kubectl("get", "pod", name, "-o", "json"))
        return answer

    def endpoints(self) -> list[str]:
        """Ready addresses behind the data Service."""
        text = self.kubectl(
            "get", "endpointslices", "-l", f"kubernetes.io/service-name={self.name}", "-o", "json"
        )
        return [
            address
            for piece in json.loads(text)["items"]
            for endpoint in piece.get("endpoints") or ()
            if endpoint.get("conditions", {}).get("ready")
            for address in endpoint["addresses"]
        ]

    def url(self, replica: int | None = None) -> str:
        """Data port of the Service, or of one replica's head."""
        if replica is not None:
            return f"http://{self.pod(replica)['status']['podIP']}:8000"
        service = json.loads(self.kubectl("get", "service", self.name, "-o", "json"))
        return f"http://{service['spec']['clusterIP']}:8000"

    def generate(self, replica: int | None = None, tokens: int = 8, **body: Any) -> dict[str, Any]:
        """Greedy tokens from the Service, or from one replica's head."""
        request: Mapping[str, Any] = {
            "token_ids": PROMPT,
            "sampling": {"temperature": 0, "max_tokens": tokens, "ignore_eos": True},
            **body,
        }
        answer = httpx.post(
            f"{self.url(replica)}/v1/generate", json=request, timeout=60, trust_env=False
        )
        assert answer.status_code == 200, answer.text
        parsed: dict[str, Any] = answer.json()
        return parsed

    def identities(self, answer: dict[str, Any]) -> list[tuple[int, int]]:
        """Identities of an answer's first output, in order."""
        return [(s["epoch"], s["version"]) for s in answer["outputs"][0]["weights"]]

    def metric(self, name: str, replica: int = 0) -> float:
        """Sum of a worker's metric over its labels."""
        page = httpx.get(f"{self.url(replica)}/metrics", timeout=10, trust_env=False).text
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
        self.kubectl("delete", "rr", self.name, "--ignore-not-found", "--wait=false")
        eventually(f"{self.name} is gone", lambda: not self.left(), seconds)

    def left(self) -> str:
        """Names of what is left of the pool."""
        selector = f"rollout.dev/pool={self.name}"
        return self.kubectl("get", "pods,services", "-l", selector, "-o", "name").strip()
