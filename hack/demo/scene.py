"""The cluster under the demo: one of our own, or the user's."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import images
import rollout_local
from localkube import Cluster, ClusterError, build, debian, preflight
from localkube.home import DEFAULT_NAME, cache

from .stage import DemoError, Stage

NAMESPACE = "demo"
# Big enough (130 MB) that sleep shows in the memory.
SHAPE = ("--hidden", "512", "--intermediate", "2048", "--layers", "8")
LOCAL_CLUSTER = "unset CLUSTER and KUBECONFIG, and the demo makes a cluster of its own"
MODEL_SCRIPT = Path(__file__).resolve().parents[1] / "tinymodel.py"


@dataclass(frozen=True, slots=True)
class Scene:
    """A cluster with the operator on it, and claims with models in the demo's namespace."""

    stage: Stage
    models: Path | None = None
    """Folder of this machine behind the claims, if it is one."""

    state: Path | None = None
    """Folder of the cluster's state, if it is one of this machine."""

    prometheus: Path | None = None
    hints: tuple[str, ...] = ()


def run_story(text: str | None, tell: Callable[[], object]) -> int:
    """Print `text` if the command line asks for help, else tell a story; return the exit status."""
    if "-h" in sys.argv or "--help" in sys.argv:
        print(text)
        return 0
    try:
        tell()
    except (DemoError, ClusterError) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    return 0


def wanted_steps(default: int) -> int:
    """Return how many steps a trainer should do; ask before anything is built for minutes.

    Raises:
        DemoError: STEPS is not a number of steps.
    """
    said = os.environ.get("STEPS") or str(default)
    if not said.isdecimal() or int(said) < 1:
        raise DemoError(f"STEPS={said!r}: give a whole number of at least 1")
    return int(said)


def local_scene(
    namespace: str = NAMESPACE, shape: tuple[str, ...] = SHAPE, *, devices: int = 0
) -> Scene:
    """Make a cluster, the images and the models; what is there already is used again.

    Args:
        namespace: of the pool; the models' folder in the cache bears its name, too.
        shape: flags of tinymodel.py.
        devices: fake devices of the node; with some, the namespace gets the node's lock directory.
    """
    stage = Stage({}, namespace)
    with stage.step("A Kubernetes cluster of our own: etcd to kubelet, all real"):
        preflight.root("the demo's cluster")
        debian.ensure(debian.NODE_PACKAGES)
        preflight.real_nodes()
        build.build(without=("kwok",))  # minutes, for what only tests need
        cluster = Cluster.start(DEFAULT_NAME, nodes=1, devices=devices)
        stage.environment |= cluster.environment()
        stage.run("kubectl", "get", "nodes", show=True)
    with stage.step("Images of the operator and the worker, built and put onto the node"):
        images.build()
        images.load(cluster)
    with stage.step("Tiny Qwen2 models from seeds: a checkpoint and versions of its weights"):
        folder = rollout_local.make_models(cache() / "models" / namespace, *shape)
        stage.say("models/tiny (seed 1), weights/1 (seed 2), weights/2 (seed 3), …")
    with stage.step("helm install: CRD, operator, rights, admission policy"):
        shared = {"colocation": rollout_local.colocation(namespace)} if devices else {}
        rollout_local.install(cluster, namespace, **shared)
        rollout_local.claims(cluster, namespace, folder)
        stage.run("helm", "-n", rollout_local.SYSTEM, "list", show=True)
        stage.run("kubectl", "-n", rollout_local.SYSTEM, "get", "pods", show=True)
    program = cache() / "prometheus" / "usr" / "bin" / "prometheus"
    return Scene(
        stage,
        models=folder,
        state=cluster.state,
        prometheus=program if program.exists() else None,
        hints=('eval "$(python3 hack/cluster/cluster.py env)"',),
    )


def existing_scene() -> Scene:
    """Install onto the cluster that kubectl reaches; a Job makes the models on claims there."""
    for program in ("kubectl", "helm"):
        if shutil.which(program) is None:
            raise DemoError(f"{program} is not on the PATH: install it, or {LOCAL_CLUSTER}")
    operator, worker = os.environ.get("OPERATOR_IMAGE"), os.environ.get("WORKER_IMAGE")
    if not operator or not worker or ":" not in operator:
        raise DemoError(
            "set OPERATOR_IMAGE and WORKER_IMAGE to repository:tag of images that your nodes can "
            f"pull (docker build --target operator . and --target worker-hf .), or {LOCAL_CLUSTER}"
        )
    stage = Stage({}, NAMESPACE)
    with stage.step("helm install onto your cluster"):
        repository, tag = operator.rsplit(":", 1)
        values = {
            "image.repository": repository,
            "image.tag": tag,
            "engines.hf.image": worker,
            "workers.namespaces[0]": NAMESPACE,
        }
        stage.apply(rollout_local.namespace_manifest(NAMESPACE, "baseline"))
        settings = [word for k, v in values.items() for word in ("--set", f"{k}={v}")]
        stage.run(
            "helm", "upgrade", "--install", rollout_local.RELEASE, rollout_local.CHART,
            "--namespace", rollout_local.SYSTEM, "--create-namespace", "--wait", *settings,
        )  # fmt: skip
    with stage.step("Tiny models from seeds, made by a Job on two claims"):
        stage.apply(*model_objects(worker))
        stage.kubectl("wait", "job/make-models", "--for=condition=Complete", "--timeout=280s")
    return Scene(stage)


def model_objects(image: str) -> list[dict[str, Any]]:
    """Return claims of the default storage class, and a Job that writes the models onto them."""
    claims = [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name},
            "spec": {
                "accessModes": [os.environ.get("ACCESS_MODE", "ReadWriteOnce")],
                "resources": {"requests": {"storage": "1Gi"}},
            },
        }
        for name in ("models", "weights")
    ]
    script = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "make-models"},
        "data": {"tinymodel.py": MODEL_SCRIPT.read_text()},
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "make-models"},
        "spec": {"backoffLimit": 2, "template": {"spec": _model_pod(image)}},
    }
    return [*claims, script, job]


def _model_pod(image: str) -> dict[str, Any]:
    make = "python3 /script/tinymodel.py"
    commands = (
        f"{make} /models/tiny --seed 1",
        f"{make} /weights/1 --seed 2 --weights-only",
        f"{make} /weights/2 --seed 3 --weights-only",
    )
    mounts = {"models": "/models", "weights": "/weights", "script": "/script"}
    sources = {
        "models": {"persistentVolumeClaim": {"claimName": "models"}},
        "weights": {"persistentVolumeClaim": {"claimName": "weights"}},
        "script": {"configMap": {"name": "make-models"}},
    }
    return {
        "restartPolicy": "Never",
        "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "fsGroup": 65532},
        "containers": [
            {
                "name": "make",
                "image": image,
                "command": ["sh", "-c", " && ".join(commands)],
                "volumeMounts": [{"name": n, "mountPath": p} for n, p in mounts.items()],
            }
        ],
        "volumes": [{"name": n, **source} for n, source in sources.items()],
    }
