"""One namespace of a test cluster as an admin or a person has it; the chart's roles and its admission policy there."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from localkube import Cluster, ClusterError
from tests.support.api.apiclient import MERGE, POOLS, api_of
from tests.support.charts import rendered
from tests.support.manifests import pool, text

PEOPLES_NAMESPACE = "admission"
PROBE = "probe"
"""A pool that is there from the start; nothing of it but `replicas` has changed."""

INSTALLED = {
    "ServiceAccount",
    "ClusterRole",
    "ClusterRoleBinding",
    "Role",
    "RoleBinding",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
}


STRICT = {"fieldValidation": "Strict"}
"""As kubectl asks: a field that nobody knows is refused."""


class Namespace:
    """Makes and changes pools in a namespace, or runs kubectl there, with this kubeconfig; fixtures make and delete it."""

    def __init__(self, cluster: Cluster, name: str, kubeconfig: Path | None = None) -> None:
        self.cluster = cluster
        self.name = name
        self.kubeconfig = kubeconfig or cluster.kubeconfig
        self._api = api_of(cluster)
        self._pools = POOLS.format(name)

    def create(self, manifest: dict[str, Any]) -> None:
        self._api.create(self._pools, manifest)

    def patch(self, name: str, spec: dict[str, Any]) -> None:
        self._api.patch(f"{self._pools}/{name}", {"spec": spec})

    def refused(self, manifest: dict[str, Any]) -> str:
        """Return the words with which a pool is refused; fail if it is not. Nothing is stored."""
        return self._api.refusal("POST", self._pools, manifest, dryRun="All", **STRICT)

    def refused_patch(self, name: str, spec: dict[str, Any]) -> str:
        path = f"{self._pools}/{name}"
        return self._api.refusal("PATCH", path, {"spec": spec}, kind=MERGE, **STRICT)

    def kubectl(self, *arguments: str, manifest: dict[str, Any] | None = None) -> str:
        """Return what kubectl prints; a manifest goes to its stdin (`-f -`)."""
        return self.cluster.kubectl(
            *("--kubeconfig", str(self.kubeconfig), "-n", self.name),
            *arguments,
            input=None if manifest is None else text(manifest),
        )

    def refusal(self, *arguments: str, manifest: dict[str, Any] | None = None) -> str:
        """Return the words with which the command is refused; fail if it is not."""
        with pytest.raises(ClusterError) as error:
            self.kubectl(*arguments, manifest=manifest)
        return str(error.value)


class Person(Namespace):
    """Someone with a kubeconfig of a service account, who does all by kubectl."""

    def __init__(self, cluster: Cluster, namespace: str, account: str) -> None:
        kubeconfig = cluster.service_account_kubeconfig(namespace, account)
        super().__init__(cluster, namespace, kubeconfig)

    def patch(self, name: str, spec: dict[str, Any]) -> None:
        self.kubectl("patch", "rr", name, "--type=merge", "-p", json.dumps({"spec": spec}))

    def refused_patch(self, name: str, spec: dict[str, Any]) -> str:
        return self.refusal("patch", "rr", name, "--type=merge", "-p", json.dumps({"spec": spec}))

    def may(self, verb: str, resource: str, subresource: str) -> bool:
        """Whether RBAC says yes, as `kubectl auth can-i` tells."""
        answer = self.cluster.kubectl(
            *("--kubeconfig", str(self.kubeconfig), "-n", self.name, "auth", "can-i", verb),
            *(f"{resource}/demo", f"--subresource={subresource}"),
            check=False,
        )
        return answer.strip() == "yes"


def install_policy(cluster: Cluster) -> None:
    """Install roles and policy for good, and people who have the roles in `PEOPLES_NAMESPACE`."""
    system = f"{PEOPLES_NAMESPACE}-system"
    for each in (PEOPLES_NAMESPACE, system):
        cluster.kubectl("create", "namespace", each)
    every = rendered("--namespace", system, f"--set=workers.namespaces={{{PEOPLES_NAMESPACE}}}")
    wanted = [document for document in every if document["kind"] in INSTALLED]
    manifest = yaml.safe_dump_all(wanted)
    cluster.kubectl("apply", "--server-side", "-f", "-", input=manifest)
    for role in ("trainer", "viewer", "editor"):
        add_account(cluster, PEOPLES_NAMESPACE, role, f"rollout-{role}")
    _wait_until_enforced(cluster, PEOPLES_NAMESPACE, "trainer")


def add_account(cluster: Cluster, namespace: str, account: str, role: str = "") -> None:
    """Make an account, and bind it to a ClusterRole."""
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    api_of(cluster).create(path, {"metadata": {"name": account}})
    if role:
        bind_role(cluster, namespace, account, role)


def bind_role(
    cluster: Cluster, namespace: str, account: str, role: str, kind: str = "ClusterRole"
) -> None:
    group = "rbac.authorization.k8s.io"
    binding = {
        "metadata": {"generateName": account},
        "roleRef": {"apiGroup": group, "kind": kind, "name": role},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": namespace}],
    }
    api_of(cluster).create(f"/apis/{group}/v1/namespaces/{namespace}/rolebindings", binding)


def _wait_until_enforced(cluster: Cluster, namespace: str, account: str) -> None:
    """A policy acts a moment after it was made; wait for its first refusal, at most 30 s."""
    person = Person(cluster, namespace, account)
    cluster.kubectl("-n", namespace, "create", "-f", "-", input=text(pool(PROBE)))
    deadline = time.monotonic() + 30
    for replicas in range(1, 1000):
        try:
            person.patch(PROBE, {"replicas": replicas})
        except ClusterError as error:
            if "rolloutreplicas/spec" in str(error):
                return
        assert time.monotonic() < deadline, "the admission policy is not enforced"
        time.sleep(0.2)
