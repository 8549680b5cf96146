"""Rollout on a local cluster: the chart with local images, models and claims for a namespace.

The demo and the cluster tests both stand on this. Needs the project's environment (the models
are made with it).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from localkube import Cluster, ClusterError
from localkube.home import REPOSITORY, cache

ENVIRONMENTS = {"hf": "venv", "vllm": "env-vllm", "sglang": "env-sglang"}
"""Folder of the cache with each engine's Python packages."""

ENVIRONMENT_MOUNT = "/opt/rollout-env"
"""Where worker images built by `hack/images.py` look for the heavy Python packages."""

SYSTEM = "rollout-system"
"""Namespace of the operator; Pod Security `restricted` is enforced there."""

NODES = "rollout-nodes"
"""Namespace of the DaemonSet that opens the lock directory: `baseline`, as it needs root."""

TURN_DIRECTORY = "/run/rollout-turn"
"""Lock directory of the local nodes: their own, as only /run is, and gone with them."""

RELEASE = "rollout-operator"
CHART = REPOSITORY / "charts" / "rollout-operator"


def environment_claim(engine: str) -> str:
    return f"rollout-env-{engine}"


def _engine_values(engine: str) -> dict[str, Any]:
    """Values of one engine: the light image, and the engine's environment from its claim.

    The image holds our code alone, so it is the same for every engine.
    """
    name = "engine-env"
    claim = {"claimName": environment_claim(engine), "readOnly": True}
    mount = {"name": name, "mountPath": ENVIRONMENT_MOUNT, "readOnly": True}
    return {
        "image": "localhost/rollout-worker-hf:dev",
        "imagePullPolicy": "Never",
        "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
        "podTemplate": {
            "volumes": [{"name": name, "persistentVolumeClaim": claim}],
            "volumeMounts": [mount],
        },
    }


LOCAL_VALUES: dict[str, Any] = {
    "image": {"repository": "localhost/rollout-operator", "tag": "dev", "pullPolicy": "Never"},
    "engines": {engine: _engine_values(engine) for engine in ENVIRONMENTS},
}


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in over.items():
        inner = out.get(key)
        both = isinstance(inner, Mapping) and isinstance(value, Mapping)
        out[key] = merged(inner, value) if both and isinstance(inner, Mapping) else value
    return out


def colocation(*namespaces: str) -> dict[str, Any]:
    """Return the chart's values that give these namespaces the nodes' lock directory."""
    return {
        "enabled": True,
        "namespaces": list(namespaces),
        "directory": TURN_DIRECTORY,
        "nodeNamespace": NODES,
    }


def namespace_manifest(name: str, level: str) -> dict[str, Any]:
    """Return a namespace at a level of Pod Security."""
    labels = {"pod-security.kubernetes.io/enforce": level}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


def namespace(cluster: Cluster, name: str, level: str) -> None:
    cluster.kubectl("apply", "-f", "-", input=json.dumps(namespace_manifest(name, level)))


def install(cluster: Cluster, *worker_namespaces: str, **values: Any) -> None:
    """Install or upgrade the operator with local images; waits until it is ready.

    Namespaces of an earlier call keep their service account and their lock directory.
    """
    namespace(cluster, SYSTEM, "restricted")
    for name in worker_namespaces:
        namespace(cluster, name, "baseline")
    if "colocation" in values:
        namespace(cluster, NODES, "baseline")
    earlier = _values(cluster)
    wanted = sorted({*worker_namespaces, *earlier.get("workers", {}).get("namespaces", ())})
    chosen = merged(
        LOCAL_VALUES,
        {
            "workers": {"namespaces": wanted},
            "colocation": earlier.get("colocation", {}),
            # The tag stays `dev`: only this tells the Deployment that the image is another one.
            "podAnnotations": {"rollout.dev/image": _stamp("rollout-operator")},
        },
    )
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(merged(chosen, values), file)
        file.flush()
        cluster.helm(
            "upgrade", "--install", RELEASE, CHART, "--namespace", SYSTEM,
            "--values", file.name, "--wait", "--timeout", "120s", timeout=150,
        )  # fmt: skip


def _stamp(image: str) -> str:
    file = cache() / "images" / f"{image}.stamp"
    return file.read_text().strip()[:16] if file.exists() else "none"


def _values(cluster: Cluster) -> dict[str, Any]:
    """Return the values of the installed release, nothing if there is none."""
    text = cluster.helm("get", "values", RELEASE, "-n", SYSTEM, "-o", "json", check=False)
    try:
        values: dict[str, Any] = json.loads(text) or {}
    except ValueError:
        return {}
    return values


def make_models(folder: Path | None = None, *shape: str) -> Path:
    """Make `models/tiny` and the versions `weights/1` to `weights/3` once; returns the folder.

    Args:
        folder: where; the cluster tests' folder if absent.
        shape: flags of tinymodel.py that make the model larger.
    """
    folder = folder or cache() / "models" / "local"
    wanted = {
        "models/tiny": ["--seed", "1"],
        "weights/1": ["--seed", "2", "--weights-only"],
        "weights/2": ["--seed", "3", "--weights-only"],
        "weights/3": ["--seed", "4", "--weights-only"],
        # Another shape: what a worker must refuse.
        "weights/bad": ["--seed", "5", "--weights-only", "--hidden", "64"],
    }
    for name, arguments in wanted.items():
        make_model(folder / name, *shape, *arguments)
    return folder


def make_model(out: Path, *flags: str) -> None:
    """Make one model, or one version of its weights, by flags of tinymodel.py; once."""
    if (out / "manifest.json").exists() or (out / "config.json").exists():
        return
    subprocess.run(
        [sys.executable, str(REPOSITORY / "hack" / "tinymodel.py"), str(out), *flags],
        check=True,
        timeout=300,
        stdout=subprocess.DEVNULL,
    )


def claim_manifest(namespace: str, claim: str, folder: Path, *, writable: bool = False) -> str:
    """Return a PersistentVolume of a folder of this machine and the claim bound to it, for `kubectl apply`.

    Pod Security `baseline` forbids a hostPath in the pod itself.
    """
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


def claims(cluster: Cluster, name: str, folder: Path) -> None:
    """Give a namespace its claims: `models`, `weights` and the environments that were made."""
    manifests = [
        claim_manifest(name, environment_claim(engine), cache() / environment)
        for engine, environment in ENVIRONMENTS.items()
        if (cache() / environment).is_dir()
    ]
    manifests += [
        claim_manifest(name, "models", folder / "models"),
        claim_manifest(name, "weights", folder / "weights", writable=True),
    ]
    cluster.kubectl("apply", "-f", "-", input="".join(manifests))
