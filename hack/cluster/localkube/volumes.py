"""Folders of this machine as claims: Pod Security `baseline` forbids a hostPath in the pod itself."""

from __future__ import annotations

import json
from pathlib import Path

from .home import ClusterError, cache

ENVIRONMENTS = {"hf": "venv", "vllm": "env-vllm", "sglang": "env-sglang"}
"""Folder of the cache with each engine's Python packages."""

ENVIRONMENT_MOUNT = "/opt/rollout-env"
"""Where worker images built by `hack/images.py` look for the heavy Python packages."""


def environment_claim(engine: str) -> str:
    return f"rollout-env-{engine}"


def claim_manifest(namespace: str, claim: str, folder: Path, *, writable: bool = False) -> str:
    """Return a PersistentVolume of a host folder and the claim bound to it, for `kubectl apply`."""
    folder = folder.absolute()
    if not folder.is_dir():
        raise ClusterError(f"{folder} is not a folder on this machine")
    volume = f"{namespace}-{claim}"
    modes = ["ReadWriteMany" if writable else "ReadOnlyMany"]
    capacity = {"storage": "1Ti"}
    host_path = {"path": str(folder), "type": "Directory"}
    items = [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume},
            "spec": {
                "capacity": capacity,
                "accessModes": modes,
                "persistentVolumeReclaimPolicy": "Retain",
                "storageClassName": "",
                "hostPath": host_path,
                "claimRef": {"namespace": namespace, "name": claim},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"namespace": namespace, "name": claim},
            "spec": {
                "accessModes": modes,
                "storageClassName": "",
                "volumeName": volume,
                "resources": {"requests": capacity},
            },
        },
    ]
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items}, indent=1) + "\n"


def environment_manifest(namespace: str, engine: str = "hf") -> str:
    folder = cache() / ENVIRONMENTS[engine]
    if not folder.is_dir():
        raise ClusterError(f"{folder} does not exist: make the environment of {engine} first")
    return claim_manifest(namespace, environment_claim(engine), folder)
