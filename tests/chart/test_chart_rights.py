"""The rights that the chart gives: exactly these."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.charts import CHART, Document, case, every, helm, one, rendered

NAME = "rollout-rollout-operator"
Rights = dict[str, set[str]]

POOLS: Rights = {
    "rollout.dev/rolloutreplicas": {"list", "watch"},
    "rollout.dev/rolloutreplicas/status": {"patch"},
    "rollout.dev/rolloutreplicas/control": {"get", "update"},
    "rollout.dev/rolloutreplicas/weights": {"create"},
    "/pods": {"get", "list", "watch", "create", "delete"},
    "/pods/status": {"patch"},
    "/services": {"get", "list", "watch", "create", "patch"},
    "resource.k8s.io/resourceclaims": {"list", "watch"},
    "discovery.k8s.io/endpointslices": {"get", "list", "watch", "create", "patch"},
    "policy/poddisruptionbudgets": {"get", "list", "watch", "create", "patch"},
    "scheduling.x-k8s.io/podgroups": {"get", "list", "create", "patch", "delete"},
    "scheduling.volcano.sh/podgroups": {"get", "list", "create", "patch", "delete"},
    "events.k8s.io/events": {"create"},
}


def rights(role: Document) -> Rights:
    """Return the verbs of each resource."""
    out: Rights = {}
    for rule in role["rules"]:
        assert "nonResourceURLs" not in rule
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                out.setdefault(f"{group}/{resource}", set()).update(rule["verbs"])
    return out


def bound(documents: list[Document], account: str) -> list[tuple[str, str]]:
    """Return kind and name of the roles that an account is bound to."""
    found = []
    for binding in every(documents, "RoleBinding") + every(documents, "ClusterRoleBinding"):
        for subject in binding["subjects"]:
            if subject["kind"] == "Group":  # all accounts of a trainer's namespace: devices' uuids
                assert subject["name"].startswith("system:serviceaccounts:")
                assert binding["roleRef"]["name"].endswith("-devices")
            elif subject["name"] == account:
                where = binding["metadata"].get("namespace", "*")
                found.append((where, f"{binding['roleRef']['kind']}/{binding['roleRef']['name']}"))
    return sorted(found)


def test_operator_cluster_wide() -> None:
    documents = case("default")
    assert rights(one(documents, "ClusterRole", NAME)) == POOLS
    assert bound(documents, NAME) == [
        ("*", f"ClusterRole/{NAME}"),
        ("*", f"ClusterRole/{NAME}-devices"),
        ("*", f"ClusterRole/{NAME}-nodes"),
        ("rollout-system", f"Role/{NAME}-own"),
    ]


def test_operator_in_named_namespaces() -> None:
    documents = case("namespaced")
    assert not [d for d in every(documents, "ClusterRole") if d["metadata"]["name"] == NAME]
    for namespace in ("team-a", "team-b"):
        here = [d for d in documents if d["metadata"].get("namespace") == namespace]
        assert rights(one(here, "Role", NAME)) == POOLS
    assert bound(documents, NAME) == [
        ("*", f"ClusterRole/{NAME}-devices"),
        ("*", f"ClusterRole/{NAME}-nodes"),
        ("rollout-system", f"Role/{NAME}-own"),
        ("team-a", f"Role/{NAME}"),
        ("team-b", f"Role/{NAME}"),
    ]


def test_devices_are_read_by_the_operator_and_by_the_namespaces_of_trainers() -> None:
    documents = case("everything")
    slices = {"resource.k8s.io/resourceslices": {"list", "watch"}}
    assert rights(one(documents, "ClusterRole", "rollouts-devices")) == slices
    subjects = one(documents, "ClusterRoleBinding", "rollouts-devices")["subjects"]
    groups = [each["name"] for each in subjects if each["kind"] == "Group"]
    assert groups == ["system:serviceaccounts:rl", "system:serviceaccounts:rl-2"]


def test_nodes_are_listed_by_the_operator_alone() -> None:
    documents = case("everything")
    assert rights(one(documents, "ClusterRole", "rollouts-nodes")) == {"/nodes": {"list", "watch"}}
    (subject,) = one(documents, "ClusterRoleBinding", "rollouts-nodes")["subjects"]
    assert (subject["kind"], subject["name"]) == ("ServiceAccount", "rollouts-operator")


def test_operator_in_its_own_namespace() -> None:
    role = one(case("default"), "Role", f"{NAME}-own")
    assert rights(role) == {
        "coordination.k8s.io/leases": {"create", "get", "patch"},
        "/serviceaccounts/token": {"create"},
    }
    unnamed = [rule for rule in role["rules"] if "resourceNames" not in rule]
    # A name can't be asked of a create, as the object has none yet.
    assert [rule["verbs"] for rule in unnamed] == [["create"]]
    assert unnamed[0]["resources"] == ["leases"]


@pytest.mark.parametrize(
    ("name", "namespaces"),
    [
        ("default", ["rollout-system"]),
        ("namespaced", ["team-a", "team-b"]),
        ("everything", ["rl", "rl-2"]),
        ("minimal", ["rl"]),
    ],
)
def test_workers(name: str, namespaces: list[str]) -> None:
    documents = case(name)
    role = ("rollouts" if name == "everything" else NAME) + "-worker"
    assert rights(one(documents, "ClusterRole", role)) == {
        "authentication.k8s.io/tokenreviews": {"create"}
    }
    for namespace in namespaces:
        here = [d for d in documents if d["metadata"].get("namespace") == namespace]
        assert rights(one(here, "Role", role)) == {
            "authorization.k8s.io/localsubjectaccessreviews": {"create"}
        }
    assert bound(documents, "rollout-worker") == sorted(
        [("*", f"ClusterRole/{role}")] * len(namespaces)
        + [(namespace, f"Role/{role}") for namespace in namespaces]
    )
    accounts = [
        d["metadata"]["namespace"]
        for d in every(documents, "ServiceAccount")
        if d["metadata"]["name"] == "rollout-worker"
    ]
    assert accounts == ([] if name == "minimal" else namespaces)


def test_every_account_may_review_tokens_if_the_values_say_so() -> None:
    """An admin of a namespace then needs none of the cluster to take it into service."""
    documents = rendered("--set=workers.tokenReviews=any", "--set=workers.namespaces={rl}")
    binding = one(documents, "ClusterRoleBinding", f"{NAME}-worker")
    assert [(s["kind"], s["name"]) for s in binding["subjects"]] == [
        ("Group", "system:serviceaccounts")
    ]
    here = [d for d in documents if d["metadata"].get("namespace") == "rl"]
    assert one(here, "RoleBinding", f"{NAME}-worker")["subjects"][0]["name"] == "rollout-worker"
    done = helm("template", "x", CHART, "--set=workers.tokenReviews=any,rbac.namespaced=true")
    assert "let an admin make it and leave listed" in done.stderr


ROLES: dict[str, Any] = {
    "rollout-viewer": {
        "rollout.dev/rolloutreplicas": {"get", "list", "watch"},
        "rollout.dev/rolloutreplicas/status": {"get", "list", "watch"},
        "rollout.dev/rolloutreplicas/scale": {"get", "list", "watch"},
    },
    "rollout-editor": {
        "rollout.dev/rolloutreplicas": {
            *("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")
        },
        "rollout.dev/rolloutreplicas/status": {"get"},
        "rollout.dev/rolloutreplicas/scale": {"get", "update", "patch"},
        "rollout.dev/rolloutreplicas/spec": {"update"},
        "rollout.dev/rolloutreplicas/weights": {"update"},
        "rollout.dev/rolloutreplicas/state": {"update"},
    },
    "rollout-trainer": {
        "rollout.dev/rolloutreplicas": {"get", "list", "watch", "update", "patch"},
        "rollout.dev/rolloutreplicas/status": {"get"},
        "rollout.dev/rolloutreplicas/weights": {"create", "update"},
        "rollout.dev/rolloutreplicas/state": {"update"},
        "rollout.dev/rolloutreplicas/control": {"get"},
        "discovery.k8s.io/endpointslices": {"get", "list", "watch"},
        "/pods": {"get"},
        "resource.k8s.io/resourceclaims": {"get"},
    },
}


@pytest.mark.parametrize("role", ROLES)
def test_roles_for_people(role: str) -> None:
    assert rights(one(case("default"), "ClusterRole", role)) == ROLES[role]


def test_nothing_is_a_wildcard() -> None:
    for document in case("default"):
        for rule in document.get("rules", []) if "Role" in document["kind"] else []:
            assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]


def test_policy_and_roles_can_be_left_out() -> None:
    kinds = {d["kind"] for d in case("minimal")}
    assert not kinds & {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
    names = {d["metadata"]["name"] for d in every(case("minimal"), "ClusterRole")}
    assert not names & set(ROLES)
