"""The CRD on a real API server: what it takes, fills in, shows, and lets change."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from localkube import Cluster
from rollout_operator.api.spec import RolloutReplicaSpec, parse_spec
from rollout_worker.schemas import WeightsId
from tests.support.api.apiclient import POOLS, api_of
from tests.support.api.people import Namespace
from tests.support.manifests import COLOCATED, FULL, GPU, HYBRID, pool, pushed, source, target


@pytest.fixture(scope="module")
def space(crd: Cluster) -> Iterator[Namespace]:
    crd.kubectl("create", "namespace", "crd")
    yield Namespace(crd, "crd")
    crd.kubectl("delete", "namespace", "crd", "--wait=false")


def made(space: Namespace, name: str, patch: dict[str, Any] | None = None) -> dict[str, Any]:
    """Create a pool; return it as it is stored."""
    space.create(pool(name, patch or {}))
    return stored(space, name)


def stored(space: Namespace, name: str) -> dict[str, Any]:
    return api_of(space.cluster).get(f"{POOLS.format(space.name)}/{name}")


def tell_status(space: Namespace, name: str, body: dict[str, Any]) -> None:
    """Merge into a pool's status."""
    api_of(space.cluster).patch(f"{POOLS.format(space.name)}/{name}/status", body)


def test_takes_every_field(space: Namespace) -> None:
    found = made(space, "full", FULL)
    assert found["spec"] == pool("full", FULL)["spec"]
    target = parse_spec(found).weights.target
    assert target is not None
    assert target.identity == WeightsId(epoch=1, version=7)


def test_takes_every_field_of_a_colocated_pool(space: Namespace) -> None:
    ranks = {"engine": {"type": "vllm"}, "parallelism": {"tensor": 2, "pipeline": 2, "nodes": 2}}
    document = made(space, "beside", COLOCATED | ranks)
    assert document["spec"]["colocation"] == COLOCATED["colocation"]
    found = parse_spec(document)
    assert found.world_size == 4, "the claim's devices, so no accelerator is named"
    assert found.parallelism.nodes == 2
    assert found.colocation is not None
    assert found.colocation.trainer_selector.to_query() == "job=grpo,role in (rank,head)"
    columns = space.kubectl("get", "rr", "beside").split()
    assert "Colocated" in columns


def test_takes_a_hybrid_pool_and_does_not_scale_it(space: Namespace) -> None:
    said = {"state": "Paused", "sleep": {"level": 2}, "drainSeconds": 3}
    change = HYBRID | said | target(1, 2) | {"serviceAccountName": "trainer"}
    assert parse_spec(made(space, "inside", change)).mode == "Hybrid"
    refusal = space.refusal("scale", "rr", "inside", "--replicas=3")
    assert (
        "spec.replicas: a Hybrid pool has one replica in each pod of its trainer, not 3" in refusal
    )
    assert "spec.suspend must be false in mode Hybrid" in space.refused_patch(
        "inside", {"suspend": True}
    )
    tell_status(space, "inside", {"status": {"desiredReplicas": 2, "readyReplicas": 2}})
    row = space.kubectl("get", "rr", "inside").splitlines()[1].split()
    assert row[1:5] == ["Hybrid", "hf", "2", "2"], "as many as the trainer has pods"


def test_a_trainers_selector_is_taken_by_the_api_server(space: Namespace) -> None:
    """What the CRD lets pass is a query that lists can be asked with."""
    keys = [
        {"key": "a.example/b_c", "operator": "NotIn", "values": ["x", ""]},
        {"key": "job", "operator": "Exists"},
        {"key": "old", "operator": "DoesNotExist"},
    ]
    change = COLOCATED | {
        "colocation": {"trainerSelector": {"matchExpressions": keys, "matchLabels": {"e.g/k": ""}}}
    }
    document = made(space, "odd", change)
    assert document["spec"]["colocation"]["slots"] == 1
    found = parse_spec(document).colocation
    assert found is not None
    space.kubectl("get", "pods", "-l", found.trainer_selector.to_query())


def test_fills_in_what_people_must_see(space: Namespace) -> None:
    assert made(space, "bare")["spec"] == {
        "replicas": 1,
        "mode": "Standalone",
        "state": "Active",
        "suspend": False,
        "engine": {"type": "hf"},
        "model": {"source": {"path": "/models/tiny"}},
        "parallelism": {"tensor": 1, "pipeline": 1, "data": 1, "nodes": 1},
    }


TRANSITIONS: dict[str, tuple[dict[str, Any], dict[str, Any], str | None]] = {
    "version rises": ({}, target(2, 6, "b"), None),
    "epoch rises with an older source": ({}, target(3, 0, "old"), None),
    "epoch rises with the same source": ({}, target(3, 5, "a"), None),
    "back to the checkpoint": (
        {},
        {
            "weights": {
                "target": {"epoch": 3, "version": 0, "source": {"path": None, "checkpoint": {}}}
            }
        },
        None,
    ),
    "a merge patch that forgets the old source": (
        {},
        target(3, 0, None),
        "needs exactly one of path, checkpoint and pushed: keep one (in a merge patch, set the others "
        "to null)",
    ),
    "pushed after a path": ({}, pushed(2, 6, instead_of="path"), None),
    "pushed after pushed": (pushed(2, 5), pushed(2, 6), None),
    "a path after pushed": (
        pushed(2, 5),
        {
            "weights": {
                "target": {"epoch": 2, "version": 6, "source": {"path": "b", "pushed": None}}
            }
        },
        None,
    ),
    "pushed for a version that has a path": (
        {},
        pushed(2, 5, instead_of="path"),
        "spec.weights.target.source must not change for the same epoch and version: raise",
    ),
    "pushed at a lower version": (
        pushed(2, 5),
        pushed(2, 4),
        "(2, 4) is lower than the stored (2, 5): raise version, or use epoch 3",
    ),
    "same again": ({}, target(2, 5, "a"), None),
    "version goes down": (
        {},
        target(2, 4, "b"),
        "(2, 4) is lower than the stored (2, 5): raise version, or use epoch 3",
    ),
    "epoch goes down": ({}, target(1, 9, "b"), "(1, 9) is lower than the stored (2, 5)"),
    "target removed": ({}, {"weights": {"target": None}}, "spec.weights.target cannot be removed"),
    "weights removed": ({}, {"weights": None}, "spec.weights.target cannot be removed"),
    "source changes alone": (
        {},
        target(2, 5, "b"),
        "spec.weights.target.source must not change for the same epoch and version: raise",
    ),
    "source becomes the checkpoint": (
        {},
        {"weights": {"target": {"source": {"path": None, "checkpoint": {}}}}},
        "source must not change for the same epoch and version: raise version",
    ),
    "version rises alone": (
        {},
        target(2, 6, "a"),
        "spec.weights.target.source must change when version does: give the new version its own source",
    ),
    "engine": (
        {},
        {"engine": {"type": "vllm"}},
        "spec.engine.type is immutable: create another RolloutReplica for another engine",
    ),
    "model path": ({}, source(path="/models/other"), "spec.model.source is immutable: create"),
    "model kind": ({}, source(claim={"name": "c"}), "spec.model.source is immutable: create"),
    "accelerator added": (
        {},
        {"accelerator": GPU},
        "spec.accelerator.resource is immutable: create another RolloutReplica",
    ),
    "accelerator removed": (
        {"accelerator": GPU},
        {"accelerator": None},
        "spec.accelerator.resource is immutable",
    ),
    "accelerator changed": (
        {"accelerator": GPU},
        {"accelerator": {"resource": "amd.com/gpu"}},
        "spec.accelerator.resource is immutable",
    ),
    "parallelism": (
        {"engine": {"type": "vllm"}, "accelerator": GPU},
        {"parallelism": {"tensor": 2}},
        "spec.parallelism is immutable: create another RolloutReplica with the new shape",
    ),
    "parallelism removed is its default": ({}, {"parallelism": None}, None),
    "mode": (
        {},
        COLOCATED,
        "spec.mode is immutable: create another RolloutReplica",
    ),
    "slots": (
        COLOCATED,
        {"colocation": {"slots": 4}},
        "spec.colocation is immutable: create another",
    ),
    "trainer": (
        COLOCATED,
        {"colocation": {"trainerSelector": {"matchLabels": {"job": "ppo"}}}},
        "spec.colocation is immutable: create another RolloutReplica",
    ),
    "no trainer": (COLOCATED, {"colocation": None}, "set it there, and only there"),
    "class added": (
        {},
        {"operatorClass": "blue"},
        "spec.operatorClass is immutable: create another",
    ),
    "class removed": (
        {"operatorClass": "blue"},
        {"operatorClass": None},
        "spec.operatorClass is immutable: create another RolloutReplica for another operator",
    ),
    "class changed": (
        {"operatorClass": "blue"},
        {"operatorClass": "green"},
        "spec.operatorClass is immutable",
    ),
    "image and resources": (
        {},
        {"engine": {"image": "x:2"}, "resources": {"requests": {"cpu": "2"}}},
        None,
    ),
    "state and suspend": ({}, {"state": "Asleep", "suspend": True}, None),
}


@pytest.mark.parametrize(("given", "patch", "message"), TRANSITIONS.values(), ids=TRANSITIONS)
def test_transitions(
    space: Namespace,
    request: pytest.FixtureRequest,
    given: dict[str, Any],
    patch: dict[str, Any],
    message: str | None,
) -> None:
    name = "t-" + request.node.callspec.id.replace(" ", "-").lower()
    start = pool(name, {**target(2, 5, "a"), **given})
    space.create(start)
    if message is None:
        space.patch(name, patch)
    else:
        assert message in space.refused_patch(name, patch)


def test_scale_changes_replicas_and_shows_the_selector(space: Namespace) -> None:
    made(space, "scaled")
    space.kubectl("scale", "rr", "scaled", "--replicas=3")
    selector = "rollout.dev/pool=scaled,rollout.dev/role=head"
    tell_status(space, "scaled", {"status": {"replicas": 3, "selector": selector}})
    scale = json.loads(space.kubectl("get", "rr", "scaled", "--subresource=scale", "-o", "json"))
    assert scale["spec"]["replicas"] == 3
    assert scale["status"] == {"replicas": 3, "selector": selector}
    assert "less than or equal to 9999" in space.refusal(
        "scale", "rr", "scaled", "--replicas=10000"
    )


STATUS: dict[str, Any] = {
    "observedGeneration": 1,
    "phase": "Updating",
    "message": "waiting for 1 of 2 replicas to load weights (1, 7)",
    "replicas": 2,
    "desiredReplicas": 2,
    "readyReplicas": 1,
    "updatedReplicas": 2,
    "asleepReplicas": 0,
    "weights": {
        "committed": {"epoch": 1, "version": 7, "source": {"path": "w/7"}, "rootHash": "ab"},
        "stagedReplicas": 1,
    },
    "restarts": 4,
    "conditions": [
        {
            "type": "Ready",
            "status": "False",
            "reason": "Updating",
            "message": "one of two",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
            "observedGeneration": 1,
        }
    ],
}


def test_columns_show_the_committed_version(space: Namespace) -> None:
    made(space, "columns", {"replicas": 2})
    tell_status(space, "columns", {"status": STATUS})
    head, row = space.kubectl("get", "rr", "columns").splitlines()
    columns = ["NAME", "MODE", "ENGINE", "DESIRED", "READY", "WEIGHTS", "TARGET", "PHASE", "AGE"]
    assert head.split() == columns
    assert row.split()[:-1] == ["columns", "Standalone", "hf", "2", "1", "7", "Updating"]
    head, row = space.kubectl("get", "rr", "columns", "-o", "wide").splitlines()
    assert head.split()[9:] == ["EPOCH", "UPDATED", "ASLEEP", "RESTARTS", "MESSAGE"]
    assert row.split()[8:12] == ["1", "2", "0", "4"]
    assert row.endswith("waiting for 1 of 2 replicas to load weights (1, 7)")


def test_status_and_spec_do_not_touch_each_other(space: Namespace) -> None:
    space.create(pool("apart") | {"status": STATUS})
    assert "status" not in stored(space, "apart")
    tell_status(space, "apart", {"spec": {"replicas": 5}, "status": {"restarts": 1}})
    now = stored(space, "apart")
    assert now["spec"]["replicas"] == 1
    assert now["metadata"]["generation"] == 1


def test_selects_by_fields(space: Namespace) -> None:
    made(space, "asleep", {"state": "Asleep"})
    made(space, "awake")
    names = space.kubectl("get", "rr", "-o", "name", "--field-selector", "spec.state=Asleep")
    assert "rolloutreplica.rollout.dev/asleep" in names.split()
    assert "rolloutreplica.rollout.dev/awake" not in names.split()
    space.kubectl("get", "rr", "--field-selector", "spec.engine.type=hf,status.phase=Ready")


def test_explain_documents_every_field(space: Namespace) -> None:
    """It shows what the API server publishes."""
    published = api_of(space.cluster).get("/openapi/v3/apis/rollout.dev/v1alpha1")
    found = published["components"]["schemas"]["dev.rollout.v1alpha1.RolloutReplica"]
    shown = found["properties"]["spec"]["properties"]
    for field in RolloutReplicaSpec.model_fields.values():
        assert field.description
        said = " ".join(field.description.split()).rstrip(".")
        assert said in shown[str(field.alias)]["description"], field.alias
    assert "weights" in space.kubectl("explain", "rr.spec", "--recursive")


def test_is_listed_among_all(space: Namespace) -> None:
    made(space, "among-all")
    assert "rolloutreplica.rollout.dev/among-all" in space.kubectl("get", "all")
