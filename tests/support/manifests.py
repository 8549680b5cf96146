"""RolloutReplica manifests for tests: a small valid one and changes of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Document = dict[str, Any]


def pool(name: str = "demo", patch: Mapping[str, Any] | None = None) -> Document:
    """Return a valid pool with `patch` merged into its spec (None removes a field)."""
    spec: Document = {
        "engine": {"type": "hf"},
        "model": {"source": {"path": "/models/tiny"}},
    }
    return replica(merged(spec, patch or {}), name=name)


def replica(spec: Mapping[str, Any], **metadata: Any) -> Document:
    kind = {"apiVersion": "rollout.dev/v1alpha1", "kind": "RolloutReplica"}
    return {**kind, "metadata": metadata, "spec": spec}


def merged(base: Mapping[str, Any], patch: Mapping[str, Any]) -> Document:
    """Return the JSON merge patch (RFC 7386) of `base` by `patch`."""
    out = dict(base)
    for key, value in patch.items():
        if value is None:
            out.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(out.get(key), Mapping):
            out[key] = merged(out[key], value)
        else:
            out[key] = value
    return out


def text(document: Mapping[str, Any]) -> str:
    """Return the document as kubectl reads it."""
    return json.dumps(document)


GPU = {"resource": "nvidia.com/gpu"}


def target(epoch: int, version: int, path: str | None = "a") -> Document:
    """Return a change of spec that sets the target; no path: the checkpoint."""
    where: Document = {"checkpoint": {}} if path is None else {"path": path}
    return {"weights": {"target": {"epoch": epoch, "version": version, "source": where}}}


def pushed(epoch: int, version: int, *, instead_of: str | None = None) -> Document:
    """Return a change of spec that sets the target to pushed weights, as a merge patch clears others."""
    where: Document = {"pushed": {}} | ({instead_of: None} if instead_of else {})
    return {"weights": {"target": {"epoch": epoch, "version": version, "source": where}}}


def source(**fields: Any) -> Document:
    """Return a change of spec that sets another model source."""
    return {"model": {"source": {"path": None, **fields}}}


COLOCATED: Document = {
    "mode": "Colocated",
    "colocation": {
        "trainerSelector": {
            "matchLabels": {"job": "grpo"},
            "matchExpressions": [{"key": "role", "operator": "In", "values": ["rank", "head"]}],
        },
        "slots": 2,
        "request": "gpus",
    },
}
"""A change of spec that puts the engines beside a trainer."""

HYBRID: Document = {
    "mode": "Hybrid",
    "model": None,
    "colocation": {"trainerSelector": {"matchLabels": {"job": "grpo"}}},
}
"""A change of spec that puts the engines into a trainer's own processes."""

PROBE = {"initialDelaySeconds": 2, "periodSeconds": 3, "timeoutSeconds": 4, "failureThreshold": 5}

FULL: Document = {
    "operatorClass": "blue",
    "replicas": 4,
    "mode": "Standalone",
    "state": "Paused",
    "sleep": {"level": 2, "spill": {"medium": "Memory", "sizeLimit": "40Gi"}},
    "suspend": True,
    "engine": {
        "type": "vllm",
        "logprobs": "Raw",
        "image": "registry.example/vllm:1@sha256:" + "a" * 64,
        "imagePullPolicy": "IfNotPresent",
        "args": ["--max-num-seqs", "64"],
        "env": [
            {"name": "A", "value": ""},
            {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
            {"name": "C", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}},
            {"name": "D", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ],
        "cache": {"claim": {"name": "kernels", "subPath": "vllm"}},
    },
    "model": {
        "source": {
            "path": None,
            "hub": {
                "repo": "Qwen/Qwen3-0.6B",
                "revision": "main",
                "tokenSecret": {"name": "hub", "key": "token"},
            },
        },
        "servedName": "policy",
        "dtype": "bfloat16",
        "maxLength": 4096,
    },
    "parallelism": {"tensor": 8, "pipeline": 2, "data": 1, "nodes": 2},
    "accelerator": GPU,
    "resources": {
        "requests": {"cpu": 2, "memory": "16Gi"},
        "limits": {"cpu": "2500m", "rdma/hca": "1"},
        "claims": [{"name": "fabric", "request": "nic"}],
    },
    "weights": {
        "target": {"epoch": 1, "version": 7, "source": {"path": "steps/7"}},
        "volume": {"claim": {"name": "weights", "subPath": "run-1"}},
        "strategy": "Rolling",
        "maxUnavailable": 2,
        "inFlight": {"policy": "Keep", "deadlineSeconds": 5, "onDeadline": "Keep"},
        "deadlineSeconds": 60,
        "stagingMemory": "80Gi",
        "transport": {"port": 9002, "tls": "Required", "egress": "500M", "gangFetch": "All"},
    },
    "updateStrategy": {"maxUnavailable": 2, "maxSurge": 1, "partition": 1},
    "disruption": {"maxUnavailable": 2},
    "scheduling": {"gang": "PodGroup", "queue": "team"},
    "restartPolicy": {"baseDelaySeconds": 1, "maxDelaySeconds": 60, "maxRestarts": 5},
    "drainSeconds": 5,
    "worker": {"startTimeoutSeconds": 7200, "maxQueue": 64, "logLevel": "debug"},
    "serviceAccountName": "workers",
    "podTemplate": {
        "labels": {"team": "rl"},
        "annotations": {"example.com/note": "x"},
        "nodeSelector": {"gpu": "h200"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {"nodeAffinity": {}},
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {"team": "rl"}},
            }
        ],
        "volumes": [
            {"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}}
        ],
        "volumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
        "imagePullSecrets": [{"name": "pull"}],
        "priorityClassName": "high",
        "runtimeClassName": "nvidia",
        "schedulerName": "default-scheduler",
        "securityContext": {"runAsUser": 1000, "fsGroup": 1000},
        "initContainers": [
            {"name": "fill", "image": "busybox:1", "command": ["true"]},
            {"name": "mesh", "image": "mesh:1", "restartPolicy": "Always"},
        ],
        "sidecars": [{"name": "logs", "image": "logs:1", "env": [{"name": "A", "value": "b"}]}],
        "container": {
            "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
            "lifecycle": {"preStop": {"sleep": {"seconds": 2}}},
            "startupProbe": PROBE,
            "livenessProbe": PROBE,
            "readinessProbe": PROBE,
        },
        "resourceClaims": [
            {"name": "fabric", "resourceClaimTemplateName": "nics"},
            {"name": "shared", "resourceClaimName": "switch"},
        ],
        "hostNetwork": True,
        "hostIPC": True,
        "shareProcessNamespace": True,
    },
}
"""A change of spec that sets every field; of alternatives, one."""


def stateful_set(
    name: str, labels: Mapping[str, str], pods: int, spec: Mapping[str, Any]
) -> dict[str, Any]:
    """A trainer's pods, all started at once, each with a name below the set's."""
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": name},
        "spec": {
            "replicas": pods,
            "podManagementPolicy": "Parallel",
            "serviceName": name,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }
