"""What the API server itself refuses, each with words that say what to change."""

from __future__ import annotations

from typing import Any

import pytest

from localkube import Cluster
from tests.support.api.people import Namespace
from tests.support.manifests import COLOCATED, GPU, HYBRID, merged, pool, source, target


@pytest.fixture(scope="module")
def space(crd: Cluster) -> Namespace:
    """Nothing is stored here: all runs are dry."""
    return Namespace(crd, "default")


def env(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"engine": {"env": list(entries)}}


def template(**fields: Any) -> dict[str, Any]:
    return {"podTemplate": fields}


def mount(path: str, name: str = "data") -> dict[str, Any]:
    return template(
        volumes=[{"name": "data", "emptyDir": {}}], volumeMounts=[{"name": name, "mountPath": path}]
    )


NOT_INSIDE: dict[str, Any] = {
    "engine.image": "x",
    "engine.imagePullPolicy": "Always",
    "engine.args": ["--a"],
    "engine.env": [{"name": "A", "value": "1"}],
    "engine.logprobs": "Raw",
    "engine.cache": {"claim": {"name": "c"}},
    "model": {"source": {"path": "/m"}},
    "accelerator": GPU,
    "resources": {"limits": {"cpu": "1"}},
    "sleep.spill": {"medium": "Disk"},
    "weights.volume": {"claim": {"name": "w"}},
    "weights.stagingMemory": "1Gi",
    "weights.transport": {"port": 8010},
    "updateStrategy": {"maxUnavailable": 2},
    "disruption": {"maxUnavailable": 2},
    "scheduling": {"gang": "PodGroup"},
    "restartPolicy": {"maxRestarts": 2},
    "worker": {"maxQueue": 2},
    "podTemplate": {"labels": {"a": "b"}},
    "colocation.request": "gpus",
}
"""What is said to pods, or to an engine that the operator starts."""


def target_from(epoch: int = 1, version: int = 1, **source: Any) -> dict[str, Any]:
    """A target whose weights come from there."""
    return {"weights": {"target": {"epoch": epoch, "version": version, "source": source}}}


def nested(field: str, value: Any) -> dict[str, Any]:
    """Return a change of one field, named by its path."""
    for part in reversed(field.split(".")):
        value = {part: value}
    change: dict[str, Any] = value
    return change


def colocated(**fields: Any) -> dict[str, Any]:
    """A pool beside a trainer, with these fields of its colocation."""
    return {"mode": "Colocated", "colocation": {**COLOCATED["colocation"], **fields}}


# Of bounds, enumerations, patterns and the like there is one case each: which fields have them is in crd.yaml.
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "negative replicas": ({"replicas": -1}, "spec.replicas in body should be greater than or"),
    "too many replicas": ({"replicas": 10000}, "spec.replicas in body should be less than or"),
    "replicas null type": ({"replicas": "two"}, "spec.replicas"),
    "unknown mode": ({"mode": "Inside"}, 'spec.mode: Unsupported value: "Inside"'),
    "a queue without a gang": (
        {"scheduling": {"queue": "team"}},
        "spec.scheduling.queue needs spec.scheduling.gang: set gang to PodGroup, or remove queue",
    ),
    "a queue that is too long for a label": (
        {"scheduling": {"gang": "PodGroup", "queue": "q" * 64}},
        "spec.scheduling.queue: Too long: may not be more than 63 bytes",
    ),
    "a gang beside a trainer": (
        {**COLOCATED, "scheduling": {"gang": "PodGroup"}},
        "spec.scheduling.gang must not be set in mode Colocated",
    ),
    "no model": (
        {"model": None},
        "spec.model is required: name the checkpoint in spec.model.source",
    ),
    "hybrid without a trainer": (
        {**HYBRID, "colocation": None},
        "spec.colocation belongs to the modes Colocated and Hybrid: set it there, and only there",
    ),
    "hybrid replicas": (
        {**HYBRID, "replicas": 2},
        "spec.replicas: a Hybrid pool has one replica in each pod of its trainer, not 2: leave it "
        "out, and scale the trainer",
    ),
    "colocated surge": (
        {**colocated(), "updateStrategy": {"maxSurge": 1}},
        "spec.updateStrategy.maxSurge must not be set in mode Colocated",
    ),
    "hybrid suspension": (
        {**HYBRID, "suspend": True},
        "spec.suspend must be false in mode Hybrid: the pods are the trainer's; set spec.state to "
        "Asleep to get their memory back",
    ),
    "hybrid parallelism": (
        {**HYBRID, "engine": {"type": "vllm"}, "parallelism": {"tensor": 2}},
        "spec.parallelism must not be set in mode Hybrid: the trainer starts the engine with",
    ),
    "hybrid gangs": (
        {**HYBRID, "engine": {"type": "vllm"}, "parallelism": {"tensor": 2, "nodes": 2}},
        "spec.parallelism must not be set in mode Hybrid",
    ),
    "hybrid slots": (
        merged(HYBRID, {"colocation": {"slots": 2}}),
        "spec.colocation.slots must be 1 in mode Hybrid: each of the trainer's pods is one replica",
    ),
    **{
        f"hybrid {field}": (
            merged(HYBRID, nested(field, value)),
            f"spec.{field} must not be set in mode Hybrid: ",
        )
        for field, value in NOT_INSIDE.items()
    },
    "spill in a folder and a volume": (
        {"sleep": {"spill": {"path": "/scratch", "sizeLimit": "1Gi"}}},
        "spec.sleep.spill.path names a folder of your own: remove medium and sizeLimit, or path",
    ),
    "relative spill": (
        {"sleep": {"spill": {"path": "scratch"}}},
        "spec.sleep.spill.path must be an absolute path without '..'",
    ),
    **{
        f"staging memory of {size}": (
            {"weights": {"stagingMemory": size}},
            "spec.weights.stagingMemory must be more than 0: give it room for a version",
        )
        for size in (0, "0Gi", "0.0")
    },
    **{
        f"egress of {rate}": (
            {"weights": {"transport": {"egress": rate}}},
            "spec.weights.transport.egress must be more than 0: give bytes a second",
        )
        for rate in (0, "0M")
    },
    "egress beyond measure": (
        {"weights": {"transport": {"egress": "1E"}}},
        "spec.weights.transport.egress must be less than 1E (10^18 bytes a second)",
    ),
    "staging memory beyond measure": (
        {"weights": {"stagingMemory": "1e100"}},
        "spec.weights.stagingMemory must be less than 1E (10^18 bytes)",
    ),
    "container of the worker's name": (
        template(sidecars=[{"name": "worker", "image": "x"}]),
        "the container name worker is the worker's own: rename this container",
    ),
    "two containers of a name": (
        template(
            initContainers=[{"name": "a", "image": "x"}], sidecars=[{"name": "a", "image": "y"}]
        ),
        "spec.podTemplate.sidecars and initContainers share their names: rename one container",
    ),
    "two init containers of a name": (
        template(initContainers=[{"name": "a", "image": "x"}, {"name": "a", "image": "y"}]),
        "spec.podTemplate.initContainers: two entries have the same name: rename one",
    ),
    "two sidecars of a name": (
        template(sidecars=[{"name": "a", "image": "x"}, {"name": "a", "image": "y"}]),
        "spec.podTemplate.sidecars: two entries have the same name: rename one",
    ),
    "two claims of a name": (
        template(resourceClaims=[{"name": "a", "resourceClaimName": "b"}] * 2),
        "spec.podTemplate.resourceClaims: two entries have the same name: rename one",
    ),
    "a claim used twice": (
        {"resources": {"claims": [{"name": "a"}, {"name": "a"}]}},
        "spec.resources.claims: two entries have the same name: rename one",
    ),
    "claim of both kinds": (
        template(
            resourceClaims=[
                {"name": "a", "resourceClaimName": "b", "resourceClaimTemplateName": "c"}
            ]
        ),
        "needs exactly one of resourceClaimName and resourceClaimTemplateName: keep one",
    ),
    "use of no claim": (
        {"resources": {"claims": [{"name": "nics"}]}},
        "every entry of spec.resources.claims needs a claim of the same name: add it to "
        "spec.podTemplate.resourceClaims",
    ),
    "no engine": ({"engine": None}, "spec.engine: Required value"),
    "image with a space": ({"engine": {"image": "a b"}}, "spec.engine.image"),
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
    "no source": (source(), "spec.model.source needs exactly one of path, claim and hub: keep one"),
    "two sources": (
        source(path="/m", claim={"name": "c"}),
        "spec.model.source needs exactly one of path, claim and hub: keep one",
    ),
    "relative model path": (
        source(path="models/x"),
        "spec.model.source.path must be an absolute path without '..'",
    ),
    "model path upwards": (source(path="/m/../x"), "must be an absolute path without '..'"),
    "claim subPath absolute": (
        source(claim={"name": "c", "subPath": "/x"}),
        "subPath must be a relative path without '..'",
    ),
    "claim subPath upwards": (
        source(claim={"name": "c", "subPath": "../x"}),
        "subPath must be a relative path without '..': name a folder inside the volume",
    ),
    "hf with a world": (
        {"parallelism": {"data": 2}, "accelerator": GPU},
        "engine hf runs on one device, not 2: set tensor, pipeline and data to 1 or choose "
        "another engine",
    ),
    "sglang with a pipeline": (
        {"engine": {"type": "sglang"}, "accelerator": GPU, "parallelism": {"pipeline": 2}},
        "engine sglang cannot pause a pipeline for an update: set it to 1 and raise tensor",
    ),
    "sglang with data-parallel ranks": (
        {"engine": {"type": "sglang"}, "accelerator": GPU, "parallelism": {"data": 2}},
        "engine sglang updates no weights of data-parallel ranks: set it to 1 and raise replicas",
    ),
    "vllm with data-parallel ranks over pods": (
        {
            "engine": {"type": "vllm"},
            "accelerator": GPU,
            "parallelism": {"tensor": 4, "data": 2, "nodes": 4},
        },
        "engine vllm spreads data-parallel ranks within one pod, not 2 over 4 pods: set data or "
        "nodes to 1 and raise replicas",
    ),
    "CPU with a world": (
        {"engine": {"type": "vllm"}, "parallelism": {"tensor": 4}},
        "without spec.accelerator a pool runs on CPU with one rank, not 4: set spec.accelerator",
    ),
    "world over nodes": (
        {"engine": {"type": "vllm"}, "accelerator": GPU, "parallelism": {"tensor": 8, "nodes": 3}},
        "tensor*pipeline*data = 8 is not divisible by nodes = 3: set nodes to a divisor of it",
    ),
    "more nodes than ranks": (
        {"parallelism": {"nodes": 2}},
        "tensor*pipeline*data = 1 is not divisible by nodes = 2",
    ),
    "accelerator in limits": (
        {"accelerator": GPU, "resources": {"limits": {"nvidia.com/gpu": 1}}},
        "spec.resources must not name the accelerator: the operator adds it",
    ),
    "accelerator in requests": (
        {"accelerator": GPU, "resources": {"requests": {"nvidia.com/gpu": "1"}}},
        "spec.resources must not name the accelerator",
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
    "two weights sources": (
        target_from(path="a", checkpoint={}),
        "spec.weights.target.source needs exactly one of path, checkpoint and pushed: keep one",
    ),
    "no weights source": (
        target_from(),
        "spec.weights.target.source needs exactly one of path, checkpoint and pushed: keep one",
    ),
    "a path of pushed weights": (
        target_from(path="a", pushed={}),
        "spec.weights.target.source needs exactly one of path, checkpoint and pushed: keep one",
    ),
    "unknown field of pushed": (
        target_from(pushed={"layoutId": "a"}),
        'unknown field "spec.weights.target.source.pushed.layoutId"',
    ),
    "(0, 0) pushed": (
        target_from(0, 0, pushed={}),
        "(0, 0) is the model's own checkpoint: set source to {checkpoint: {}}, or raise version",
    ),
    "weights port of another": (
        {"weights": {"transport": {"port": 8001}}},
        "spec.weights.transport.port must not be 8000, 8001 or 8003, the worker's other ports",
    ),
    "weights path upwards": (
        target(1, 1, "../secrets"),
        "spec.weights.target.source.path must not contain '..'",
    ),
    "(0, 0) elsewhere": (
        target(0, 0, "a"),
        "(0, 0) is the model's own checkpoint: set source to {checkpoint: {}}, or raise version",
    ),
    "pin with one set of weights": (
        {"engine": {"type": "vllm"}, "weights": {"inFlight": {"policy": "Pin"}}},
        "spec.weights.inFlight.policy: engine vllm cannot run two versions at once (Pin): use "
        "Drain, Abort, Keep or Recompute, or engine hf",
    ),
    "update maxUnavailable": (
        {"updateStrategy": {"maxUnavailable": 0}},
        "spec.updateStrategy.maxUnavailable and maxSurge must not both be 0",
    ),
    "restart delays": (
        {"restartPolicy": {"baseDelaySeconds": 60, "maxDelaySeconds": 5}},
        "baseDelaySeconds (default 10) must not exceed maxDelaySeconds",
    ),
    "restart delay below the default": (
        {"restartPolicy": {"maxDelaySeconds": 5}},
        "lower one or raise the other",
    ),
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
        "mountPath must not be /rollout or below it: the operator mounts the model",
    ),
    "mount with dots": (mount("/data/../rollout/weights"), "mountPath must be an absolute path"),
    "mount of the root": (mount("/"), "mountPath must be an absolute path"),
    "mount without a volume": (
        mount("/data", name="other"),
        "every entry of volumeMounts needs a volume of the same name: add it to "
        "spec.podTemplate.volumes",
    ),
    "volume of the operator": (
        template(volumes=[{"name": "rollout-model", "emptyDir": {}}]),
        "volume names starting with rollout- are reserved for the operator: rename it",
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
    "colocated without a trainer": (
        {"mode": "Colocated"},
        "spec.colocation belongs to the modes Colocated and Hybrid: set it there, and only there",
    ),
    "a trainer beside a pool of its own devices": (
        {"mode": "Standalone", "colocation": COLOCATED["colocation"]},
        "spec.colocation belongs to the modes Colocated and Hybrid: set it there, and only there",
    ),
    "colocated with an accelerator": (
        {**COLOCATED, "engine": {"type": "vllm"}, "accelerator": GPU},
        "spec.accelerator must not be set in mode Colocated: the devices are those of the trainer's "
        "ResourceClaim; remove it",
    ),
    "every pod a trainer": (
        colocated(trainerSelector={}),
        "spec.colocation.trainerSelector is empty and would select every pod: add matchLabels or",
    ),
    "trainer label": (
        colocated(trainerSelector={"matchLabels": {"-job": "a"}}),
        "spec.colocation.trainerSelector.matchLabels: a key is a name of at most 63 letters",
    ),
    **{
        f"{operator} with {len(values)} values": (
            colocated(
                trainerSelector={
                    "matchExpressions": [{"key": "job", "operator": operator, "values": values}]
                }
            ),
            "In and NotIn need values, Exists and DoesNotExist must have none: correct values",
        )
        for operator, values in (("In", []), ("Exists", ["a"]))
    },
    "a claim of the trainer's name": (
        colocated()
        | template(resourceClaims=[{"name": "rollout-devices", "resourceClaimName": "b"}]),
        "the name rollout-devices is that of the trainer's claim in mode Colocated: rename this claim",
    ),
    "devices of its own choice": (
        colocated(slots=2) | env({"name": "CUDA_VISIBLE_DEVICES", "value": "0"}),
        "spec.engine.env: the operator sets CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER where "
        "colocation.slots is more than 1: remove them",
    ),
    "unknown field": ({"replicaz": 1}, 'unknown field "spec.replicaz"'),
}


@pytest.mark.parametrize(("patch", "message"), BAD.values(), ids=BAD)
def test_refuses_and_says_what_to_change(
    space: Namespace, patch: dict[str, Any], message: str
) -> None:
    said = space.refused(pool("bad", patch))
    assert message in said


@pytest.mark.parametrize(
    "name", ["a" * 51, "9lives", "with.dot", "pool-heads"], ids=["long", "digit", "dot", "heads"]
)
def test_refuses_names_out_of_bounds(space: Namespace, name: str) -> None:
    said = space.refused(pool(name))
    assert "metadata.name must be a DNS-1035 label" in said
    assert "at most 50 characters that does not end in -heads: choose another name" in said
