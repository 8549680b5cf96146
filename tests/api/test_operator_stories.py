"""Stories of the night, on a real API server: what is said of each, and what `rollout why` makes of it.

The lab's kubelet lets pods run; where a story is about a pod, the test reports what a kubelet or a
scheduler would have. Each asserts phase, condition, reason, event and message.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import pytest_asyncio

from localkube import Cluster
from rollout_client.cluster_client import ClusterClient, load_access
from rollout_client.commands.cause_finding import find_causes
from rollout_client.commands.pool_access import PoolAccess
from rollout_client.commands.pool_facts import FactReader
from rollout_operator.core.replicas import replica_troubles
from rollout_operator.workers import head_poller
from tests.support.api.apiclient import Obj
from tests.support.api.poollab import STRATEGIC, PoolLab, pool_lab
from tests.support.manifests import target

pytestmark = pytest.mark.asyncio(loop_scope="module")

SILENT_SECONDS = 2.0
"""Instead of a minute: what is told does not depend on it."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(crd: Cluster) -> AsyncIterator[PoolLab]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica_troubles, "UNREACHABLE_AFTER_SECONDS", SILENT_SECONDS)
        for interval in ("SLOW_POLL_SECONDS", "MAX_POLL_BACKOFF_SECONDS"):
            patch.setattr(head_poller, interval, 0.5)
        async with pool_lab(crd, "stories") as made:
            yield made


async def told(lab: PoolLab, name: str, reason: str, words: tuple[str, ...], cause: str) -> None:
    """Wait until the pool is Degraded for this reason with these words, in status and in a Warning event; `why` has the cause."""

    def is_told() -> bool:
        status, found, message = lab.condition(name, "Degraded")
        return (status, found) == ("True", reason) and all(word in message for word in words)

    await lab.until(f"{name} tells {reason} with {words}", is_told)
    status = lab.get(name)["status"]
    assert (status["phase"], status["message"]) == ("Degraded", lab.condition(name, "Degraded")[2])
    await lab.until("an event tells, too", lambda: reason in lab.events(name))
    severity, note = lab.events(name)[reason]
    assert severity == "Warning"
    assert words[0] in note
    # The cluster's scheduler has no node, and may have said so of a pod that the lab lets run.
    assert [each for each in await causes_of(lab, name) if each != "no-node"] == [cause]


async def causes_of(lab: PoolLab, name: str, later: float = 0.0) -> list[str]:
    """What `rollout why` names, so many seconds later if nothing changes."""
    async with ClusterClient(load_access(lab.cluster.kubeconfig)) as kube:
        pool = PoolAccess(kube, lab.namespace, name)
        facts = await FactReader(pool, lab.namespace, 20).read_facts()
    return [
        each.cause for each in find_causes(replace(facts, now=facts.now + timedelta(seconds=later)))
    ]


def report(lab: PoolLab, pod: str, **status: Any) -> None:
    """What the kubelet or the scheduler says of a pod."""
    lab.api.patch(lab.path("pods", pod) + "/status", {"status": status}, kind=STRATEGIC)


def container(**state: Any) -> Obj:
    return {
        "containerStatuses": [
            {
                "name": "worker", "image": "none", "imageID": "", "ready": False,
                "restartCount": 0, "state": state,
            }
        ]
    }  # fmt: skip


async def served(lab: PoolLab, name: str, **spec: Any) -> None:
    lab.create(name, replicas=1, **spec)
    await lab.reaches(name)


async def test_the_image_cannot_be_pulled(lab: PoolLab) -> None:
    await served(lab, "image")
    waiting = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "no/such:1"'}
    report(lab, "image-0-0", **container(waiting=waiting))
    words = (
        "image-0-0: container 'worker' can't get its image: ImagePullBackOff",
        'pulling image "no/such:1"',
        "check spec.engine.image and spec.podTemplate.imagePullSecrets",
    )
    await told(lab, "image", "PodTrouble", words, "image-pull")


async def test_the_model_path_is_wrong(lab: PoolLab) -> None:
    await served(lab, "path")
    why = "'/rollout/model' holds no config.json: point to a model folder"
    lab.worker_of("path-0-0").failed = why
    words = (f"path-0-0: {why}",)
    await told(lab, "path", "EngineFailed", words, "model-path")


async def test_a_model_that_needs_more_memory_than_its_limit(lab: PoolLab) -> None:
    await served(lab, "oom", resources={"limits": {"memory": "8Gi"}})
    log = "".join(f"loading shard {i}\n" for i in range(100))
    for _ in range(2):
        await lab.until("the pod is there", lambda: _runs(lab, "oom-0-0"))
        ended = {
            "exitCode": 137, "reason": "OOMKilled", "message": log,
            "finishedAt": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }  # fmt: skip
        before = lab.pods("oom")["oom-0-0"]["metadata"]["uid"]
        report(lab, "oom-0-0", phase="Failed", **container(terminated=ended))
        await lab.until("the failure is seen", partial(_is_seen, lab, before))
    words = (
        "replica 0 failed 2 times in a row",
        "container 'worker' ended: OOMKilled, exit code 137",
        "its limit of 8Gi: raise spec.resources.limits.memory",
    )
    await told(lab, "oom", "CrashLooping", words, "out-of-memory")
    first = lab.get("oom")["status"]["lastErrors"][-1]
    assert first["log"] == log
    severity, note = lab.events("oom")["ReplicaFailed"]
    assert (severity, "raise spec.resources.limits.memory" in note) == ("Warning", True)
    assert "Recovered" not in lab.events("oom")


def _is_seen(lab: PoolLab, uid: str) -> bool:
    """The pod is replaced, or waits for that."""
    pod = lab.pods("oom").get("oom-0-0", {})
    replaced = pod.get("metadata", {}).get("uid") != uid
    return replaced or lab.condition("oom", "Degraded")[1] == "CrashLooping"


def _runs(lab: PoolLab, pod: str) -> bool:
    found = lab.pods(pod.rsplit("-", 2)[0]).get(pod, {})
    return bool(found.get("status", {}).get("phase") == "Running")


async def test_the_published_version_is_missing(lab: PoolLab) -> None:
    await served(lab, "version")
    lab.worker_of("version-0-0").missing = True
    lab.patch("version", **target(1, 7, "step-7"))
    words = ("version-0-0: ", "step-7", "does not exist: check path and mounts")
    await told(lab, "version", "WeightsFailed", words, "weights-missing")
    assert lab.condition("version", "WeightsSynced")[0] == "False"
    assert lab.get("version")["status"]["weights"]["committed"]["version"] == 0


async def test_a_node_is_lost(lab: PoolLab) -> None:
    await served(lab, "lost")
    lab.worker_of("lost-0-0").refuses = True
    node = {"target": {"apiVersion": "v1", "kind": "Node", "name": "gpu-3"}}
    lab.api.create(
        lab.path("pods", "lost-0-0") + "/binding", {"metadata": {"name": "lost-0-0"}, **node}
    )
    words = ("the control port of lost-0-0 on node 'gpu-3' has not answered",)
    await told(lab, "lost", "Unreachable", words, "Degraded=True/Unreachable")
    assert lab.get("lost")["status"]["members"][0]["node"] == "gpu-3"
    silent = {
        "type": "Ready",
        "status": "Unknown",
        "message": "Kubelet stopped posting node status.",
    }
    lab.api.create("/api/v1/nodes", {"metadata": {"name": "gpu-3"}})
    try:
        lab.api.patch("/api/v1/nodes/gpu-3/status", {"status": {"conditions": [silent]}})
        assert (await causes_of(lab, "lost"))[0] == "node-lost"
    finally:
        lab.api.delete("/api/v1/nodes/gpu-3")


async def test_the_quota_is_used_up(lab: PoolLab) -> None:
    quota = {"metadata": {"name": "q"}, "spec": {"hard": {"limits.cpu": "0"}}}
    lab.api.create(lab.path("resourcequotas"), quota)
    try:
        await lab.until(
            "the quota counts",
            lambda: lab.api.get(lab.path("resourcequotas", "q")).get("status", {}).get("hard"),
        )
        lab.create("quota", replicas=1, resources={"limits": {"cpu": "1"}})
        words = ("the API server rejected pod 'quota-0-0'", "exceeded quota: q", "limits.cpu")
        await told(lab, "quota", "Rejected", words, "quota")
    finally:
        lab.api.delete(lab.path("resourcequotas", "q"))


POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolic"


async def test_an_admission_policy_denies(lab: PoolLab) -> None:
    rule = {
        "apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"],
    }  # fmt: skip
    policy = {
        "metadata": {"name": "deny.example.com"},
        "spec": {
            "matchConstraints": {
                "resourceRules": [rule],
                "objectSelector": {"matchLabels": {"rollout.dev/pool": "denied"}},
            },
            "validations": [{"expression": "false", "message": "label team is missing"}],
        },
    }
    binding = {
        "metadata": {"name": "deny.example.com"},
        "spec": {"policyName": "deny.example.com", "validationActions": ["Deny"]},
    }
    lab.api.create(POLICIES + "ies", policy)
    lab.api.create(POLICIES + "ybindings", binding)
    try:
        await lab.until_refused("denied", "the policy holds")
        lab.create("denied", replicas=1)
        words = ("the API server rejected pod 'denied-0-0'", "label team is missing")
        await told(lab, "denied", "Rejected", words, "webhook")
    finally:
        lab.api.delete(POLICIES + "ybindings/deny.example.com")
        lab.api.delete(POLICIES + "ies/deny.example.com")


async def test_the_operator_is_down(lab: PoolLab) -> None:
    """The last story: its last words stay, and say of which generation they are."""
    await served(lab, "nobody")
    before = lab.get("nobody")
    lab.operator.stop()
    await asyncio.wait({lab.running}, timeout=30)
    assert lab.running.done()
    lab.patch("nobody", replicas=2)
    pool = lab.get("nobody")
    assert pool["status"] == before["status"]
    assert pool["status"]["observedGeneration"] < pool["metadata"]["generation"]
    assert "operator-down" not in await causes_of(lab, "nobody")
    assert (await causes_of(lab, "nobody", later=120))[0] == "operator-down"
