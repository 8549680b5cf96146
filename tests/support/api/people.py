"""The chart's roles and its admission policy on a test's API server, and people who have them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import yaml

from localkube import Cluster, ClusterError
from tests.support.charts import rendered
from tests.support.manifests import pool, text

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


class Person:
    """Someone with a kubeconfig of a service account."""

    def __init__(self, cluster: Cluster, namespace: str, account: str) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.kubeconfig = cluster.service_account_kubeconfig(namespace, account)

    def kubectl(self, *arguments: str, manifest: dict[str, Any] | None = None) -> str:
        """Return what kubectl prints; a manifest goes to its stdin (`-f -`)."""
        return self.cluster.kubectl(
            *("--kubeconfig", str(self.kubeconfig), "-n", self.namespace),
            *arguments,
            input=None if manifest is None else text(manifest),
        )

    def patch(self, name: str, spec: dict[str, Any]) -> str:
        """Merge into a pool's spec."""
        return self.kubectl("patch", "rr", name, "--type=merge", "-p", json.dumps({"spec": spec}))

    def refused(self, *arguments: str) -> str:
        """Return the words with which a command is refused; fail if it is not."""
        with pytest.raises(ClusterError) as error:
            self.kubectl(*arguments)
        return str(error.value)

    def refused_patch(self, name: str, spec: dict[str, Any]) -> str:
        """Return the words with which a change of spec is refused."""
        return self.refused("patch", "rr", name, "--type=merge", "-p", json.dumps({"spec": spec}))

    def may(self, verb: str, resource: str, subresource: str) -> bool:
        """Whether RBAC says yes, as `kubectl auth can-i` tells."""
        answer = self.cluster.kubectl(
            *("--kubeconfig", str(self.kubeconfig), "-n", self.namespace, "auth", "can-i", verb),
            *(f"{resource}/demo", f"--subresource={subresource}"),
            check=False,
        )
        return answer.strip() == "yes"


@contextmanager
def policed(cluster: Cluster, namespace: str, *people: str) -> Iterator[None]:
    """Install roles and policy; everybody in `people` gets the role `rollout-<name>` in `namespace`.

    The first of them must lack the right to change replicas: the policy's first refusal of that says
    that it is enforced.
    """
    system = f"{namespace}-system"
    for each in (namespace, system):
        cluster.kubectl("create", "namespace", each)
    every = rendered("--namespace", system, "--set", f"workers.namespaces={{{namespace}}}")
    wanted = [document for document in every if document["kind"] in INSTALLED]
    manifest = yaml.safe_dump_all(wanted)
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", input=manifest)
    for account in people:
        cluster.kubectl("-n", namespace, "create", "serviceaccount", account)
        cluster.kubectl(
            *("-n", namespace, "create", "rolebinding", account),
            *(f"--clusterrole=rollout-{account}", f"--serviceaccount={namespace}:{account}"),
        )
    _wait_until_enforced(cluster, namespace, people[0])
    try:
        yield
    finally:
        cluster.kubectl("delete", "--wait=false", "-f", "-", input=manifest)
        for each in (namespace, system):
            cluster.kubectl("delete", "namespace", each, "--wait=false")


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
