"""Roles and admission policy of the chart, tried with real service accounts."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from localkube import Cluster
from tests.support.api.apiclient import POOLS, api_of
from tests.support.api.people import PEOPLES_NAMESPACE, Person, add_account, bind_role
from tests.support.manifests import pool

NAMESPACE = PEOPLES_NAMESPACE


@pytest.fixture(scope="module")
def cluster(policed: Cluster) -> Cluster:
    return policed


@pytest.fixture(scope="module")
def trainer(cluster: Cluster) -> Person:
    return Person(cluster, NAMESPACE, "trainer")


@pytest.fixture(scope="module")
def viewer(cluster: Cluster) -> Person:
    return Person(cluster, NAMESPACE, "viewer")


@pytest.fixture(scope="module")
def editor(cluster: Cluster) -> Person:
    return Person(cluster, NAMESPACE, "editor")


@pytest.fixture
def name(cluster: Cluster, request: pytest.FixtureRequest) -> str:
    name = str(request.node.name).removeprefix("test_").replace("_", "-")[:50].rstrip("-")
    api_of(cluster).create(POOLS.format(NAMESPACE), pool(name))
    return name


TARGET = {"target": {"epoch": 1, "version": 1, "source": {"path": "steps/1"}}}


def test_trainer_applies_its_target(trainer: Person, name: str) -> None:
    mine = pool(name) | {"spec": {"weights": TARGET}}
    trainer.kubectl("apply", "--server-side", "--field-manager=trainer", "-f", "-", manifest=mine)
    assert "steps/1" in trainer.kubectl("get", "rr", name, "-o", "yaml")


@pytest.mark.parametrize(
    "change",
    [
        {"spec": {"engine": {"image": "evil:1"}}},
        {"spec": {"engine": {"env": [{"name": "A", "value": "b"}]}, "state": "Asleep"}},
        {"spec": {"weights": {"inFlight": {"policy": "Keep"}, **TARGET}}},
        {"metadata": {"annotations": {"rollout.dev/trainer-epoch": "9", "rollout.dev/retry": "1"}}},
    ],
    ids=["image", "with-state", "with-target", "with-epoch"],
)
def test_trainer_changes_nothing_else(trainer: Person, change: dict[str, Any]) -> None:
    """Nor along with what it may change; test_admission_walk.py has every field by itself."""
    said = trainer.refusal("patch", "rr", "probe", "--type=merge", "-p", json.dumps(change))
    assert (
        "changing anything but spec.weights.target, spec.state and the annotation "
        "rollout.dev/trainer-epoch needs permission to update rolloutreplicas/spec in "
        "namespace admission: ask for a role that has it (rollout-editor); check with kubectl auth can-i "
        "update rolloutreplicas.rollout.dev/probe --subresource=spec"
    ) in said


def test_garbage_collector_still_orphans_and_deletes_in_the_foreground(cluster: Cluster) -> None:
    collector = "system:serviceaccount:kube-system:generic-garbage-collector"
    patch = {"metadata": {"ownerReferences": None, "finalizers": ["foregroundDeletion"]}}
    cluster.kubectl(
        *("-n", NAMESPACE, "patch", "rr", "probe", "--type=merge", "-p", json.dumps(patch)),
        *(f"--as={collector}", "--dry-run=server"),
    )


def test_trainer_neither_scales_nor_makes_nor_removes_pools(trainer: Person, name: str) -> None:
    assert "rolloutreplicas/scale" in trainer.refusal("scale", "rr", name, "--replicas=3")
    assert "cannot delete" in trainer.refusal("delete", "rr", name)
    assert "status" in trainer.refusal(
        *("patch", "rr", name, "--subresource=status", "--type=merge", "-p", "{}")
    )


def test_rights_are_asked_for_in_the_pool_that_changes(cluster: Cluster, name: str) -> None:
    """A right on one pool by name is no right on another."""
    roles = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/roles"
    of_pools = {"apiGroups": ["rollout.dev"], "resources": ["rolloutreplicas"]}
    of_one = {
        "apiGroups": ["rollout.dev"],
        "resources": ["rolloutreplicas/weights"],
        "resourceNames": [name],
    }
    rules = [of_pools | {"verbs": ["get", "update", "patch"]}, of_one | {"verbs": ["update"]}]
    api_of(cluster).create(roles, {"metadata": {"name": "narrow"}, "rules": rules})
    add_account(cluster, NAMESPACE, "narrow")
    bind_role(cluster, NAMESPACE, "narrow", "narrow", "Role")
    narrow = Person(cluster, NAMESPACE, "narrow")
    narrow.patch(name, {"weights": TARGET})
    assert "rolloutreplicas/weights" in narrow.refused_patch("probe", {"weights": TARGET})
    assert (
        "changing spec.state needs permission to update rolloutreplicas/state in namespace admission"
    ) in narrow.refused_patch(name, {"state": "Asleep"})
    narrow.kubectl("annotate", "rr", name, "rollout.dev/trainer-epoch=2")
    assert "rolloutreplicas/spec" in narrow.refusal("annotate", "rr", name, "rollout.dev/retry=1")


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


def test_editors_of_a_namespace_edit_pools(cluster: Cluster, name: str) -> None:
    """The roles are aggregated into Kubernetes' own view and edit."""
    for role in ("view", "edit"):
        add_account(cluster, NAMESPACE, f"k8s-{role}", role)
    assert "cannot patch" in Person(cluster, NAMESPACE, "k8s-view").refused_patch(
        name, {"replicas": 2}
    )
    Person(cluster, NAMESPACE, "k8s-edit").patch(name, {"replicas": 2, "state": "Asleep"})


def test_worker_may_review_and_nothing_else(cluster: Cluster) -> None:
    worker = Person(cluster, NAMESPACE, "rollout-worker")
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
