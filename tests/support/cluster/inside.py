"""A trainer on the tier's cluster in whose own pods a pool runs: a StatefulSet with a worker in each."""

from __future__ import annotations

import json
from typing import Any

import rollout_local
from localkube import Cluster
from tests.support.api.apiclient import PODS, ApiError, Obj
from tests.support.cluster.pools import Pool
from tests.support.manifests import replica, stateful_set

LABELS = {"app": "hybrid-trainer"}
REPLICAS = 2


def trainer(name: str, pool: str, namespace: str) -> Obj:
    """Return the StatefulSet; each pod's worker takes two seconds of grace to end."""
    local = rollout_local.LOCAL_VALUES["engines"]["hf"]
    settings = {
        "ROLLOUT_ENGINE": "hf",
        "ROLLOUT_MODEL": "/rollout/model/tiny",
        "ROLLOUT_POOL": pool,
        "ROLLOUT_NAMESPACE": namespace,
        "ROLLOUT_AUTH": "kubernetes",
        "ROLLOUT_WEIGHTS_ROOTS": "/rollout/weights",
        "ROLLOUT_DRAIN_SECONDS": "1",
        "HOME": "/tmp",
    }
    volumes: dict[str, dict[str, object]] = {
        "model": {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}},
        "weights": {"persistentVolumeClaim": {"claimName": "weights", "readOnly": True}},
        "tmp": {"emptyDir": {}},
    }
    mounts = {"model": "/rollout/model", "weights": "/rollout/weights", "tmp": "/tmp"}
    container = {
        "name": "train",
        "image": local["image"],
        "imagePullPolicy": "Never",
        "args": ["serve"],
        "env": [{"name": key, "value": value} for key, value in settings.items()],
        "ports": [{"containerPort": 8000}, {"containerPort": 8001}],
        "volumeMounts": [
            *({"name": key, "mountPath": path} for key, path in mounts.items()),
            *local["podTemplate"]["volumeMounts"],
        ],
    }
    spec = {
        "serviceAccountName": "rollout-worker",
        "terminationGracePeriodSeconds": 2,
        "containers": [container],
        "volumes": [
            *({"name": key, **source} for key, source in volumes.items()),
            *local["podTemplate"]["volumes"],
        ],
    }
    return stateful_set(name, LABELS, REPLICAS, spec)


class Inside(Pool):
    """A Hybrid pool, whose pods are its trainer's."""

    def __init__(self, cluster: Cluster, namespace: str, name: str, trainer: str) -> None:
        super().__init__(cluster, namespace, name)
        self.trainer = trainer

    def make(self, **spec: Any) -> None:
        colocation = {"trainerSelector": {"matchLabels": LABELS}}
        own = {"mode": "Hybrid", "engine": {"type": "hf"}, "drainSeconds": 1}
        body = replica({**own, "colocation": colocation, **spec}, name=self.name)
        self.kubectl("apply", "-f", "-", input=json.dumps(body))

    def start_trainer(self) -> None:
        body = trainer(self.trainer, self.name, self.namespace)
        self.kubectl("apply", "-f", "-", input=json.dumps(body))

    def pod(self, replica: int = 0) -> Obj:
        return self.api.get(f"{PODS.format(self.namespace)}/{self.trainer}-{replica}")

    def address(self, replica: int) -> str:
        """Where that pod answers; empty until it has an address, and while it is made anew."""
        try:
            found: str = self.pod(replica)["status"].get("podIP", "")
        except ApiError as error:
            if error.status != 404:
                raise
            return ""
        return found
