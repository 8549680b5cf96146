"""Roles and admission policy of the chart, tried with real service accounts."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from localkube import Cluster, ClusterError
from manifests import pool, text

CHART = Path(__file__).parents[2] / "charts" / "rollout-operator"
NAMESPACE = "admission"
SYSTEM = "rollout-system"
TRAINER, VIEWER, EDITOR, WORKER = "trainer", "viewer", "editor", "rollout-worker"
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

    def __init__(self, cluster: Cluster, account: str) -> None:
        self.cluster = cluster
        self.kubeconfig = cluster.service_account_kubeconfig(NAMESPACE, account)

    def kubectl(self, *arguments: str, manifest: dict[str, Any] | None = None) -> str:
        return self.cluster.kubectl(
            *("--kubeconfig", str(self.kubeconfig), "-n", NAMESPACE),
            *arguments,
            input=None if manifest is None else text(manifest),
        )

    def patch(self, name: str, spec: dict[str, Any]) -> str:
        return self.kubectl("patch", "rr", name, "--type=merge", "-p", json.dumps({"spec": spec}))

    def refused(self, *arguments: str) -> str:
        with pytest.raises(ClusterError) as error:
            self.kubectl(*arguments)
        return str(error.value)

    def refused_patch(self, name: str, spec: dict[str, Any]) -> str:
        return self.refused("patch", "rr", name, "--type=merge", "-p", json.dumps({"spec": spec}))

    def may(self, verb: str, resource: str, subresource: str) -> bool:
        answer = self.cluster.kubectl(
            *("--kubeconfig", str(self.kubeconfig), "-n", NAMESPACE, "auth", "can-i", verb),
            *(f"{resource}/demo", f"--subresource={subresource}"),
            check=False,
        )
        return answer.strip() == "yes"


@pytest.fixture(scope="module")
def cluster(crd: Cluster) -> Iterator[Cluster]:
    for namespace in (NAMESPACE, SYSTEM):
        crd.kubectl("create", "namespace", namespace)
    rendered = crd.helm(
        *("template", "rollout", CHART, "--namespace", SYSTEM),
        *("--set", f"workers.namespaces={{{NAMESPACE}}}"),
    )
    wanted = [d for d in yaml.safe_load_all(rendered) if d and d["kind"] in INSTALLED]
    manifest = yaml.safe_dump_all(wanted)
    crd.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", input=manifest)
    for account in (TRAINER, VIEWER, EDITOR):
        crd.kubectl("-n", NAMESPACE, "create", "serviceaccount", account)
        crd.kubectl(
            *("-n", NAMESPACE, "create", "rolebinding", account),
            *(f"--clusterrole=rollout-{account}", f"--serviceaccount={NAMESPACE}:{account}"),
        )
    _wait_until_enforced(crd)
    yield crd
    crd.kubectl("delete", "--wait=false", "-f", "-", input=manifest)
    for namespace in (NAMESPACE, SYSTEM):
        crd.kubectl("delete", "namespace", namespace, "--wait=false")


def _wait_until_enforced(cluster: Cluster) -> None:
    """A policy acts a moment after it was made; wait for its first refusal, at most 30 s."""
    trainer = Person(cluster, TRAINER)
    cluster.kubectl("-n", NAMESPACE, "create", "-f", "-", input=text(pool("probe")))
    deadline = time.monotonic() + 30
    for replicas in range(1, 1000):
        try:
            trainer.patch("probe", {"replicas": replicas})
        except ClusterError as error:
            if "rolloutreplicas/spec" in str(error):
                return
        assert time.monotonic() < deadline, "the admission policy is not enforced"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def trainer(cluster: Cluster) -> Person:
    return Person(cluster, TRAINER)


@pytest.fixture(scope="module")
def viewer(cluster: Cluster) -> Person:
    return Person(cluster, VIEWER)


@pytest.fixture(scope="module")
def editor(cluster: Cluster) -> Person:
    return Person(cluster, EDITOR)


@pytest.fixture
def name(cluster: Cluster, request: pytest.FixtureRequest) -> str:
    name = str(request.node.name).removeprefix("test_").replace("_", "-")[:50].rstrip("-")
    cluster.kubectl("-n", NAMESPACE, "create", "-f", "-", input=text(pool(name)))
    return name


TARGET = {"target": {"epoch": 1, "version": 1, "source": {"path": "steps/1"}}}


def test_trainer_moves_weights_and_state(trainer: Person, name: str) -> None:
    trainer.patch(name, {"weights": TARGET})
    trainer.patch(name, {"state": "Asleep"})
    trainer.patch(name, {"state": "Active", "weights": {"inFlight": {"policy": "Keep"}}})
    stored = json.loads(trainer.kubectl("get", "rr", name, "-o", "json"))["spec"]
    assert stored["weights"]["target"]["source"] == {"path": "steps/1"}
    assert stored["state"] == "Active"


def test_trainer_applies_its_target(trainer: Person, name: str) -> None:
    mine = pool(name) | {"spec": {"weights": TARGET}}
    trainer.kubectl("apply", "--server-side", "--field-manager=trainer", "-f", "-", manifest=mine)
    assert "steps/1" in trainer.kubectl("get", "rr", name, "-o", "yaml")


@pytest.mark.parametrize(
    "spec",
    [
        {"engine": {"image": "evil:1"}},
        {"replicas": 9},
        {"suspend": True},
        {"drainSeconds": 1},
        {"podTemplate": {"labels": {"a": "b"}}},
        {"engine": {"env": [{"name": "A", "value": "b"}]}, "state": "Asleep"},
    ],
    ids=["image", "replicas", "suspend", "added", "podTemplate", "with-state"],
)
def test_trainer_changes_nothing_else(trainer: Person, spec: dict[str, Any]) -> None:
    said = trainer.refused_patch("probe", spec)
    assert (
        "changing spec beyond weights and state needs permission to update rolloutreplicas/spec in "
        "namespace admission: ask for a role that has it (rollout-editor); check with kubectl auth can-i "
        "update rolloutreplicas.rollout.dev/probe --subresource=spec"
    ) in said


def test_trainer_removes_no_field(trainer: Person, editor: Person, name: str) -> None:
    editor.patch(name, {"drainSeconds": 5})
    assert "rolloutreplicas/spec" in trainer.refused_patch(name, {"drainSeconds": None})


def test_trainer_neither_scales_nor_makes_nor_removes_pools(trainer: Person, name: str) -> None:
    assert "rolloutreplicas/scale" in trainer.refused("scale", "rr", name, "--replicas=3")
    assert "cannot delete" in trainer.refused("delete", "rr", name)
    assert "status" in trainer.refused(
        *("patch", "rr", name, "--subresource=status", "--type=merge", "-p", "{}")
    )


def test_rights_are_asked_for_in_the_pool_that_changes(cluster: Cluster, name: str) -> None:
    """A right on one pool by name is no right on another."""
    cluster.kubectl("-n", NAMESPACE, "create", "serviceaccount", "narrow")
    rights: tuple[tuple[str, ...], ...] = (
        ("narrow-1", "--verb=get,update,patch", "--resource=rolloutreplicas.rollout.dev"),
        (
            "narrow-2",
            "--verb=update",
            "--resource=rolloutreplicas.rollout.dev/weights",
            f"--resource-name={name}",
        ),
    )
    for role, *rest in rights:
        cluster.kubectl("-n", NAMESPACE, "create", "role", role, *rest)
        cluster.kubectl(
            *("-n", NAMESPACE, "create", "rolebinding", role, f"--role={role}"),
            f"--serviceaccount={NAMESPACE}:narrow",
        )
    narrow = Person(cluster, "narrow")
    narrow.patch(name, {"weights": TARGET})
    assert "rolloutreplicas/weights" in narrow.refused_patch("probe", {"weights": TARGET})
    assert (
        "changing spec.state needs permission to update rolloutreplicas/state in namespace admission"
    ) in narrow.refused_patch(name, {"state": "Asleep"})
    narrow.kubectl("annotate", "rr", name, "rollout.dev/retry=1")


def test_viewer_reads_only(viewer: Person, name: str) -> None:
    viewer.kubectl("get", "rr", name)
    viewer.kubectl("get", "rr", name, "--subresource=scale")
    assert "cannot patch" in viewer.refused_patch(name, {"state": "Asleep"})
    assert not viewer.may("get", "rolloutreplicas.rollout.dev", "control")


def test_editor_does_all(editor: Person) -> None:
    editor.kubectl("create", "-f", "-", manifest=pool("edited"))
    editor.patch("edited", {"engine": {"image": "x:2"}, "state": "Paused", "weights": TARGET})
    editor.kubectl("scale", "rr", "edited", "--replicas=3")
    assert '"replicas": 3' in editor.kubectl("get", "rr", "edited", "-o", "json")
    editor.kubectl("delete", "rr", "edited")


@pytest.mark.parametrize(
    ("verb", "subresource", "allowed"),
    [
        ("create", "weights", True),
        ("update", "weights", True),
        ("update", "state", True),
        ("get", "control", True),
        ("update", "control", False),
        ("update", "spec", False),
        ("update", "scale", False),
        ("patch", "status", False),
    ],
)
def test_rights_that_trainers_ask_about(
    trainer: Person, verb: str, subresource: str, allowed: bool
) -> None:
    assert trainer.may(verb, "rolloutreplicas.rollout.dev", subresource) is allowed


def test_editors_of_a_namespace_edit_pools(cluster: Cluster, name: str) -> None:
    """The roles are aggregated into Kubernetes' own view and edit."""
    for role in ("view", "edit"):
        cluster.kubectl("-n", NAMESPACE, "create", "serviceaccount", f"k8s-{role}")
        cluster.kubectl(
            *("-n", NAMESPACE, "create", "rolebinding", f"k8s-{role}", f"--clusterrole={role}"),
            f"--serviceaccount={NAMESPACE}:k8s-{role}",
        )
    assert "cannot patch" in Person(cluster, "k8s-view").refused_patch(name, {"replicas": 2})
    Person(cluster, "k8s-edit").patch(name, {"replicas": 2, "state": "Asleep"})


def test_worker_may_review_and_nothing_else(cluster: Cluster) -> None:
    worker = Person(cluster, WORKER)
    rights = worker.kubectl("auth", "can-i", "--list", "--no-headers").splitlines()
    # What every account may do: ask about itself, and read versions and health.
    own = [
        line.split()[0]
        for line in rights
        if line.split()[0] not in ("selfsubjectreviews.authentication.k8s.io",)
        and "selfsubject" not in line
        and not line.startswith(" ")
    ]
    assert sorted(own) == [
        "localsubjectaccessreviews.authorization.k8s.io",
        "tokenreviews.authentication.k8s.io",
    ]


def test_policy_is_well_typed(cluster: Cluster) -> None:
    """The controller checks the expressions against the CRD's schema; at most 30 s."""
    deadline = time.monotonic() + 30
    while True:
        policies = json.loads(cluster.kubectl("get", "validatingadmissionpolicies", "-o", "json"))
        (policy,) = policies["items"]
        if "typeChecking" in policy.get("status", {}):
            break
        assert time.monotonic() < deadline, "the policy was not type-checked"
        time.sleep(0.2)
    assert policy["status"]["typeChecking"] == {}
