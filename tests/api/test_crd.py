"""The CRD on a real API server: what it takes, fills in, shows, and lets change."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from localkube import Cluster
from rollout_operator.api.spec import RolloutReplicaSpec, parse_spec
from rollout_worker.schemas import WeightsId
from tests.support.api.namespaced import Namespace
from tests.support.manifests import COLOCATED, FULL, GPU, HYBRID, pool, pushed, source, target


@pytest.fixture(scope="module")
def space(crd: Cluster) -> Iterator[Namespace]:
    crd.kubectl("create", "namespace", "crd")
    yield Namespace(crd, "crd")
    crd.kubectl("delete", "namespace", "crd", "--wait=false")


def test_takes_every_field(space: Namespace) -> None:
    manifest = pool("full", FULL)
    space.kubectl("create", "-f", "-", manifest=manifest)
    stored = json.loads(space.kubectl("get", "rr", "full", "-o", "json"))
    assert stored["spec"] == manifest["spec"]
    target = parse_spec(stored).target
    assert target is not None
    assert target.identity == WeightsId(epoch=1, version=7)


def test_takes_every_field_of_a_colocated_pool(space: Namespace) -> None:
    ranks = {"engine": {"type": "vllm"}, "parallelism": {"tensor": 2, "pipeline": 2, "nodes": 2}}
    space.kubectl("create", "-f", "-", manifest=pool("beside", COLOCATED | ranks))
    stored = json.loads(space.kubectl("get", "rr", "beside", "-o", "json"))
    assert stored["spec"]["colocation"] == COLOCATED["colocation"]
    found = parse_spec(stored)
    assert found.world_size == 4, "the claim's devices, so no accelerator is named"
    assert found.parallelism.nodes == 2
    assert found.colocation is not None
    assert found.colocation.trainer_selector.to_query() == "job=grpo,role in (rank,head)"
    columns = space.kubectl("get", "rr", "beside").split()
    assert "Colocated" in columns


def test_takes_a_hybrid_pool_and_does_not_scale_it(space: Namespace) -> None:
    said = {"state": "Paused", "sleep": {"level": 2}, "drainSeconds": 3}
    manifest = pool("inside", HYBRID | said | target(1, 2) | {"serviceAccountName": "trainer"})
    space.kubectl("create", "-f", "-", manifest=manifest)
    stored = json.loads(space.kubectl("get", "rr", "inside", "-o", "json"))
    assert parse_spec(stored).mode == "Hybrid"
    refusal = space.refusal("scale", "rr", "inside", "--replicas=3")
    assert (
        "spec.replicas: a Hybrid pool has one replica in each pod of its trainer, not 3" in refusal
    )
    assert "spec.suspend must be false in mode Hybrid" in space.refused_patch(
        "inside", {"suspend": True}
    )
    status = {"status": {"desiredReplicas": 2, "readyReplicas": 2}}
    space.kubectl(
        *("patch", "rr", "inside", "--subresource=status", "--type=merge", "-p", json.dumps(status))
    )
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
    space.kubectl("create", "-f", "-", manifest=pool("odd", change))
    stored = json.loads(space.kubectl("get", "rr", "odd", "-o", "json"))
    assert stored["spec"]["colocation"]["slots"] == 1
    found = parse_spec(stored).colocation
    assert found is not None
    space.kubectl("get", "pods", "-l", found.trainer_selector.to_query())


def test_fills_in_what_people_must_see(space: Namespace) -> None:
    space.kubectl("create", "-f", "-", manifest=pool("bare"))
    assert json.loads(space.kubectl("get", "rr", "bare", "-o", "json"))["spec"] == {
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
    space.kubectl("create", "-f", "-", manifest=pool("scaled"))
    space.kubectl("scale", "rr", "scaled", "--replicas=3")
    selector = "rollout.dev/pool=scaled,rollout.dev/role=head"
    status = {"status": {"replicas": 3, "selector": selector}}
    space.kubectl(
        "patch",
        "rr",
        "scaled",
        "--subresource=status",
        "--type=merge",
        "-p",
        json.dumps(status),
    )
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
    space.kubectl("create", "-f", "-", manifest=pool("columns", {"replicas": 2}))
    space.kubectl(
        *("patch", "rr", "columns", "--subresource=status", "--type=merge"),
        *("-p", json.dumps({"status": STATUS})),
    )
    head, row = space.kubectl("get", "rr", "columns").splitlines()
    columns = ["NAME", "MODE", "ENGINE", "DESIRED", "READY", "WEIGHTS", "TARGET", "PHASE", "AGE"]
    assert head.split() == columns
    assert row.split()[:-1] == ["columns", "Standalone", "hf", "2", "1", "7", "Updating"]
    head, row = space.kubectl("get", "rr", "columns", "-o", "wide").splitlines()
    assert head.split()[9:] == ["EPOCH", "UPDATED", "ASLEEP", "RESTARTS", "MESSAGE"]
    assert row.split()[8:12] == ["1", "2", "0", "4"]
    assert row.endswith("waiting for 1 of 2 replicas to load weights (1, 7)")


def test_foreign_conditions_survive_an_apply_of_ours(space: Namespace) -> None:
    space.kubectl("create", "-f", "-", manifest=pool("conditions"))
    foreign = STATUS["conditions"][0] | {"type": "example.com/Approved", "status": "True"}
    for manager, condition in (
        ("stranger", foreign),
        ("rollout-operator", STATUS["conditions"][0]),
    ):
        body = pool("conditions") | {"status": {"conditions": [condition]}}
        del body["spec"]
        space.kubectl(
            *("apply", "--server-side", "--subresource=status", "--force-conflicts"),
            *(f"--field-manager={manager}", "-f", "-"),
            manifest=body,
        )
    stored = json.loads(space.kubectl("get", "rr", "conditions", "-o", "json"))
    assert {c["type"] for c in stored["status"]["conditions"]} == {"Ready", "example.com/Approved"}


def test_status_and_spec_do_not_touch_each_other(space: Namespace) -> None:
    space.kubectl("create", "-f", "-", manifest=pool("apart") | {"status": STATUS})
    stored = json.loads(space.kubectl("get", "rr", "apart", "-o", "json"))
    assert "status" not in stored
    space.kubectl(
        *("patch", "rr", "apart", "--subresource=status", "--type=merge"),
        *("-p", json.dumps({"spec": {"replicas": 5}, "status": {"restarts": 1}})),
    )
    stored = json.loads(space.kubectl("get", "rr", "apart", "-o", "json"))
    assert stored["spec"]["replicas"] == 1
    assert stored["metadata"]["generation"] == 1


def test_selects_by_fields(space: Namespace) -> None:
    space.kubectl("create", "-f", "-", manifest=pool("asleep", {"state": "Asleep"}))
    space.kubectl("create", "-f", "-", manifest=pool("awake"))
    names = space.kubectl("get", "rr", "-o", "name", "--field-selector", "spec.state=Asleep")
    assert "rolloutreplica.rollout.dev/asleep" in names.split()
    assert "rolloutreplica.rollout.dev/awake" not in names.split()
    space.kubectl("get", "rr", "--field-selector", "spec.engine.type=hf,status.phase=Ready")


def test_explain_documents_every_field(space: Namespace) -> None:
    for field in RolloutReplicaSpec.model_fields.values():
        path = f"rr.spec.{field.alias}"
        text_ = space.kubectl("explain", path)
        description = " ".join(text_.partition("DESCRIPTION:")[2].split())
        assert field.description
        assert " ".join(field.description.split()).rstrip(".") in description, path
    assert "weights" in space.kubectl("explain", "rr.spec", "--recursive")


def test_is_listed_among_all(space: Namespace) -> None:
    space.kubectl("create", "-f", "-", manifest=pool("among-all"))
    assert "rolloutreplica.rollout.dev/among-all" in space.kubectl("get", "all")
