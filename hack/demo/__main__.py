"""Tell the whole story of a RolloutReplica on a real cluster, each step with its time.

    make demo                      a local cluster, made by this repository (needs root)
    CLUSTER=existing make demo     the cluster of $KUBECONFIG: give OPERATOR_IMAGE, WORKER_IMAGE
                                   (repository:tag of images its nodes can pull)

The cluster stays up afterwards; `make clean` removes it.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from demo import monitoring
from demo.pool import NAME, DemoPool
from demo.scene import Scene, existing_scene, local_scene, run_story
from demo.stage import DemoError
from localkube.home import clusters

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "hf.yaml"


def _is_users_cluster() -> bool:
    """Whether KUBECONFIG is the user's own, not the one that `cluster.py env` exports."""
    config = os.environ.get("KUBECONFIG", "")
    ours = config.startswith(f"{clusters()}{os.sep}")
    return os.environ.get("CLUSTER") == "existing" or (bool(config) and not ours)


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
