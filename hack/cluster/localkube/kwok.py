"""Fake nodes whose pods are objects only, for scale: kwok writes the status a kubelet would."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from . import network, pki, processes
from .apiserver import ApiServer
from .build import module_folder
from .home import SOURCES, ClusterError, binaries
from .settings import Settings

READY_SECONDS = 60
ATTEMPTS = 5
POD_STAGES = SOURCES / "kwok/pods.yaml"
_ANNOTATION = "kwok.x-k8s.io/node"
_LEASE_SECONDS = 40
_ADMISSION = "admissionregistration.k8s.io/v1"
_ONCE = "kwok-deletes-each-pod-once"


def start(settings: Settings, nodes: int, gpus: int, *, local: bool) -> None:
    """Start kwok and add `nodes` ready nodes; see `Cluster.start_kwok`."""
    # What asks for a fake pod's address must not leave the machine.
    network.keep_inside(settings.network)
    if local:
        network.deliver_here(settings.network)
    node_stages = module_folder("sigs.k8s.io/kwok") / "kustomize/stage/node"
    configs = [
        node_stages / "fast/node-initialize.yaml",
        node_stages / "heartbeat-with-lease/node-heartbeat-with-lease.yaml",
        POD_STAGES,
    ]
    for config in configs:
        if not config.exists():
            raise ClusterError(f"{config} is missing: run `python3 hack/cluster/cluster.py build`")
    processes.stop(settings.state, "kwok")
    api = ApiServer(settings.address, settings.api_port, settings.pki)
    _let_delete_once(api)
    _start_program(settings, configs)
    names = [f"fake-{index}" for index in range(1, nodes + 1)]
    for name in names:
        _add_node(api, name, gpus)
    processes.await_true(
        settings.state,
        ["kwok"],
        lambda: all(api.is_node_ready(name) for name in names),
        f"{', '.join(names)} are not all Ready",
        READY_SECONDS,
    )


def _start_program(settings: Settings, configs: Sequence[Path]) -> None:
    flags = {
        "kubeconfig": settings.pki / f"{pki.KWOK}.kubeconfig",
        "manage-nodes-with-annotation-selector": f"{_ANNOTATION}=fake",
        "cidr": settings.network.fake_pods,
        "node-ip": settings.network.node(0),
        "node-lease-duration-seconds": _LEASE_SECONDS,
        "server-address": "",
    }
    command: list[str | Path] = [binaries() / "kwok"]
    command += [f"--{name}={value}" for name, value in flags.items()]
    command += [f"--config={config}" for config in configs]
    for _ in range(ATTEMPTS):
        process = processes.spawn(settings.state, "kwok", command)
        # It crashes on start now and then (0.8.0: "concurrent map writes"), within this time.
        time.sleep(1)
        if process.alive():
            return
    processes.require_alive(settings.state, "kwok")


def _let_delete_once(api: ApiServer) -> None:
    """Refuse kwok's deletions of pods that nobody else deletes.

    kwok 0.8.0 deletes a terminating pod by name, once for each change that it sees, and on a busy machine seconds late. So it
    deleted the next pod of that name, whose end was a change, too, and so on without end. A kubelet names the pod's uid.
    """
    pods = {"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"]}
    spec = {
        "matchConstraints": {"resourceRules": [{**pods, "operations": ["DELETE"]}]},
        "matchConditions": [
            {"name": "kwok", "expression": f"request.userInfo.username == '{pki.KWOK}'"}
        ],
        "validations": [{"expression": "has(oldObject.metadata.deletionTimestamp)"}],
    }
    binding = {"policyName": _ONCE, "validationActions": ["Deny"]}
    for kind, plural, body in (
        ("ValidatingAdmissionPolicy", "validatingadmissionpolicies", spec),
        ("ValidatingAdmissionPolicyBinding", "validatingadmissionpolicybindings", binding),
    ):
        made = {"apiVersion": _ADMISSION, "kind": kind, "metadata": {"name": _ONCE}, "spec": body}
        code, answer = api.request(f"/apis/{_ADMISSION}/{plural}", "POST", made)
        if code not in (201, 409):
            raise ClusterError(f"kwok's policy was refused: {answer}")


def _add_node(api: ApiServer, name: str, gpus: int) -> None:
    capacity = {"cpu": "1k", "memory": "16Ti", "pods": "10k"}
    if gpus:
        capacity["nvidia.com/gpu"] = str(gpus)
    metadata = {
        "name": name,
        "annotations": {_ANNOTATION: "fake"},
        "labels": {"kubernetes.io/hostname": name, "node.kubernetes.io/instance-type": "fake"},
    }
    status = {"capacity": capacity, "allocatable": capacity}
    node = {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": status}
    code, answer = api.request("/api/v1/nodes", "POST", node)
    if code not in (201, 409):
        raise ClusterError(f"{name} was refused: {answer}")
