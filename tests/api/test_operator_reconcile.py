"""The real passes against a real API server: a pool's life, strangers, and the order of writes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from localkube import Cluster
from rollout_operator.core.services import pool_services
from tests.support.api.apiclient import Obj
from tests.support.api.poollab import GATE, PoolLab, pool_lab
from tests.support.cluster.scalelab import Call
from tests.support.doc_manifests import manifests_of
from tests.support.manifests import target

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(crd: Cluster) -> AsyncIterator[PoolLab]:
    async with pool_lab(crd, "passes") as made:
        yield made


def gate(pod: Obj) -> tuple[str, str]:
    found = [c for c in pod["status"].get("conditions", ()) if c["type"] == GATE]
    return (found[0]["status"], found[0]["message"]) if found else ("", "")


def stranger(name: str) -> Obj:
    container = {"name": "c", "image": "localhost/none"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"containers": [container]},
    }


async def test_a_pool_lives_through_updates_scaling_rolling_and_sleep(lab: PoolLab) -> None:
    lab.writes()
    lab.create("life", replicas=2)
    await lab.reaches("life")
    pods = lab.pods("life")
    assert sorted(pods) == ["life-0-0", "life-1-0"]
    for pod in pods.values():
        status, message = gate(pod)
        assert status == "True"
        assert message.startswith("boot ")
        assert message.endswith(": Serving")
    made = [w.name for w in lab.writes() if w.verb == "create" and w.code == 201]
    assert sorted(made) == ["life", "life", "life-0-0", "life-1-0", "life-heads"]

    await _update(lab, "life", 1, 1)
    await _guards_against_evictions(lab, "life")
    await _scale(lab, "life", 3)
    await _roll(lab, "life")
    await _sleep_and_wake(lab, "life")


async def _guards_against_evictions(lab: PoolLab, name: str) -> None:
    """One of two pods may go; the commit just now let none go; what somebody changes comes back."""
    path = f"/apis/policy/v1/namespaces/{lab.namespace}/poddisruptionbudgets/{name}"
    await lab.until(  # the status that says so is written before it
        "the budget lets one go", lambda: lab.api.get(path)["spec"]["minAvailable"] == 1
    )
    assert lab.api.get(path)["metadata"]["generation"] == 3
    lab.api.patch(path, {"spec": {"minAvailable": None, "maxUnavailable": "100%"}})
    await lab.until(
        "the budget is as it was",
        lambda: (
            lab.api.get(path)["spec"]
            == {
                "minAvailable": 1,
                "selector": {"matchLabels": {"rollout.dev/pool": name}},
                "unhealthyPodEvictionPolicy": "AlwaysAllow",
            }
        ),
    )


async def _update(lab: PoolLab, name: str, epoch: int, version: int) -> None:
    lab.asked.clear()
    lab.patch(name, **target(epoch, version))
    committed = await lab.committed(name, epoch, version)
    commits = [a for a in lab.asked if a.verb == "commit"]
    assert {a.ip for a in commits} == {a.ip for a in lab.asked if a.verb == "stage"}
    assert len(commits) == 2
    for commit in commits:
        # The decision stood in the API server before the first worker was told.
        assert (commit.update["phase"], commit.update["version"]) == ("Committing", version)
        assert commit.body["root_hash"] == committed["rootHash"]
    flips = [w for w in lab.writes() if w.resource == "pods/status"]
    assert not flips, "a successful update flips no gate"


async def _scale(lab: PoolLab, name: str, replicas: int) -> None:
    lab.asked.clear()
    known = lab.get(name)["status"]["weights"]["committed"]
    lab.patch(name, replicas=replicas)
    await lab.reaches(name)
    stages = [a.body for a in lab.asked if a.verb == "stage"]
    assert [(s["version"], s["root_hash"]) for s in stages] == [
        (known["version"], known["rootHash"])
    ], "the one that joins, and no other, loads the very bytes that are served"


async def _roll(lab: PoolLab, name: str) -> None:
    before = {p["metadata"]["uid"] for p in lab.pods(name).values()}
    lab.writes()
    lab.patch(name, podTemplate={"labels": {"team": "a"}})
    least = 3

    def rolled() -> bool:
        nonlocal least
        pods = lab.pods(name).values()
        serving = sum(gate(p)[0] == "True" for p in pods)
        least = min(least, serving)
        return serving == 3 and not before & {p["metadata"]["uid"] for p in pods}

    await lab.until("all pods are new", rolled)
    assert least == 2, "maxUnavailable is 1"
    writes = [w for w in lab.writes() if w.resource in ("pods", "pods/status")]
    for index, write in enumerate(writes):
        if write.verb == "delete":
            assert write.code == 200
            earlier = [w for w in writes[:index] if w.name == write.name]
            assert earlier[-1:] == [Call("patch", "pods/status", write.name, 200)], (
                f"{write.name} was deleted before it left the Service"
            )
    assert sum(w.verb == "delete" for w in writes) == 3


async def _sleep_and_wake(lab: PoolLab, name: str) -> None:
    lab.asked.clear()
    lab.patch(name, state="Asleep")
    await lab.reaches(name, "Asleep")
    generation = lab.get(name)["metadata"]["generation"]
    assert {gate(p)[0] for p in lab.pods(name).values()} == {"False"}
    assert [(a.verb, a.body["generation"]) for a in lab.asked] == [("sleep", generation)] * 3
    lab.patch(name, state="Active")
    await lab.reaches(name)
    assert {gate(p)[0] for p in lab.pods(name).values()} == {"True"}
    assert {a.verb for a in lab.asked} == {"sleep", "wake"}


async def test_a_strangers_pod_is_told_and_left_alone(lab: PoolLab) -> None:
    theirs = lab.api.create(lab.path("pods"), stranger("mine-0-0"))
    lab.writes()
    lab.create("mine", replicas=1)
    await lab.until("the conflict is told", lambda: "NameConflict" in str(lab.get("mine")))
    status, reason, message = lab.condition("mine", "Degraded")
    assert (status, reason) == ("True", "NameConflict")
    assert message.startswith("pod/mine-0-0 exists but is not ours")
    found = lab.api.get(lab.path("pods", "mine-0-0"))
    assert found["metadata"]["uid"] == theirs["metadata"]["uid"]
    tried = [w for w in lab.writes() if w.name == "mine-0-0"]
    assert {(w.verb, w.code) for w in tried} == {("create", 409)}
    lab.api.delete(lab.path("pods", "mine-0-0"), gracePeriodSeconds=0)
    lab.annotate("mine", "rollout.dev/retry", "now")  # it would look again within 10 s
    await lab.reaches("mine")
    assert lab.condition("mine", "Degraded")[0] == "False"


async def test_a_pool_of_another_class_is_left_alone(lab: PoolLab) -> None:
    lab.create("theirs", operatorClass="blue")
    lab.create("beside")
    await lab.reaches("beside")
    assert "status" not in lab.get("theirs")
    assert lab.pods("theirs") == {}


async def test_a_refused_pod_is_told_with_what_to_do(lab: PoolLab) -> None:
    lab.create("refused", replicas=1, serviceAccountName="nobody")
    await lab.until("the refusal is told", lambda: "Rejected" in str(lab.get("refused")))
    status, reason, message = lab.condition("refused", "Degraded")
    assert (status, reason) == ("True", "Rejected")
    assert 'serviceaccount "nobody" not found' in message
    assert "set spec.serviceAccountName" in message
    lab.patch("refused", serviceAccountName=None)
    await lab.reaches("refused")


async def test_a_pod_that_lost_a_label_gets_it_back(lab: PoolLab) -> None:
    lab.create("lost", replicas=1)
    await lab.reaches("lost")
    path = lab.path("pods", "lost-0-0")
    before = lab.api.get(path)["metadata"]
    lab.api.patch(path, {"metadata": {"labels": {"rollout.dev/pool": None}}})

    def restored() -> bool:
        now = lab.api.get(path)["metadata"]
        assert now["uid"] == before["uid"], "it serves as before, and nothing restarts"
        return bool(now["labels"] == before["labels"])

    await lab.until("the label is there again", restored)
    await lab.reaches("lost")


async def test_a_damaged_service_is_mended(lab: PoolLab) -> None:
    """As the API server keeps it, which fills in what the operator does not say."""
    lab.create("calm", replicas=1)
    await lab.reaches("calm")
    [want, _] = pool_services("calm", lab.namespace, lab.get("calm")["metadata"]["uid"])
    damage = {
        "spec": {"selector": {"app": "stranger"}, "publishNotReadyAddresses": True},
        "metadata": {"labels": {"app.kubernetes.io/name": "x"}},
    }
    lab.api.patch(lab.path("services", "calm"), damage)

    def mended() -> bool:
        have = lab.api.get(lab.path("services", "calm"))
        return (
            have["spec"]["selector"] == want["spec"]["selector"]
            and not have["spec"].get("publishNotReadyAddresses")
            and have["metadata"]["labels"] == want["metadata"]["labels"]
        )

    await lab.until("the Service is as it was", mended)


async def test_an_autoscaler_reads_and_sets_the_scale(lab: PoolLab) -> None:
    """That of docs/autoscaling.md. Below the least number it needs no metric; there is no API of metrics here, which its status says."""
    lab.create("math", replicas=1)
    await lab.reaches("math")
    _, _, scaler = manifests_of("autoscaling.md")
    assert scaler["kind"] == "HorizontalPodAutoscaler"
    scaler["metadata"]["namespace"] = lab.namespace
    scaler["spec"]["minReplicas"] = 2
    path = f"/apis/autoscaling/v2/namespaces/{lab.namespace}/horizontalpodautoscalers"
    lab.api.create(path, scaler)

    def told() -> dict[str, Obj]:
        status = lab.api.get(f"{path}/math").get("status") or {}
        return {each["type"]: each for each in status.get("conditions") or ()}

    await lab.until("it has set the scale", lambda: lab.get("math")["spec"]["replicas"] == 2, 120)
    await lab.until(
        "both replicas serve", lambda: lab.get("math")["status"]["readyReplicas"] == 2, 60
    )
    await lab.until("it reads metrics", lambda: "ScalingActive" in told(), 120)
    assert told()["AbleToScale"]["status"] == "True"
    assert "external.metrics.k8s.io" in told()["ScalingActive"]["message"]
    assert lab.api.get(f"{path}/math")["status"]["currentReplicas"] == 2
