"""The builders of children: what a pod and the Services of a pool look like."""

from __future__ import annotations

from typing import Any

from rollout_operator.api.revision import is_current, revision
from rollout_operator.config import EngineDefaults
from rollout_operator.core.pods.builder import PodBuilder
from rollout_operator.core.services import differs, pool_services, repair
from world import spec_of

GPU: dict[str, Any] = {
    "replicas": 1,
    "engine": {"type": "vllm", "args": ["--max-num-seqs=8"]},
    "model": {"source": {"hub": {"repo": "org/model", "revision": "abc"}}},
    "parallelism": {"tensor": 8, "pipeline": 2, "nodes": 2},
    "accelerator": {"resource": "nvidia.com/gpu"},
}


def build(
    replica: int = 0, rank: int = 0, defaults: dict[str, Any] | None = None, **spec: Any
) -> Any:
    base = EngineDefaults.model_validate({"image": "worker:1", **(defaults or {})})
    return PodBuilder("pool", "ns", "uid", "", spec_of(**spec), base).build(replica, rank, 0)


def env(pod: dict[str, Any]) -> dict[str, Any]:
    return {
        e["name"]: e.get("value", e.get("valueFrom")) for e in pod["spec"]["containers"][0]["env"]
    }


def test_names_labels_and_owner_are_the_contract() -> None:
    pod = build(replica=3)
    assert pod["metadata"]["name"] == pod["spec"]["hostname"] == "pool-3-0"
    assert pod["spec"]["subdomain"] == "pool-heads"
    assert pod["metadata"]["labels"] == {
        "app.kubernetes.io/name": "rollout-worker",
        "app.kubernetes.io/managed-by": "rollout-operator",
        "app.kubernetes.io/instance": "pool",
        "rollout.dev/pool": "pool",
        "rollout.dev/replica": "3",
        "rollout.dev/rank": "0",
        "rollout.dev/role": "head",
        "rollout.dev/revision": revision(spec_of()),
    }
    (owner,) = pod["metadata"]["ownerReferences"]
    assert owner["controller"]
    assert owner["uid"] == "uid"
    assert pod["spec"]["readinessGates"] == [{"conditionType": "rollout.dev/serving"}]


def test_grace_is_drain_and_fifteen_seconds_and_no_part_of_the_revision() -> None:
    assert build(drainSeconds=60)["spec"]["terminationGracePeriodSeconds"] == 75
    assert revision(spec_of(drainSeconds=60)) == revision(spec_of())


def test_only_what_needs_a_new_pod_is_in_the_revision() -> None:
    same: list[dict[str, Any]] = [
        {"replicas": 9},
        {"state": "Asleep"},
        {"suspend": True},
        {"weights": {"strategy": "Eager"}},
        {"updateStrategy": {"maxUnavailable": 3}},
        {"restartPolicy": {"maxRestarts": 3}},
    ]
    other: list[dict[str, Any]] = [
        {"engine": {"type": "hf", "image": "x"}},
        {"podTemplate": {"labels": {"a": "b"}}},
        {"resources": {"limits": {"memory": "1Gi"}}},
        {"weights": {"volume": {"claim": {"name": "w"}}}},
    ]
    assert all(is_current(revision(spec_of()), spec_of(**change)) for change in same)
    assert not any(is_current(revision(spec_of()), spec_of(**change)) for change in other)
    assert not is_current("v0-1234567890", spec_of())


def test_a_gang_knows_its_leader_and_shares_accelerators() -> None:
    pod = build(replica=1, rank=1, **GPU)
    values = env(pod)
    assert values["ROLLOUT_LEADER_ADDRESS"] == "pool-1-0.pool-heads"
    assert (values["ROLLOUT_RANK"], values["ROLLOUT_NODES"]) == ("1", "2")
    container = pod["spec"]["containers"][0]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert container["args"] == ["serve", "--engine-arg=--max-num-seqs=8"]
    assert pod["metadata"]["labels"]["rollout.dev/role"] == "member"
    assert "readinessGates" not in pod["spec"]
    assert "readinessProbe" not in container
    assert "rollout-shm" in {v["name"] for v in pod["spec"]["volumes"]}
    # An engine inside the worker's own process shares nothing.
    assert "rollout-shm" not in {v["name"] for v in build()["spec"]["volumes"]}


def test_models_and_weights_are_mounted_read_only() -> None:
    pod = build(
        model={"source": {"claim": {"name": "models", "subPath": "tiny"}}},
        weights={"volume": {"claim": {"name": "steps"}}},
    )
    mounts = {m["mountPath"]: m for m in pod["spec"]["containers"][0]["volumeMounts"]}
    assert mounts["/rollout/model"] == {
        "name": "rollout-model",
        "mountPath": "/rollout/model",
        "readOnly": True,
        "subPath": "tiny",
    }
    assert mounts["/rollout/weights"]["readOnly"]
    assert env(pod)["ROLLOUT_WEIGHTS_ROOTS"] == "/rollout/model:/rollout/weights"


def test_weights_may_lie_on_the_mount_that_holds_the_model() -> None:
    template: dict[str, Any] = {
        "volumes": [{"name": "m", "emptyDir": {}}],
        "volumeMounts": [{"name": "m", "mountPath": "/models"}],
    }
    pod = build(model={"source": {"path": "/models/a/b"}}, podTemplate=template)
    assert env(pod)["ROLLOUT_WEIGHTS_ROOTS"] == "/models"
    assert env(build())["ROLLOUT_WEIGHTS_ROOTS"] == "/models"


def test_the_pool_wins_over_the_operators_defaults() -> None:
    defaults: dict[str, Any] = {
        "podTemplate": {
            "labels": {"team": "a", "tier": "x"},
            "volumes": [{"name": "env", "emptyDir": {}}],
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
        },
        "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "1"}],
    }
    pod = build(
        defaults=defaults,
        engine={"type": "hf", "image": "mine:2", "env": [{"name": "B", "value": "2"}]},
        podTemplate={"labels": {"tier": "y"}, "volumes": [{"name": "more", "emptyDir": {}}]},
    )
    assert pod["metadata"]["labels"]["team"] == "a"
    assert pod["metadata"]["labels"]["tier"] == "y"
    assert {"env", "more"} <= {v["name"] for v in pod["spec"]["volumes"]}
    assert (env(pod)["A"], env(pod)["B"]) == ("1", "2")
    assert pod["spec"]["containers"][0]["image"] == "mine:2"
    assert [t["key"] for t in pod["spec"]["tolerations"]] == [
        "gpu",
        "node.kubernetes.io/not-ready",
        "node.kubernetes.io/unreachable",
    ]


def test_pods_are_restricted() -> None:
    pod = build()
    container = pod["spec"]["containers"][0]["securityContext"]
    assert pod["spec"]["securityContext"]["runAsNonRoot"]
    assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["readOnlyRootFilesystem"]
    assert container["capabilities"] == {"drop": ["ALL"]}
    assert not container["allowPrivilegeEscalation"]


def test_services() -> None:
    data, heads = pool_services("pool", "ns", "uid")
    assert data["metadata"]["name"] == "pool"
    assert data["spec"]["selector"] == {"rollout.dev/pool": "pool", "rollout.dev/role": "head"}
    assert [p["port"] for p in data["spec"]["ports"]] == [8000]
    assert heads["metadata"]["name"] == "pool-heads"
    assert heads["spec"]["clusterIP"] == "None"
    assert heads["spec"]["publishNotReadyAddresses"]
    assert [p["port"] for p in heads["spec"]["ports"]] == [8000, 8001]


def test_a_changed_service_is_mended() -> None:
    data, _ = pool_services("pool", "ns", "uid")
    assert differs(data, data) is None
    broken = {**data, "spec": {**data["spec"], "selector": {"app": "else"}}}
    assert differs(data, broken) == "spec.selector"
    patch = {op["path"]: op["value"] for op in repair(data)}
    assert patch["/spec/selector"] == data["spec"]["selector"]
    assert patch["/metadata/labels/rollout.dev~1pool"] == "pool"
