"""Roles and admission policy of the chart, tried with real service accounts."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from localkube import Cluster
from tests.support.api.people import Person, policed
from tests.support.manifests import pool, text

NAMESPACE = "admission"
TRAINER, VIEWER, EDITOR, WORKER = "trainer", "viewer", "editor", "rollout-worker"


@pytest.fixture(scope="module")
def cluster(crd: Cluster) -> Iterator[Cluster]:
    with policed(crd, NAMESPACE, TRAINER, VIEWER, EDITOR):
        yield crd


@pytest.fixture(scope="module")
def trainer(cluster: Cluster) -> Person:
    return Person(cluster, NAMESPACE, TRAINER)


@pytest.fixture(scope="module")
def viewer(cluster: Cluster) -> Person:
    return Person(cluster, NAMESPACE, VIEWER)


@pytest.fixture(scope="module")
def editor(cluster: Cluster) -> Person:
    return Person(cluster, NAMESPACE, EDITOR)


@pytest.fixture
def name(cluster: Cluster, request: pytest.FixtureRequest) -> str:
    name = str(request.node.name).removeprefix("test_").replace("_", "-")[:50].rstrip("-")
    cluster.kubectl("-n", NAMESPACE, "create", "-f", "-", input=text(pool(name)))
    return name


TARGET = {"target": {"epoch": 1, "version": 1, "source": {"path": "steps/1"}}}
NEXT = {"target": {"epoch": 1, "version": 2, "source": {"path": "steps/2"}}}


def test_trainer_moves_weights_and_state(trainer: Person, name: str) -> None:
    trainer.patch(name, {"weights": TARGET})
    trainer.patch(name, {"state": "Asleep"})
    trainer.patch(name, {"state": "Active", "weights": NEXT})
    stored = json.loads(trainer.kubectl("get", "rr", name, "-o", "json"))["spec"]
    assert stored["weights"]["target"]["source"] == {"path": "steps/2"}
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
        {"weights": {"volume": {"claim": {"name": "theirs"}}}},
        {"weights": {"inFlight": {"policy": "Keep"}, **TARGET}},
        {"engine": {"env": [{"name": "A", "value": "b"}]}, "state": "Asleep"},
    ],
    ids=["image", "replicas", "suspend", "added", "podTemplate", "claim", "policy", "with-state"],
)
def test_trainer_changes_nothing_else(trainer: Person, spec: dict[str, Any]) -> None:
    said = trainer.refused_patch("probe", spec)
    assert (
        "changing anything but spec.weights.target, spec.state and the annotation "
        "rollout.dev/trainer-epoch needs permission to update rolloutreplicas/spec in "
        "namespace admission: ask for a role that has it (rollout-editor); check with kubectl auth can-i "
        "update rolloutreplicas.rollout.dev/probe --subresource=spec"
    ) in said


@pytest.mark.parametrize(
    "metadata",
    [
        {
            "ownerReferences": [
                {"apiVersion": "v1", "kind": "ConfigMap", "name": "none", "uid": "0-0"}
            ]
        },
        {"finalizers": ["example.com/for-ever"]},
        {"labels": {"team": "mine"}},
        {"annotations": {"rollout.dev/reconcile-paused": "true"}},
        {"annotations": {"rollout.dev/trainer-epoch": "9", "rollout.dev/retry": "1"}},
    ],
    ids=["owner", "finalizer", "label", "paused", "beside-the-epoch"],
)
def test_trainer_can_neither_delete_nor_stop_a_pool_by_its_metadata(
    trainer: Person, metadata: dict[str, Any]
) -> None:
    said = trainer.refused(
        *("patch", "rr", "probe", "--type=merge", "-p", json.dumps({"metadata": metadata}))
    )
    assert "needs permission to update rolloutreplicas/spec in namespace admission" in said


def test_garbage_collector_still_orphans_and_deletes_in_the_foreground(cluster: Cluster) -> None:
    collector = "system:serviceaccount:kube-system:generic-garbage-collector"
    patch = {"metadata": {"ownerReferences": None, "finalizers": ["foregroundDeletion"]}}
    cluster.kubectl(
        *("-n", NAMESPACE, "patch", "rr", "probe", "--type=merge", "-p", json.dumps(patch)),
        *(f"--as={collector}", "--dry-run=server"),
    )


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
    narrow = Person(cluster, NAMESPACE, "narrow")
    narrow.patch(name, {"weights": TARGET})
    assert "rolloutreplicas/weights" in narrow.refused_patch("probe", {"weights": TARGET})
    assert (
        "changing spec.state needs permission to update rolloutreplicas/state in namespace admission"
    ) in narrow.refused_patch(name, {"state": "Asleep"})
    narrow.kubectl("annotate", "rr", name, "rollout.dev/trainer-epoch=2")
    assert "rolloutreplicas/spec" in narrow.refused("annotate", "rr", name, "rollout.dev/retry=1")


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
    assert "cannot patch" in Person(cluster, NAMESPACE, "k8s-view").refused_patch(
        name, {"replicas": 2}
    )
    Person(cluster, NAMESPACE, "k8s-edit").patch(name, {"replicas": 2, "state": "Asleep"})


def test_worker_may_review_and_nothing_else(cluster: Cluster) -> None:
    worker = Person(cluster, NAMESPACE, WORKER)
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
