"""Every field of a RolloutReplica, changed and removed by everybody: who may do what.

The walk takes the fields from the schema and from the API server's own description of metadata, so
that a field of a later version is closed to trainers until somebody opens it here. Nothing is stored
(`dryRun=All`): each change meets the same object.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest

from localkube import Cluster
from rollout_operator.api.crd import custom_resource_definition
from tests.support.api.apiclient import MERGE, POOLS, api_of, connect
from tests.support.api.people import PEOPLES_NAMESPACE, add_account, bind_role
from tests.support.manifests import COLOCATED, FULL, pool

NAMESPACE = PEOPLES_NAMESPACE
SPEC: dict[str, Any] = custom_resource_definition()["spec"]["versions"][0]["schema"][
    "openAPIV3Schema"
]["properties"]["spec"]
Path = tuple[str, ...]

NEEDS: dict[Path, str] = {
    ("spec", "weights", "target"): "weights",
    ("spec", "state"): "state",
    ("metadata", "annotations", "rollout.dev/trainer-epoch"): "weights",
}
"""What is open to somebody without `rolloutreplicas/spec`, and to whom."""

IMMUTABLE: set[Path] = {
    ("spec", "mode"),
    ("spec", "operatorClass"),
    ("spec", "engine", "type"),
    ("spec", "model", "source"),
    ("spec", "accelerator", "resource"),
    *(("spec", "parallelism", each) for each in ("tensor", "pipeline", "data", "nodes")),
}
OTHER: dict[Path, Any] = {
    ("spec", "weights", "target"): {"epoch": 2, "version": 0, "source": {"path": "steps/8"}},
    ("spec", "model", "source"): {"hub": {"repo": "other/model"}},
    ("spec", "engine", "image"): "registry.example/other:1",
    ("spec", "sleep", "spill", "sizeLimit"): "50Gi",
    ("spec", "weights", "stagingMemory"): "50Gi",
    ("spec", "weights", "transport", "egress"): "50M",
    ("spec", "resources", "requests"): {"cpu": "1"},
    ("spec", "resources", "limits"): {"cpu": "3"},
    ("spec", "podTemplate", "affinity"): {"podAffinity": {}},
    ("spec", "podTemplate", "securityContext"): {"runAsUser": 0},
}
"""Another valid value, where one can't be made from the schema alone."""

ALONE: dict[Path, Any] = {("spec", "sleep", "spill", "path"): "/scratch"}
"""What excludes another field of the pool that is walked."""

META: dict[str, Any] = {
    "annotations": {"example.com/other": "b"},
    "creationTimestamp": "2020-01-01T00:00:00Z",
    "deletionGracePeriodSeconds": 0,
    "deletionTimestamp": "2020-01-01T00:00:00Z",
    "finalizers": ["example.com/for-ever"],
    "generateName": "other-",
    "generation": 99,
    "labels": {"team": "other"},
    "name": "other",
    "namespace": "default",
    "ownerReferences": [
        {"apiVersion": "v1", "kind": "ConfigMap", "name": "none", "uid": "00000000-0000"}
    ],
    "resourceVersion": "1",
    "selfLink": "/elsewhere",
    "uid": "00000000-0000",
}
BOOKKEEPING = ("managedFields", "resourceVersion", "generation")
"""The API server writes these with each change; who owns a field gives nobody a right."""

WRITERS = {
    "trainer": {"weights", "state"},
    "editor": {"weights", "state", "spec"},
    "narrow-weights": {"weights"},
    "narrow-state": {"state"},
    "narrow-spec": {"spec"},
    "narrow-none": set[str](),
}
"""Accounts that may update pools, and the parts that they hold."""
WALKERS = ("trainer", "editor")
"""Who tries everything; the others show that each part opens its own fields only."""


NOTES = {"example.com/note": "a", "rollout.dev/trainer-epoch": "1"}


@pytest.fixture(scope="module")
def cluster(policed: Cluster) -> Cluster:
    for account, parts in WRITERS.items():
        if account.startswith("narrow-"):
            _grant(policed, account, parts)
    for name, patch in (("full", FULL), ("bare", {}), ("beside", COLOCATED)):
        manifest = pool(name, patch)
        manifest["metadata"] |= {"labels": {"team": "rl"}, "annotations": NOTES}
        api_of(policed).create(POOLS.format(NAMESPACE), manifest)
    return policed


def _grant(cluster: Cluster, account: str, parts: set[str]) -> None:
    updated = {"rolloutreplicas": ["update", "patch"]}
    updated |= {f"rolloutreplicas/{part}": ["update"] for part in parts}
    rules = [
        {"apiGroups": ["rollout.dev"], "resources": [resource], "verbs": verbs}
        for resource, verbs in updated.items()
    ]
    roles = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/roles"
    api_of(cluster).create(roles, {"metadata": {"name": account}, "rules": rules})
    add_account(cluster, NAMESPACE, account)
    bind_role(cluster, NAMESPACE, account, account, "Role")


@pytest.fixture(scope="module")
def api(cluster: Cluster) -> Iterator[httpx.Client]:
    with connect(cluster) as client:
        yield client


def attempt(api: httpx.Client, account: str, name: str, path: Path, value: Any) -> httpx.Response:
    """Let an account merge one value into a pool, without storing it."""
    body: Any = value
    for part in reversed(path):
        body = {part: body}
    return api.patch(
        POOLS.format(NAMESPACE) + f"/{name}",
        params={"dryRun": "All"},
        json=body,
        headers={
            "Content-Type": MERGE,
            "Impersonate-User": f"system:serviceaccount:{NAMESPACE}:{account}",
        },
    )


def leaves(schema: Mapping[str, Any], path: Path) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Yield the fields that are set one by one: a list, a map and an atomic object count as one."""
    for name, child in schema["properties"].items():
        here = (*path, name)
        atomic = child.get("x-kubernetes-map-type") == "atomic" or here == (
            "spec",
            "model",
            "source",
        )
        if "properties" in child and not atomic:
            yield from leaves(child, here)
        else:
            yield here, child


FIELDS = dict(leaves(SPEC, ("spec",)))
BESIDE = {path for path in FIELDS if path[:2] == ("spec", "colocation")}
"""Fields of the other mode: only the pool `beside` has them."""
SINGLE = {path for path, schema in FIELDS.items() if len(schema.get("enum", "ab")) == 1}
"""Fields of one value: they can be added and removed."""


def at(document: Any, path: Path) -> Any:
    for part in path:
        document = document.get(part) if isinstance(document, Mapping) else None
    return document


def another(path: Path, now: Any) -> Any:
    """Return a valid value of a field that differs from the present one."""
    schema = FIELDS[path]
    if path in OTHER:
        return OTHER[path]
    if "enum" in schema:
        return next((value for value in schema["enum"] if value != now), "Other")
    match schema.get("type"):
        case "boolean":
            return not now
        case "integer":
            return now + 1
        case "array":
            return [*now, {"name": "more", "emptyDir": {}}] if path[-1] == "volumes" else now[:-1]
        case "object":
            return {**now, "more": "1"}
    return f"{now}x"


def judge(answer: httpx.Response, account: str, path: Path, needs: str) -> None:
    said = f"{account} {'.'.join(path)}: {answer.status_code} {answer.text[:300]}"
    if needs in WRITERS[account]:
        assert answer.status_code == 200, said
    else:
        assert answer.status_code == 403, said
        assert f"needs permission to update rolloutreplicas/{needs} " in answer.text, said


@pytest.mark.parametrize("account", WRITERS)
def test_a_part_opens_its_own_fields(api: httpx.Client, account: str) -> None:
    spec = [path for path in NEEDS if path in FIELDS]
    for path in (*spec, ("spec", "replicas"), ("spec", "weights", "volume", "claim", "name")):
        answer = attempt(api, account, "full", path, another(path, at({"spec": FULL}, path)))
        judge(answer, account, path, NEEDS.get(path, "spec"))


def test_every_field_is_set_in_the_pool_that_is_walked() -> None:
    missing = {".".join(path) for path in FIELDS if at({"spec": FULL}, path) is None}
    assert missing == {".".join(path) for path in {*ALONE, *BESIDE}}
    assert all(at({"spec": COLOCATED}, path) is not None for path in BESIDE)
    assert set(NEEDS) - {path for path in NEEDS if path[0] == "metadata"} <= set(FIELDS)
    assert set(FIELDS) >= IMMUTABLE | set(OTHER)


@pytest.mark.parametrize("account", WALKERS)
def test_a_pool_stays_beside_its_trainer(api: httpx.Client, account: str) -> None:
    for path in BESIDE:
        changed = another(path, at({"spec": COLOCATED}, path))
        answer = attempt(api, account, "beside", path, changed)
        assert answer.status_code == 422, f"{path}: {answer.text}"


@pytest.mark.parametrize("account", WALKERS)
def test_changing_a_field_needs_its_part(api: httpx.Client, account: str) -> None:
    for path in (each for each in FIELDS if each not in {*ALONE, *BESIDE, *SINGLE}):
        changed = another(path, at({"spec": FULL}, path))
        assert changed != at({"spec": FULL}, path)
        answer = attempt(api, account, "full", path, changed)
        if path in IMMUTABLE:
            assert answer.status_code == 422, f"{path}: {answer.text}"
        else:
            judge(answer, account, path, NEEDS.get(path, "spec"))


@pytest.mark.parametrize("account", WALKERS)
def test_removing_a_field_needs_its_part(api: httpx.Client, account: str) -> None:
    for path in (each for each in FIELDS if each not in ALONE):
        answer = attempt(api, account, "full", path, None)
        if answer.status_code == 422:  # nobody may: required, immutable, or for ever once set
            continue
        if answer.status_code == 200 and answer.json()["spec"] == _spec(api, "full"):
            continue  # its default is the same
        judge(answer, account, path, NEEDS.get(path, "spec"))


@pytest.mark.parametrize("account", WALKERS)
def test_adding_a_field_needs_its_part(api: httpx.Client, account: str) -> None:
    added = 0
    for path in FIELDS:
        value = ALONE.get(path, at({"spec": COLOCATED if path in BESIDE else FULL}, path))
        answer = attempt(api, account, "bare", path, value)
        if answer.status_code == 422:  # not without another field, or not any more
            continue
        if answer.status_code == 200 and answer.json()["spec"] == _spec(api, "bare"):
            continue  # it has this value already
        judge(answer, account, path, NEEDS.get(path, "spec"))
        added += 1
    assert added > len(FIELDS) * 2 // 3


def _spec(api: httpx.Client, name: str) -> Any:
    return api.get(POOLS.format(NAMESPACE) + f"/{name}").raise_for_status().json()["spec"]


@pytest.mark.parametrize("account", WALKERS)
@pytest.mark.parametrize("what", ["changed", "removed"])
def test_metadata_needs_the_part_of_the_rest(api: httpx.Client, account: str, what: str) -> None:
    described = api.get("/openapi/v3/apis/rollout.dev/v1alpha1").raise_for_status().json()
    known = described["components"]["schemas"]["io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"]
    assert set(known["properties"]) == set(META) | {"managedFields"}
    before = api.get(POOLS.format(NAMESPACE) + "/full").raise_for_status().json()["metadata"]
    touched = set()
    for field, value in META.items():
        answer = attempt(
            api, account, "full", ("metadata", field), value if what == "changed" else None
        )
        # All annotations at once are the trainer's epoch, too.
        epoch = what == "removed" and field == "annotations"
        held = {"spec", *(["weights"] if epoch else [])} <= WRITERS[account]
        if answer.status_code == 403:
            assert not held, f"{field}: {answer.text}"
            assert "rolloutreplicas/spec " in answer.text or "/weights " in answer.text
            touched.add(field)
        elif answer.status_code == 200 and _meta(answer.json()["metadata"]) != _meta(before):
            assert held, f"{field}: {answer.text}"
            touched.add(field)
    expected = {"annotations", "labels"}
    if what == "changed":
        expected |= {"ownerReferences", "finalizers", "generateName", "selfLink"}
    assert touched == expected


def _meta(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in metadata.items() if key not in BOOKKEEPING}


@pytest.mark.parametrize("account", WRITERS)
def test_each_annotation_needs_its_part(api: httpx.Client, account: str) -> None:
    for note in (*NOTES, "rollout.dev/retry", "rollout.dev/reconcile-paused", "example.com/more"):
        path = ("metadata", "annotations", note)
        values = ("2", None) if note in NOTES else ("true",)
        for value in values:
            answer = attempt(api, account, "full", path, value)
            judge(answer, account, path, NEEDS.get(path, "spec"))


def test_a_viewer_writes_nothing(api: httpx.Client) -> None:
    for path in (*FIELDS, *(("metadata", field) for field in META)):
        assert attempt(api, "viewer", "full", path, None).status_code == 403
