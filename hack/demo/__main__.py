"""Tell the whole story of a RolloutReplica on a real cluster, each step with its time.

    make demo                      a local cluster, made by this repository (needs root)
    CLUSTER=existing make demo     the cluster of $KUBECONFIG: give OPERATOR_IMAGE, WORKER_IMAGE
                                   (repository:tag of images its nodes can pull)

The cluster stays up afterwards; `make clean` removes it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from demo import monitoring
from demo.scene import Scene, existing_scene, local_scene, run_story
from demo.stage import DemoError, Stage
from localkube.home import clusters

NAME = "tiny"
PROMPT = [5, 6, 7, 8, 9, 100, 200, 300]
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "hf.yaml"


def _is_users_cluster() -> bool:
    """Whether KUBECONFIG is the user's own, not the one that `cluster.py env` exports."""
    config = os.environ.get("KUBECONFIG", "")
    ours = config.startswith(f"{clusters()}{os.sep}")
    return os.environ.get("CLUSTER") == "existing" or (bool(config) and not ours)


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


def tell(scene: Scene) -> None:
    pool = DemoPool(scene.stage)
    _create(pool)
    _update(pool)
    _sleep(pool)
    _heal(pool)
    _observe(scene)
    _goodbye(scene)


def _create(pool: DemoPool) -> None:
    if pool.exists():
        with pool.stage.step("The pool of an earlier demo is removed"):
            pool.remove()
    with pool.stage.step("A RolloutReplica is applied and becomes Ready"):
        pool.stage.say(EXAMPLE.read_text().split("\n", 2)[2])
        pool.stage.kubectl("apply", "-f", str(EXAMPLE), show=True)
        pool.wait("the pool is Ready", lambda: pool.condition("Ready"))
        pool.show()
    with pool.stage.step("Two generations through the Service"):
        first, second = pool.generate(), pool.generate()
        if first["outputs"][0]["token_ids"] != second["outputs"][0]["token_ids"]:
            raise DemoError("two greedy generations of the same weights differ")


def _update(pool: DemoPool) -> None:
    epoch, version = 1, 1
    with pool.stage.step(f"New weights: the pointer moves to epoch {epoch}, version {version}"):
        began = time.monotonic()
        source = {"path": "/rollout/weights/1"}
        target = {"epoch": epoch, "version": version, "source": source}
        pool.patch(weights={"target": target})
        pool.wait("WeightsSynced", lambda: pool.condition("WeightsSynced"), 60)
        pool.stage.say(f"synced {time.monotonic() - began:.2f} s after the patch")
        answer = pool.generate()
        span = answer["outputs"][0]["weights"][0]
        if (span["epoch"], span["version"]) != (epoch, version):
            raise DemoError(f"the answer is labelled {span}")
        pool.show()


def _sleep(pool: DemoPool) -> None:
    before = pool.memory()
    with pool.stage.step("The pool falls asleep and gives its memory back"):
        pool.patch(state="Asleep")
        pool.wait("all asleep", lambda: pool.condition("Asleep"), 90)
        pool.stage.until("no endpoints", lambda: not pool.endpoints(), 30)
        pool.stage.say(f"resident memory of {NAME}-0-0: {before:.0f} MiB awake, "
                       f"{pool.memory():.0f} MiB asleep; endpoints: none")  # fmt: skip
        pool.show()
    with pool.stage.step("It wakes and answers as before"):
        pool.patch(state="Active")
        pool.wait("the pool is Ready", lambda: pool.condition("Ready"))
        pool.generate()


def _heal(pool: DemoPool) -> None:
    with pool.stage.step("A pod is killed and replaced; it serves only once it has the weights"):
        uid = pool.stage.get("pod", f"{NAME}-0-0")["metadata"]["uid"]
        words = ("delete", "pod", f"{NAME}-0-0", "--grace-period=0", "--force")
        pool.stage.say(f"$ kubectl {' '.join(words)}")
        pool.stage.kubectl(*words)

        def healed() -> bool:
            found = pool.stage.kubectl(
                "get", "pod", f"{NAME}-0-0", "--ignore-not-found", "-o", "jsonpath={.metadata.uid}"
            )
            return found not in ("", uid) and pool.condition("Ready")

        pool.wait("a new pod serves", healed)
        pool.show()
        pool.generate()


def _observe(scene: Scene) -> None:
    if scene.prometheus is None:
        scene.stage.say("Prometheus is left to your own cluster: see values metrics.podMonitor")
        return
    queries = {
        'rollout_worker_weights_version{namespace="demo"}': 2,
        "rollout_pool_replicas_ready": 1,
        'sum by (pod) (rollout_worker_generated_tokens_total{namespace="demo"})': 2,
    }
    with (
        scene.stage.step("Prometheus scrapes the annotated pods"),
        monitoring.prometheus(scene.stage, scene.prometheus) as address,
    ):
        monitoring.show(scene.stage, address, queries)


def _goodbye(scene: Scene) -> None:
    name = scene.stage.namespace
    print("\nThe cluster is still up. Try:")
    for line in (
        *scene.hints,
        f"kubectl -n {name} get rr -o wide",
        f"kubectl -n {name} describe rr {NAME}",
        f"kubectl -n {name} scale rr {NAME} --replicas=3",
        "kubectl explain rr.spec.weights",
        "make clean      # removes the cluster",
    ):
        print(f"  {line}")


if __name__ == "__main__":
    make_scene = existing_scene if _is_users_cluster() else local_scene
    sys.exit(run_story(__doc__, lambda: tell(make_scene())))
