"""A trainer on the tier's cluster that shares its devices with a pool, and the judge of both."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import rollout_local
from demo.judge import Judge, Report
from localkube import Cluster, fakedevices
from localkube.processes import process_in, recorded
from tests.support.api.apiclient import PODS, Obj, api_of
from tests.support.manifests import stateful_set
from tests.support.waiting import eventually

SCRIPT = Path(__file__).with_name("turn_trainer.py")
DONE = "INFO:trainer:trained"
"""What its log says after each turn that it had."""
LABELS = {"app": "trainer"}
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/{}/resourceclaims"
_ALWAYS = "requiredDuringSchedulingIgnoredDuringExecution"
DEVICES = 1
"""The hf engine computes on one."""

PROGRESS_SECONDS = 120.0
"""After a kill the worker starts anew, which imports torch and loads its model on a busy core."""


def claim_spec() -> dict[str, Any]:
    """What the trainer computes on."""
    exactly = {"deviceClassName": fakedevices.DRIVER, "count": DEVICES}
    return {"devices": {"requests": [{"name": "gpus", "exactly": exactly}]}}


def named_claim(name: str) -> Obj:
    """A claim that outlives the trainer's pod."""
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name},
        "spec": claim_spec(),
    }


def claim_template(name: str) -> Obj:
    """A template, of which each pod of the trainer gets a claim that goes with it."""
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name},
        "spec": {"spec": claim_spec()},
    }


def trainer(
    pool: str,
    claim: dict[str, str],
    *,
    name: str = "trainer",
    labels: dict[str, str] = LABELS,
    pods: int = 1,
    rollout_seconds: float = 0.5,
) -> Obj:
    """A StatefulSet of pods that take turns with a pool, each for itself and on a node of its own.

    Args:
        pool: Its name.
        claim: What a pod says of its claim.
        name: Of the StatefulSet.
        labels: Of its pods.
        pods: How many.
        rollout_seconds: How long the pool may serve between two turns of a pod.
    """
    local = rollout_local.LOCAL_VALUES["engines"]["hf"]
    volumes = {
        "turn": {"persistentVolumeClaim": {"claimName": "rollout-turn"}},
        "script": {"configMap": {"name": "trainer"}},
    }
    container = {
        "name": "train",
        "image": local["image"],
        "imagePullPolicy": "Never",
        "command": ["python3", f"/script/{SCRIPT.name}", pool, "$(NAMESPACE)"],
        "env": [
            {"name": name, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.{of}"}}}
            for name, of in (("NAMESPACE", "namespace"), ("POD_NAME", "name"))
        ]
        + [{"name": "ROLLOUT_SECONDS", "value": str(rollout_seconds)}],
        "resources": {"claims": [{"name": "gpus"}]},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": "turn", "mountPath": "/rollout/turn"},
            {"name": "script", "mountPath": "/script"},
            # The client's packages are there, beside the engine's.
            *local["podTemplate"]["volumeMounts"],
        ],
    }
    spec = {
        "serviceAccountName": "trainer",
        "terminationGracePeriodSeconds": 2,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "affinity": {"podAntiAffinity": {_ALWAYS: [_apart(labels)]}},
        "resourceClaims": [{"name": "gpus", **claim}],
        "containers": [container],
        "volumes": [
            *({"name": name, **source} for name, source in volumes.items()),
            *local["podTemplate"]["volumes"],
        ],
    }
    return stateful_set(name, labels, pods, spec)


def _apart(labels: dict[str, str]) -> Obj:
    return {"labelSelector": {"matchLabels": labels}, "topologyKey": "kubernetes.io/hostname"}


def surroundings(namespace: str) -> list[Obj]:
    """The trainer's script, account and rights."""
    group = "rbac.authorization.k8s.io"
    subject = {"kind": "ServiceAccount", "name": "trainer", "namespace": namespace}
    named = {"metadata": {"name": "trainer"}}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", **named},
        {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            **named,
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": "rollout-trainer"},
            "subjects": [subject],
        },
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            **named,
            "data": {SCRIPT.name: SCRIPT.read_text()},
        },
    ]


class Sharing:
    """Trainer and pool on the same devices, watched by the judge."""

    def __init__(self, cluster: Cluster, namespace: str, judge: Judge) -> None:
        self.cluster, self.namespace, self.judge = cluster, namespace, judge
        self.api = api_of(cluster)
        self.idle_mib = 0.0

    def apply(self, *items: Obj) -> None:
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
        self.cluster.kubectl("-n", self.namespace, "apply", "-f", "-", input=text)

    def trainer_pod(self, name: str = "trainer-0") -> Obj:
        return self.api.get(f"{PODS.format(self.namespace)}/{name}")

    def trainer_pid(self, name: str = "trainer-0") -> int:
        """Process of the trainer, as this machine numbers it."""
        return process_in(self.trainer_pod(name)["metadata"]["uid"], SCRIPT.name)

    @contextmanager
    def frozen_trainer(self, name: str = "trainer-0") -> Iterator[None]:
        """SIGSTOP the trainer: it keeps what it has."""
        pid = self.trainer_pid(name)
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def claim_of(self, pod: Obj) -> str:
        (entry,) = pod["spec"]["resourceClaims"]
        made = {each["name"]: each for each in pod["status"].get("resourceClaimStatuses", ())}
        name: str = entry.get("resourceClaimName") or made[entry["name"]]["resourceClaimName"]
        return name

    def having(self) -> set[str]:
        """Uids of the pods that have memory of any device now."""
        return set().union(*self.judge.having(self.idle_mib).values())

    def until_had_by(self, uid: str, seconds: float = PROGRESS_SECONDS) -> None:
        """Wait until a pod has memory of the devices."""
        what = f"pod {uid} has its turn"
        eventually(what, lambda: uid in self.having(), seconds, 0.02, seen=self.having)

    def both_have_turns(self, seconds: float = PROGRESS_SECONDS) -> None:
        """Wait until memory of a device has changed hands thrice from now on: each had a turn."""
        before = self.report().turns

        def moved() -> bool:
            now = self.report().turns
            return any(n >= before.get(device, 0) + 3 for device, n in now.items())

        eventually("the turn goes round", moved, seconds, 0.2, seen=self.report)

    def report(self) -> Report:
        return self.judge.report(self.idle_mib)

    @contextmanager
    def outage(self) -> Iterator[None]:
        """Let the API server answer nobody."""
        server = recorded(self.cluster.state, "kube-apiserver")
        assert server is not None
        os.kill(server.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(server.pid, signal.SIGCONT)
