"""The CRD on a real API server: what it refuses and with which words, and what it fills in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from localkube import Cluster, ClusterError
from manifests import pool, text
from rollout_operator.spec import RolloutReplicaSpec, parse_spec
from rollout_worker.schemas import WeightsId

NAMESPACE = "crd"
GPU = {"resource": "nvidia.com/gpu"}


@pytest.fixture(scope="module")
def cluster(crd: Cluster) -> Iterator[Cluster]:
    crd.kubectl("create", "namespace", NAMESPACE)
    yield crd
    crd.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


def kubectl(cluster: Cluster, *arguments: str, manifest: dict[str, Any] | None = None) -> str:
    return cluster.kubectl(
        "-n", NAMESPACE, *arguments, input=None if manifest is None else text(manifest)
    )


def refusal(cluster: Cluster, *arguments: str, manifest: dict[str, Any] | None = None) -> str:
    with pytest.raises(ClusterError) as error:
        kubectl(cluster, *arguments, manifest=manifest)
    return str(error.value)


def env(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"engine": {"env": list(entries)}}


def target(epoch: int, version: int, path: str | None = "a") -> dict[str, Any]:
    where: dict[str, Any] = {"checkpoint": {}} if path is None else {"path": path}
    return {"weights": {"target": {"epoch": epoch, "version": version, "source": where}}}


def template(**fields: Any) -> dict[str, Any]:
    return {"podTemplate": fields}


def mount(path: str, name: str = "data") -> dict[str, Any]:
    return template(
        volumes=[{"name": "data", "emptyDir": {}}], volumeMounts=[{"name": name, "mountPath": path}]
    )


def source(**fields: Any) -> dict[str, Any]:
    return {"model": {"source": {"path": None, **fields}}}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "negative replicas": ({"replicas": -1}, "spec.replicas in body should be greater than or"),
    "too many replicas": ({"replicas": 10000}, "spec.replicas in body should be less than or"),
    "replicas null type": ({"replicas": "two"}, "spec.replicas"),
    "unknown mode": ({"mode": "Hybrid"}, 'spec.mode: Unsupported value: "Hybrid"'),
    "unknown state": ({"state": "Awake"}, 'supported values: "Active", "Paused", "Asleep"'),
    "sleep level": ({"sleep": {"level": 3}}, "spec.sleep.level: Unsupported value: 3"),
    "no engine": ({"engine": None}, "spec.engine: Required value"),
    "no engine type": ({"engine": {"type": None}}, "spec.engine.type: Required value"),
    "unknown engine": ({"engine": {"type": "trt"}}, 'supported values: "hf", "vllm", "sglang"'),
    "logprobs": ({"engine": {"logprobs": "raw"}}, 'supported values: "Sampling", "Raw"'),
    "image with a space": ({"engine": {"image": "a b"}}, "spec.engine.image"),
    "pull policy": (
        {"engine": {"imagePullPolicy": "Sometimes"}},
        'supported values: "Always", "IfNotPresent", "Never"',
    ),
    "env of the operator": (
        env({"name": "ROLLOUT_ENGINE", "value": "x"}),
        "spec.engine.env[0].name: Invalid value: env must not set ROLLOUT_*: the operator sets "
        "these from the spec; remove the entry",
    ),
    "env twice": (
        env({"name": "A", "value": "1"}, {"name": "A", "value": "2"}),
        "spec.engine.env[1]: Duplicate value",
    ),
    "env value and valueFrom": (
        env({"name": "A", "value": "1", "valueFrom": {"fieldRef": {"fieldPath": "spec.x"}}}),
        "env takes value or valueFrom, not both: remove one",
    ),
    "env valueFrom empty": (
        env({"name": "A", "valueFrom": {}}),
        "valueFrom needs exactly one of secretKeyRef, configMapKeyRef and fieldRef: keep one",
    ),
    "env name": (env({"name": "1 A"}), "spec.engine.env[0].name"),
    "no model": ({"model": None}, "spec.model: Required value"),
    "no source": (source(), "spec.model.source needs exactly one of path, claim and hub: keep one"),
    "two sources": (
        source(path="/m", claim={"name": "c"}),
        "spec.model.source needs exactly one of path, claim and hub: keep one",
    ),
    "relative model path": (
        source(path="models/x"),
        "spec.model.source.path must be absolute and without '..'",
    ),
    "model path upwards": (source(path="/m/../x"), "must be absolute and without '..'"),
    "claim without name": (source(claim={}), "spec.model.source.claim.name: Required value"),
    "claim subPath upwards": (
        source(claim={"name": "c", "subPath": "../x"}),
        "subPath must be relative and without '..': give a folder inside the volume",
    ),
    "claim subPath absolute": (
        source(claim={"name": "c", "subPath": "/x"}),
        "subPath must be relative and without '..'",
    ),
    "hub repo": (source(hub={"repo": "a/b/c"}), "spec.model.source.hub.repo"),
    "hub token": (
        source(hub={"repo": "a/b", "tokenSecret": {"name": "s"}}),
        "spec.model.source.hub.tokenSecret.key: Required value",
    ),
    "dtype": ({"model": {"dtype": "half"}}, 'supported values: "auto", "bfloat16"'),
    "model length": ({"model": {"maxLength": 0}}, "spec.model.maxLength in body should be greater"),
    "zero parallelism": (
        {"parallelism": {"tensor": 0}},
        "spec.parallelism.tensor in body should be greater than or equal to 1",
    ),
    "too many nodes": (
        {"parallelism": {"nodes": 1000}},
        "spec.parallelism.nodes in body should be less than or equal to 999",
    ),
    "hf with a world": (
        {"parallelism": {"data": 2}, "accelerator": GPU},
        "engine hf runs on one device, not 2: set tensor, pipeline and data to 1 or choose "
        "another engine",
    ),
    "CPU with a world": (
        {"engine": {"type": "vllm"}, "parallelism": {"tensor": 4}},
        "a pool on CPU (no spec.accelerator) has one rank, not 4: set spec.accelerator.resource",
    ),
    "world over nodes": (
        {"engine": {"type": "vllm"}, "accelerator": GPU, "parallelism": {"tensor": 8, "nodes": 3}},
        "tensor*pipeline*data = 8 does not divide over 3 nodes: set nodes to a divisor of it",
    ),
    "more nodes than ranks": (
        {"parallelism": {"nodes": 2}},
        "tensor*pipeline*data = 1 does not divide over 2 nodes",
    ),
    "accelerator empty": ({"accelerator": {}}, "spec.accelerator.resource: Required value"),
    "accelerator name": ({"accelerator": {"resource": "gpu"}}, "spec.accelerator.resource"),
    "accelerator in limits": (
        {"accelerator": GPU, "resources": {"limits": {"nvidia.com/gpu": 1}}},
        "spec.resources must not name the accelerator: the operator adds it",
    ),
    "accelerator in requests": (
        {"accelerator": GPU, "resources": {"requests": {"nvidia.com/gpu": "1"}}},
        "spec.resources must not name the accelerator",
    ),
    "quantity": (
        {"resources": {"requests": {"memory": "16 GB"}}},
        "spec.resources.requests.memory",
    ),
    "request above the limit": (
        {"resources": {"requests": {"memory": "2Gi"}, "limits": {"memory": "1500Mi"}}},
        "spec.resources.requests must not exceed limits: lower the request or raise the limit",
    ),
    "request above the limit in whole numbers": (
        {"resources": {"requests": {"cpu": 2}, "limits": {"cpu": "1500m"}}},
        "spec.resources.requests must not exceed limits",
    ),
    "label key": (
        template(labels={"a b": "c"}),
        "spec.podTemplate.labels: a key is a name of at most 63 letters",
    ),
    "annotation key": (template(annotations={"x/y/z": "c"}), "spec.podTemplate.annotations: a key"),
    "node label key": (template(nodeSelector={"-": "c"}), "spec.podTemplate.nodeSelector: a key"),
    "label value": (template(labels={"a": "b c"}), "spec.podTemplate.labels.a"),
    "target without source": (
        {"weights": {"target": {"epoch": 1, "version": 1}}},
        "spec.weights.target.source: Required value",
    ),
    "negative version": (target(0, -1), "spec.weights.target.version in body should be greater"),
    "version beyond JSON": (target(0, 2**53), "spec.weights.target.version in body should be less"),
    "two weights sources": (
        {
            "weights": {
                "target": {"epoch": 1, "version": 1, "source": {"path": "a", "checkpoint": {}}}
            }
        },
        "spec.weights.target.source needs exactly one of path and checkpoint: keep one",
    ),
    "no weights source": (
        {"weights": {"target": {"epoch": 1, "version": 1, "source": {}}}},
        "spec.weights.target.source needs exactly one of path and checkpoint: keep one",
    ),
    "weights path upwards": (
        target(1, 1, "../secrets"),
        "spec.weights.target.source.path must not contain '..'",
    ),
    "(0, 0) elsewhere": (
        target(0, 0, "a"),
        "(0, 0) is the model's own checkpoint: set source to {checkpoint: {}}, or raise version",
    ),
    "strategy": (
        {"weights": {"strategy": "Canary"}},
        'supported values: "AllAtOnce", "Rolling", "Eager"',
    ),
    "in-flight policy": (
        {"weights": {"inFlight": {"policy": "Pin"}}},
        'supported values: "Drain", "Abort", "Keep", "Recompute"',
    ),
    "on deadline": (
        {"weights": {"inFlight": {"onDeadline": "Wait"}}},
        'supported values: "Abort", "Keep"',
    ),
    "weights maxUnavailable": (
        {"weights": {"maxUnavailable": 0}},
        "spec.weights.maxUnavailable in body should be greater than or equal to 1",
    ),
    "weights deadline": (
        {"weights": {"deadlineSeconds": 0}},
        "spec.weights.deadlineSeconds in body should be greater than or equal to 1",
    ),
    "update maxUnavailable": (
        {"updateStrategy": {"maxUnavailable": 0}},
        "spec.updateStrategy.maxUnavailable in body should be greater than or equal to 1",
    ),
    "restart delays": (
        {"restartPolicy": {"baseDelaySeconds": 60, "maxDelaySeconds": 5}},
        "baseDelaySeconds (10 if absent) must not exceed maxDelaySeconds",
    ),
    "restart delay below the default": (
        {"restartPolicy": {"maxDelaySeconds": 5}},
        "lower the one or raise the other",
    ),
    "drain": ({"drainSeconds": -1}, "spec.drainSeconds in body should be greater than or equal"),
    "account": ({"serviceAccountName": "Rollout_Worker"}, "spec.serviceAccountName"),
    "label of the operator": (
        template(labels={"rollout.dev/pool": "other"}),
        "spec.podTemplate.labels: rollout.dev/* and app.kubernetes.io/name, "
        "app.kubernetes.io/instance, app.kubernetes.io/managed-by are set by the operator",
    ),
    "app label of the operator": (
        template(labels={"app.kubernetes.io/name": "other"}),
        "are set by the operator: remove them",
    ),
    "annotation of the operator": (
        template(annotations={"rollout.dev/restarts": "0"}),
        "spec.podTemplate.annotations: rollout.dev/* are set by the operator: remove them",
    ),
    "mount below /rollout": (
        mount("/rollout/model"),
        "mountPath must not be /rollout or below: the operator mounts the model",
    ),
    "mount with dots": (mount("/data/../rollout/weights"), "mountPath must be an absolute path"),
    "mount relative": (mount("data"), "mountPath must be an absolute path"),
    "mount of the root": (mount("/"), "mountPath must be an absolute path"),
    "mount without a volume": (
        mount("/data", name="other"),
        "every entry of volumeMounts needs a volume of the same name: add it to "
        "spec.podTemplate.volumes",
    ),
    "volume of the operator": (
        template(volumes=[{"name": "rollout-model", "emptyDir": {}}]),
        "volume names starting with rollout- belong to the operator: rename it",
    ),
    "two volumes of one name": (
        template(volumes=[{"name": "a", "emptyDir": {}}, {"name": "a", "emptyDir": {}}]),
        "spec.podTemplate.volumes[1]: Duplicate value",
    ),
    "two mounts at one path": (
        template(
            volumes=[{"name": "a", "emptyDir": {}}],
            volumeMounts=[{"name": "a", "mountPath": "/a"}, {"name": "a", "mountPath": "/a"}],
        ),
        "spec.podTemplate.volumeMounts[1]: Duplicate value",
    ),
    "toleration effect": (
        template(tolerations=[{"effect": "Never"}]),
        'supported values: "NoSchedule", "PreferNoSchedule", "NoExecute"',
    ),
    "unknown field": ({"replicaz": 1}, 'unknown field "spec.replicaz"'),
    "unknown nested field": (
        {"weights": {"inFlight": {"polici": "Drain"}}},
        'unknown field "spec.weights.inFlight.polici"',
    ),
    "field of a later release": (
        {"updateStrategy": {"maxSurge": 1}},
        'unknown field "spec.updateStrategy.maxSurge"',
    ),
}


@pytest.mark.parametrize(("patch", "message"), BAD.values(), ids=BAD)
def test_refuses_and_says_what_to_change(
    cluster: Cluster, patch: dict[str, Any], message: str
) -> None:
    said = refusal(cluster, "create", "--dry-run=server", "-f", "-", manifest=pool("bad", patch))
    assert message in said


@pytest.mark.parametrize(
    "name", ["a" * 51, "9lives", "with.dot", "pool-heads"], ids=["long", "digit", "dot", "heads"]
)
def test_refuses_names_out_of_bounds(cluster: Cluster, name: str) -> None:
    said = refusal(cluster, "create", "--dry-run=server", "-f", "-", manifest=pool(name))
    assert "metadata.name must be a DNS-1035 label" in said
    assert "at most 50 characters that does not end in -heads: choose another name" in said


FULL: dict[str, Any] = {
    "replicas": 4,
    "mode": "Standalone",
    "state": "Paused",
    "sleep": {"level": 2},
    "suspend": True,
    "engine": {
        "type": "vllm",
        "logprobs": "Raw",
        "image": "registry.example/vllm:1@sha256:" + "a" * 64,
        "imagePullPolicy": "IfNotPresent",
        "args": ["--max-num-seqs", "64"],
        "env": [
            {"name": "A", "value": ""},
            {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
            {"name": "C", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}},
            {"name": "D", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ],
    },
    "model": {
        "source": {
            "path": None,
            "hub": {
                "repo": "Qwen/Qwen3-0.6B",
                "revision": "main",
                "tokenSecret": {"name": "hub", "key": "token"},
            },
        },
        "servedName": "policy",
        "dtype": "bfloat16",
        "maxLength": 4096,
    },
    "parallelism": {"tensor": 8, "pipeline": 2, "data": 1, "nodes": 2},
    "accelerator": GPU,
    "resources": {
        "requests": {"cpu": 2, "memory": "16Gi"},
        "limits": {"cpu": "2500m", "rdma/hca": "1"},
    },
    "weights": {
        "target": {"epoch": 1, "version": 7, "source": {"path": "steps/7"}},
        "volume": {"claim": {"name": "weights", "subPath": "run-1"}},
        "strategy": "Rolling",
        "maxUnavailable": 2,
        "inFlight": {"policy": "Keep", "deadlineSeconds": 5, "onDeadline": "Keep"},
        "deadlineSeconds": 60,
    },
    "updateStrategy": {"maxUnavailable": 2},
    "restartPolicy": {"baseDelaySeconds": 1, "maxDelaySeconds": 60, "maxRestarts": 5},
    "drainSeconds": 5,
    "serviceAccountName": "workers",
    "podTemplate": {
        "labels": {"team": "rl"},
        "annotations": {"example.com/note": "x"},
        "nodeSelector": {"gpu": "h200"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {"nodeAffinity": {}},
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {"team": "rl"}},
            }
        ],
        "volumes": [
            {"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}}
        ],
        "volumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
        "imagePullSecrets": [{"name": "pull"}],
        "priorityClassName": "high",
        "runtimeClassName": "nvidia",
        "schedulerName": "default-scheduler",
        "securityContext": {"runAsUser": 1000, "fsGroup": 1000},
    },
}


def test_takes_every_field(cluster: Cluster) -> None:
    manifest = pool("full", FULL)
    kubectl(cluster, "create", "-f", "-", manifest=manifest)
    stored = json.loads(kubectl(cluster, "get", "rr", "full", "-o", "json"))
    assert stored["spec"] == manifest["spec"]
    assert parse_spec(stored).target_id == WeightsId(epoch=1, version=7)


def test_fills_in_what_people_must_see(cluster: Cluster) -> None:
    kubectl(cluster, "create", "-f", "-", manifest=pool("bare"))
    assert json.loads(kubectl(cluster, "get", "rr", "bare", "-o", "json"))["spec"] == {
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
        "needs exactly one of path and checkpoint: keep one (in a merge patch, set the other to "
        "null)",
    ),
    "same again": ({}, target(2, 5, "a"), None),
    "version goes down": (
        {},
        target(2, 4, "b"),
        "(2, 4) is below the stored (2, 5): raise version, or take epoch 3",
    ),
    "epoch goes down": ({}, target(1, 9, "b"), "(1, 9) is below the stored (2, 5)"),
    "target removed": ({}, {"weights": {"target": None}}, "spec.weights.target cannot be removed"),
    "weights removed": ({}, {"weights": None}, "spec.weights.target cannot be removed"),
    "source changes alone": (
        {},
        target(2, 5, "b"),
        "spec.weights.target.source must not change under the same epoch and version: raise",
    ),
    "source becomes the checkpoint": (
        {},
        {"weights": {"target": {"source": {"path": None, "checkpoint": {}}}}},
        "source must not change under the same epoch and version: raise version",
    ),
    "version rises alone": (
        {},
        target(2, 6, "a"),
        "spec.weights.target.source must change with version: give the new version's own source",
    ),
    "engine": (
        {},
        {"engine": {"type": "vllm"}},
        "spec.engine.type is immutable: make another RolloutReplica for another engine",
    ),
    "model path": ({}, source(path="/models/other"), "spec.model.source is immutable: make"),
    "model kind": ({}, source(claim={"name": "c"}), "spec.model.source is immutable: make"),
    "accelerator added": (
        {},
        {"accelerator": GPU},
        "spec.accelerator.resource is immutable: make another RolloutReplica",
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
        "spec.parallelism is immutable: make another RolloutReplica with the new shape",
    ),
    "parallelism removed is its default": ({}, {"parallelism": None}, None),
    "image and resources": (
        {},
        {"engine": {"image": "x:2"}, "resources": {"requests": {"cpu": "2"}}},
        None,
    ),
    "state and suspend": ({}, {"state": "Asleep", "suspend": True}, None),
}


@pytest.mark.parametrize(("given", "patch", "message"), TRANSITIONS.values(), ids=TRANSITIONS)
def test_transitions(
    cluster: Cluster,
    request: pytest.FixtureRequest,
    given: dict[str, Any],
    patch: dict[str, Any],
    message: str | None,
) -> None:
    name = "t-" + request.node.callspec.id.replace(" ", "-").lower()
    start = pool(name, {**target(2, 5, "a"), **given})
    kubectl(cluster, "create", "-f", "-", manifest=start)
    command = ("patch", "rr", name, "--type=merge", "-p", json.dumps({"spec": patch}))
    if message is None:
        kubectl(cluster, *command)
    else:
        assert message in refusal(cluster, *command)


def test_scale_changes_replicas_and_shows_the_selector(cluster: Cluster) -> None:
    kubectl(cluster, "create", "-f", "-", manifest=pool("scaled"))
    kubectl(cluster, "scale", "rr", "scaled", "--replicas=3")
    selector = "rollout.dev/pool=scaled,rollout.dev/role=head"
    status = {"status": {"replicas": 3, "selector": selector}}
    kubectl(
        cluster,
        "patch",
        "rr",
        "scaled",
        "--subresource=status",
        "--type=merge",
        "-p",
        json.dumps(status),
    )
    scale = json.loads(kubectl(cluster, "get", "rr", "scaled", "--subresource=scale", "-o", "json"))
    assert scale["spec"]["replicas"] == 3
    assert scale["status"] == {"replicas": 3, "selector": selector}
    assert "less than or equal to 9999" in refusal(
        cluster, "scale", "rr", "scaled", "--replicas=10000"
    )


STATUS: dict[str, Any] = {
    "observedGeneration": 1,
    "phase": "Updating",
    "message": "waiting for 1 of 2 replicas to load weights (1, 7)",
    "replicas": 2,
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


def test_columns_show_the_committed_version(cluster: Cluster) -> None:
    kubectl(cluster, "create", "-f", "-", manifest=pool("columns", {"replicas": 2}))
    kubectl(
        cluster,
        *("patch", "rr", "columns", "--subresource=status", "--type=merge"),
        *("-p", json.dumps({"status": STATUS})),
    )
    head, row = kubectl(cluster, "get", "rr", "columns").splitlines()
    assert head.split() == ["NAME", "MODE", "ENGINE", "DESIRED", "READY", "WEIGHTS", "PHASE", "AGE"]
    assert row.split()[:-1] == ["columns", "Standalone", "hf", "2", "1", "7", "Updating"]
    head, row = kubectl(cluster, "get", "rr", "columns", "-o", "wide").splitlines()
    assert head.split()[8:] == ["UPDATED", "ASLEEP", "RESTARTS", "MESSAGE"]
    assert row.split()[8:11] == ["2", "0", "4"]
    assert row.endswith("waiting for 1 of 2 replicas to load weights (1, 7)")


def test_foreign_conditions_survive_an_apply_of_ours(cluster: Cluster) -> None:
    kubectl(cluster, "create", "-f", "-", manifest=pool("conditions"))
    foreign = STATUS["conditions"][0] | {"type": "example.com/Approved", "status": "True"}
    for manager, condition in (
        ("stranger", foreign),
        ("rollout-operator", STATUS["conditions"][0]),
    ):
        body = pool("conditions") | {"status": {"conditions": [condition]}}
        del body["spec"]
        kubectl(
            cluster,
            *("apply", "--server-side", "--subresource=status", "--force-conflicts"),
            *(f"--field-manager={manager}", "-f", "-"),
            manifest=body,
        )
    stored = json.loads(kubectl(cluster, "get", "rr", "conditions", "-o", "json"))
    assert {c["type"] for c in stored["status"]["conditions"]} == {"Ready", "example.com/Approved"}


def test_status_and_spec_do_not_touch_each_other(cluster: Cluster) -> None:
    kubectl(cluster, "create", "-f", "-", manifest=pool("apart") | {"status": STATUS})
    stored = json.loads(kubectl(cluster, "get", "rr", "apart", "-o", "json"))
    assert "status" not in stored
    kubectl(
        cluster,
        *("patch", "rr", "apart", "--subresource=status", "--type=merge"),
        *("-p", json.dumps({"spec": {"replicas": 5}, "status": {"restarts": 1}})),
    )
    stored = json.loads(kubectl(cluster, "get", "rr", "apart", "-o", "json"))
    assert stored["spec"]["replicas"] == 1
    assert stored["metadata"]["generation"] == 1


def test_selects_by_fields(cluster: Cluster) -> None:
    kubectl(cluster, "create", "-f", "-", manifest=pool("asleep", {"state": "Asleep"}))
    kubectl(cluster, "create", "-f", "-", manifest=pool("awake"))
    names = kubectl(cluster, "get", "rr", "-o", "name", "--field-selector", "spec.state=Asleep")
    assert "rolloutreplica.rollout.dev/asleep" in names.split()
    assert "rolloutreplica.rollout.dev/awake" not in names.split()
    kubectl(cluster, "get", "rr", "--field-selector", "spec.engine.type=hf,status.phase=Ready")


def test_explain_documents_every_field(cluster: Cluster) -> None:
    for field in RolloutReplicaSpec.model_fields.values():
        path = f"rr.spec.{field.alias}"
        text_ = kubectl(cluster, "explain", path)
        description = " ".join(text_.partition("DESCRIPTION:")[2].split())
        assert field.description
        assert field.description.rstrip(".") in description, path
    assert "weights" in kubectl(cluster, "explain", "rr.spec", "--recursive")


def test_is_listed_among_all(cluster: Cluster) -> None:
    kubectl(cluster, "create", "-f", "-", manifest=pool("among-all"))
    assert "rolloutreplica.rollout.dev/among-all" in kubectl(cluster, "get", "all")
