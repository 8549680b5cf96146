"""The demo's actions on its pool, done as a user would."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from .stage import Stage

NAME = "tiny"
PROMPT = [5, 6, 7, 8, 9, 100, 200, 300]


class DemoPool:
    """The RolloutReplica of the story."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def show(self) -> None:
        self.stage.kubectl("get", "rr", NAME, "-o", "wide", show=True)

    def exists(self) -> bool:
        return bool(self.stage.kubectl("get", "rr", NAME, "--ignore-not-found", "-o", "name"))

    def remove(self) -> None:
        self.stage.kubectl("delete", "rr", NAME, "--wait=false", show=True)
        words = ("get", "pods,services", "-l", f"rollout.dev/pool={NAME}", "-o", "name")
        self.stage.until("the pool is gone", lambda: not self.stage.kubectl(*words).strip(), 120)

    def condition(self, kind: str) -> bool:
        conditions = self.stage.pool_status(NAME).get("conditions", ())
        return any(c["type"] == kind and c["status"] == "True" for c in conditions)

    def wait(self, what: str, look: Callable[[], Any], seconds: float = 120.0) -> None:
        """Wait, and print each new sentence of the status."""
        self.stage.watch_pool(NAME, what, look, seconds)

    def generate(self) -> dict[str, Any]:
        """Ask the Service for eight greedy tokens and print the main parts of the answer."""
        path = f"/api/v1/namespaces/{self.stage.namespace}/services/{NAME}:8000/proxy/v1/generate"
        sampling = {"temperature": 0, "max_tokens": 8}
        body = json.dumps({"token_ids": PROMPT, "sampling": sampling})
        text = self.stage.kubectl("create", "--raw", path, "-f", "-", text=body)
        answer: dict[str, Any] = json.loads(text)
        output = answer["outputs"][0]
        span = output["weights"][0]
        self.stage.say(f"POST /v1/generate {body}")
        self.stage.say(f"  token_ids {output['token_ids']}")
        self.stage.say(f"  logprobs  {[round(x, 3) for x in output['logprobs']]}")
        self.stage.say(f"  weights   epoch {span['epoch']}, version {span['version']}")
        return answer

    def patch(self, **spec: Any) -> None:
        body = json.dumps({"spec": spec})
        self.stage.kubectl("patch", "rr", NAME, "--type=merge", "-p", body, show=True)

    def endpoints(self) -> list[str]:
        found = json.loads(
            self.stage.kubectl(
                "get", "endpointslices", "-l", f"kubernetes.io/service-name={NAME}", "-o", "json"
            )
        )
        return [
            address
            for piece in found["items"]
            for endpoint in piece.get("endpoints") or ()
            if endpoint.get("conditions", {}).get("ready")
            for address in endpoint["addresses"]
        ]

    def memory(self) -> float:
        """Return the resident MiB of the first worker by its own metric."""
        path = f"/api/v1/namespaces/{self.stage.namespace}/pods/{NAME}-0-0:8000/proxy/metrics"
        page = self.stage.kubectl("get", "--raw", path)
        lines = [x for x in page.splitlines() if x.startswith("rollout_worker_memory_resident")]
        return float(lines[0].rsplit(" ", 1)[1]) / 2**20
