"""The real passes against a real API server: a pool's life, strangers, and the order of writes."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from localkube import Cluster
from rollout_common.kube.errors import Conflict
from rollout_operator.api.objects import PoolKey
from rollout_operator.api.status import RolloutReplicaStatus
from rollout_operator.cache.object_store import ObjectStore
from rollout_operator.core.pass_plan import DeletePod, SetGate
from rollout_operator.core.services import pool_services
from rollout_operator.passes.pool_writer import PoolWriter
from rollout_operator.passes.reconcile import Reconciler
from rollout_operator.passes.settings import ABSENT_RETRY_SECONDS
from tests.support.api.apiclient import Obj
from tests.support.api.poollab import GATE, PoolLab, Write, pool_lab
from tests.support.manifests import target

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(crd: Cluster) -> AsyncIterator[PoolLab]:
    async with pool_lab(crd, "passes") as made:
        yield made


def gate(pod: Obj) -> tuple[str, str]:
    found = [c for c in pod["status"].get("conditions", ()) if c["type"] == GATE]
    return (found[0]["status"], found[0]["message"]) if found else ("", "")


def condition(pool: Obj, kind: str) -> tuple[str, str, str]:
    found = next(c for c in pool["status"]["conditions"] if c["type"] == kind)
    return found["status"], found["reason"], found["message"]


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
            assert earlier[-1:] == [Write("patch", "pods/status", write.name, 200)], (
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
    status, reason, message = condition(lab.get("mine"), "Degraded")
    assert (status, reason) == ("True", "NameConflict")
    assert message.startswith("pod/mine-0-0 exists but is not ours")
    found = lab.api.get(lab.path("pods", "mine-0-0"))
    assert found["metadata"]["uid"] == theirs["metadata"]["uid"]
    tried = [w for w in lab.writes() if w.name == "mine-0-0"]
    assert {(w.verb, w.code) for w in tried} == {("create", 409)}
    lab.api.delete(lab.path("pods", "mine-0-0"), gracePeriodSeconds=0)
    await lab.reaches("mine")
    assert condition(lab.get("mine"), "Degraded")[0] == "False"


async def test_a_pool_of_another_class_is_left_alone(lab: PoolLab) -> None:
    lab.create("theirs", operatorClass="blue")
    lab.create("beside")
    await lab.reaches("beside")
    assert "status" not in lab.get("theirs")
    assert lab.pods("theirs") == {}


async def test_a_refused_pod_is_told_with_what_to_do(lab: PoolLab) -> None:
    lab.create("refused", replicas=1, serviceAccountName="nobody")
    await lab.until("the refusal is told", lambda: "Rejected" in str(lab.get("refused")))
    status, reason, message = condition(lab.get("refused"), "Degraded")
    assert (status, reason) == ("True", "Rejected")
    assert 'serviceaccount "nobody" not found' in message
    assert "set spec.serviceAccountName" in message
    lab.patch("refused", serviceAccountName=None)
    await lab.reaches("refused")


HOOKS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"


async def _webhook_that_is_down(lab: PoolLab, pool: str) -> None:
    """As a policy engine leaves it behind whose pods are gone: each creation of a pod is answered 500."""
    service = {"namespace": lab.namespace, "name": "gone", "path": "/"}
    hook = {
        "name": "down.example.com",
        "clientConfig": {"service": service},
        "rules": [
            {
                "apiGroups": [""],
                "apiVersions": ["v1"],
                "operations": ["CREATE"],
                "resources": ["pods"],
            }
        ],
        "objectSelector": {"matchLabels": {"rollout.dev/pool": pool}},
        "failurePolicy": "Fail",
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    lab.api.create(HOOKS, {"metadata": {"name": f"down-{pool}"}, "webhooks": [hook]})
    await lab.until_refused(pool, "the webhook refuses")


async def test_a_webhook_that_is_down_stops_nothing_but_the_lost_pod(lab: PoolLab) -> None:
    lab.create("hooked", replicas=2)
    await lab.reaches("hooked")
    await _webhook_that_is_down(lab, "hooked")
    try:
        lab.api.delete(lab.path("pods", "hooked-1-0"), gracePeriodSeconds=0)
        await lab.until("it is told", lambda: "ApiError" in str(lab.get("hooked")))
        status, reason, message = condition(lab.get("hooked"), "Degraded")
        assert (status, reason) == ("True", "ApiError")
        assert message.startswith(
            "the API server could not take pod 'hooked-1-0' (500 InternalError): "
        )
        assert 'failed calling webhook "down.example.com"' in message
        lab.patch("hooked", **target(1, 1))
        await lab.committed("hooked", 1, 1)
    finally:
        lab.api.delete(f"{HOOKS}/down-hooked")
    notes = {"metadata": {"annotations": {"rollout.dev/retry": "now"}}}
    lab.api.patch(lab.path("pools", "hooked"), notes)
    await lab.reaches("hooked")
    assert condition(lab.get("hooked"), "Degraded")[0] == "False"


async def test_a_dead_pod_is_replaced_and_counted(lab: PoolLab) -> None:
    lab.create("dies", replicas=1)
    await lab.reaches("dies")
    before = lab.pods("dies")["dies-0-0"]
    lab.api.patch(lab.path("pods", "dies-0-0") + "/status", {"status": {"phase": "Failed"}})
    await lab.until(
        "another pod", lambda: lab.pods("dies").get("dies-0-0", before)["metadata"]["uid"]
        != before["metadata"]["uid"],
    )  # fmt: skip
    await lab.reaches("dies")
    after = lab.pods("dies")["dies-0-0"]
    assert after["metadata"]["annotations"]["rollout.dev/restarts"] == "1"
    assert lab.get("dies")["status"]["restarts"] == 1


async def test_a_paused_pool_is_looked_at_and_not_touched(lab: PoolLab) -> None:
    lab.create("still", replicas=1)
    await lab.reaches("still")
    lab.api.patch(
        lab.path("pools", "still"),
        {"metadata": {"annotations": {"rollout.dev/reconcile-paused": "true"}}},
    )
    lab.writes()
    lab.asked.clear()
    lab.patch("still", replicas=2, state="Paused", **target(1, 1))
    await lab.until(
        "the pause is told", lambda: "reconcile-paused" in lab.get("still")["status"]["message"]
    )
    assert lab.get("still")["status"]["weights"]["committed"]["version"] == 0
    assert {w.resource for w in lab.writes()} <= {"rolloutreplicas/status"}
    assert not lab.asked
    lab.api.patch(
        lab.path("pools", "still"),
        {"metadata": {"annotations": {"rollout.dev/reconcile-paused": None}}},
    )
    await lab.committed("still", 1, 1)
    assert sorted(lab.pods("still")) == ["still-0-0", "still-1-0"]


@pytest.mark.parametrize("label", ["rollout.dev/pool", "rollout.dev/replica", "rollout.dev/role"])
async def test_a_pod_that_lost_a_label_gets_it_back(lab: PoolLab, label: str) -> None:
    name = "lost-" + label.rpartition("/")[2]
    lab.create(name, replicas=1)
    await lab.reaches(name)
    path = lab.path("pods", f"{name}-0-0")
    before = lab.api.get(path)["metadata"]
    lab.api.patch(path, {"metadata": {"labels": {label: None}}})

    def restored() -> bool:
        now = lab.api.get(path)["metadata"]
        assert now["uid"] == before["uid"], "it serves as before, and nothing restarts"
        return bool(now["labels"] == before["labels"])

    await lab.until("the label is there again", restored)
    await lab.reaches(name)


async def test_a_finalizer_of_somebody_else_costs_its_own_replica_only(lab: PoolLab) -> None:
    lab.create("held", replicas=2)
    await lab.reaches("held")
    before = {n: p["metadata"]["uid"] for n, p in lab.pods("held").items()}
    stuck = lab.path("pods", "held-0-0")
    lab.api.patch(stuck, {"metadata": {"finalizers": ["example.com/stuck"]}})
    lab.api.delete(stuck, gracePeriodSeconds=0)
    lab.api.patch(lab.path("pods", "held-1-0") + "/status", {"status": {"phase": "Failed"}})
    await lab.until(
        "the other replica serves anew",
        lambda: lab.pods("held").get("held-1-0", {}).get("metadata", {}).get("uid")
        not in (None, before["held-1-0"]) and lab.get("held")["status"]["readyReplicas"] == 1,
    )  # fmt: skip
    context, key, _ = lab.context_of("held")
    passed = [0.0]
    later = dataclasses.replace(context, monotonic=lambda: time.monotonic() + passed[-1])
    other = Reconciler(later)
    lab.writes()
    for _ in range(5):
        await other.reconcile(key)
        passed.append(300)
    tried = [w for w in lab.writes() if w.verb == "delete"]
    assert [(w.name, w.code) for w in tried] == [("held-0-0", 200)], "once in 30 s"
    lab.api.patch(stuck, {"metadata": {"finalizers": None}}, missing=True)
    await lab.reaches("held")


async def test_a_pool_made_again_waits_for_the_pods_before_it(lab: PoolLab) -> None:
    lab.create("again", replicas=4)
    await lab.reaches("again")
    names = sorted(lab.pods("again"))
    for name in names:
        patch = {"metadata": {"finalizers": ["example.com/slow"]}}
        lab.api.patch(lab.path("pods", name), patch)
    before = {p["metadata"]["uid"] for p in lab.pods("again").values()}
    lab.writes()
    lab.api.delete(lab.path("pools", "again"))
    lab.create("again", replicas=4)
    told: set[str] = set()

    def waits() -> bool:
        pool = lab.get("again")
        if pool.get("status"):
            told.add(condition(pool, "Degraded")[1])
        going = [p for p in lab.pods("again").values() if "deletionTimestamp" in p["metadata"]]
        return len(going) == 4 and "is still terminating" in pool.get("status", {}).get(
            "message", ""
        )

    await lab.until("the new pool waits", waits, 90)  # the garbage collector takes its time
    for name in names:
        lab.api.patch(lab.path("pods", name), {"metadata": {"finalizers": None}}, missing=True)
    await lab.reaches("again")
    told.add(condition(lab.get("again"), "Degraded")[1])
    assert told == {"AsExpected"}, "no conflict of names"
    assert not before & {p["metadata"]["uid"] for p in lab.pods("again").values()}
    writes = lab.writes()
    refused = [w for w in writes if w.verb == "create" and w.code == 409]
    assert len(refused) <= 6, "what is known to be taken is not tried again and again"
    created = [w.resource for w in writes if w.verb == "create" and w.code == 201]
    assert created.count("pods") == 4
    # A busy operator may learn that the former pool's Services are gone before it learns that the pool is: those that it
    # makes for that one go with it, and are made once more for the new pool.
    assert 2 <= created.count("services") <= 4
    assert set(created) == {"pods", "services", "poddisruptionbudgets"}


async def test_nothing_is_made_for_a_pool_that_is_gone(lab: PoolLab) -> None:
    lab.create("ghost", replicas=1, suspend=True)
    await lab.reaches("ghost", "Suspended")
    context, key, _ = lab.context_of("ghost")
    ghost = lab.get("ghost")
    ghost["spec"]["suspend"] = False
    ghost["metadata"]["generation"] += 1
    lab.api.delete(lab.path("pools", "ghost"))
    await lab.until("the operator knows", lambda: context.store.find_pool(key) is None)
    # A pass that began before may still make a Service anew, which goes with the pool.
    await asyncio.sleep(0.5)
    lab.writes()
    store = ObjectStore()
    store.upsert_written("pools", ghost)
    again = await Reconciler(dataclasses.replace(context, store=store)).reconcile(key)
    assert again == ABSENT_RETRY_SECONDS
    assert [(w.resource, w.code) for w in lab.writes()] == [("rolloutreplicas/status", 404)]


async def test_a_status_that_can_not_be_read_is_kept_and_told(lab: PoolLab) -> None:
    lab.create("newer", replicas=1)
    await lab.reaches("newer")
    committed = {"epoch": 3, "version": 4, "source": {}, "rootHash": "as another version wrote it"}
    path = f"{lab.path('pools', 'newer')}/status"
    nobodys = {**committed, "source": {"checkpoint": None}}  # a merge patch: it comes to be empty
    lab.api.patch(path, {"status": {"weights": {"committed": nobodys}}})
    told = ("True", "UnreadableStatus")
    await lab.until("it is told", lambda: condition(lab.get("newer"), "Degraded")[:2] == told)
    found = lab.get("newer")["status"]
    assert found["weights"]["committed"] == committed
    assert condition(lab.get("newer"), "Degraded")[2].startswith("status.weights.committed.source")
    assert condition(lab.get("newer"), "Ready")[0] == "True"
    lab.writes()
    lab.asked.clear()
    lab.patch("newer", replicas=2, **target(5, 1))
    generation = lab.get("newer")["metadata"]["generation"]

    def seen() -> bool:
        degraded = next(
            c for c in lab.get("newer")["status"]["conditions"] if c["type"] == "Degraded"
        )
        return bool(degraded["observedGeneration"] == generation)

    await lab.until("the change is seen", seen)
    assert {w.resource for w in lab.writes()} <= {"rolloutreplicas/status"}
    assert not lab.asked
    assert lab.get("newer")["status"]["weights"]["committed"] == committed
    mended = {"source": {"path": "/rollout/weights/3-4"}, "rootHash": None}
    lab.api.patch(path, {"status": {"weights": {"committed": mended}}})
    await lab.committed("newer", 5, 1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def settled(lab: PoolLab) -> PoolLab:
    """A pool `calm` at rest; its tests write past the operator."""
    lab.create("calm", replicas=1)
    await lab.reaches("calm")
    return lab


async def test_a_delete_names_its_pod(settled: PoolLab) -> None:
    context, key, uid = settled.context_of("calm")
    before = settled.pods("calm")["calm-0-0"]["metadata"]["uid"]
    await PoolWriter(context, key, uid).delete_pod(DeletePod("calm-0-0", "another", 0, "a test"))
    assert settled.pods("calm")["calm-0-0"]["metadata"]["uid"] == before
    await PoolWriter(context, key, uid).delete_pod(DeletePod("calm-7-0", "gone", None, "a test"))


async def test_a_gate_is_that_of_its_pod(settled: PoolLab) -> None:
    context, key, uid = settled.context_of("calm")
    before = settled.pods("calm")["calm-0-0"]
    await PoolWriter(context, key, uid).set_gate(
        SetGate("calm-0-0", "another", False, "b", "a test")
    )
    assert gate(settled.pods("calm")["calm-0-0"]) == gate(before)


async def test_a_status_is_not_written_over_a_newer_one(settled: PoolLab) -> None:
    context, key, uid = settled.context_of("calm")
    before = settled.get("calm")
    settled.api.patch(settled.path("pools", "calm"), {"metadata": {"labels": {"a": "b"}}})
    with pytest.raises(Conflict):
        await PoolWriter(context, key, uid).apply_status(
            before["metadata"]["resourceVersion"], RolloutReplicaStatus().to_document()
        )
    assert settled.get("calm")["status"] == before["status"]


async def test_our_own_child_under_a_name_is_no_conflict(settled: PoolLab) -> None:
    context, key, uid = settled.context_of("calm")
    writer = PoolWriter(context, key, uid)
    for body in pool_services("calm", settled.namespace, uid):
        await writer.create_child("services", body)
    assert writer.obstacles.conflicts == {}
    earlier = PoolWriter(context, key, "one that was deleted")
    for body in pool_services("calm", settled.namespace, uid):
        await earlier.create_child("services", body)
    assert earlier.obstacles.conflicts == {}, "the garbage collector frees the name"
    foreign = PoolWriter(context, PoolKey(settled.namespace, "another"), "somebody else")
    for body in pool_services("calm", settled.namespace, uid):
        await foreign.create_child("services", body)
    assert sorted(foreign.obstacles.conflicts) == ["service/calm", "service/calm-heads"]


@pytest.mark.parametrize(
    "damage",
    [
        {"spec": {"selector": {"app": "stranger"}}},
        {"metadata": {"labels": {"rollout.dev/pool": "calm", "app.kubernetes.io/name": "x"}}},
        {"spec": {"publishNotReadyAddresses": True}},
    ],
    ids=["selector", "label", "field"],
)
async def test_a_damaged_service_is_mended(settled: PoolLab, damage: dict[str, Any]) -> None:
    [want, _] = pool_services("calm", settled.namespace, settled.get("calm")["metadata"]["uid"])
    settled.api.patch(settled.path("services", "calm"), damage)

    def mended() -> bool:
        have = settled.api.get(settled.path("services", "calm"))
        return (
            have["spec"]["selector"] == want["spec"]["selector"]
            and not have["spec"].get("publishNotReadyAddresses")
            and have["metadata"]["labels"] == want["metadata"]["labels"]
        )

    await settled.until("the Service is as it was", mended)


async def test_a_pod_that_outlives_its_grace_is_freed_even_without_its_pool(
    settled: PoolLab,
) -> None:
    settled.create("orphan", replicas=1)
    await settled.reaches("orphan")
    context, key, _ = settled.context_of("orphan")
    pod = settled.path("pods", "orphan-0-0")
    settled.api.patch(pod, {"metadata": {"finalizers": ["example.com/stuck"]}})
    settled.api.delete(settled.path("pools", "orphan"))
    await settled.until(
        "the pod terminates",
        lambda: "deletionTimestamp" in settled.api.get(pod)["metadata"],
    )
    await settled.until("the operator knows", lambda: context.store.find_pool(key) is None)
    await settled.until(
        "the operator sees the pod terminate",
        lambda: [p for p in context.store.pool_pods(key) if "deletionTimestamp" in p["metadata"]],
    )
    settled.writes()
    passed = [0.0]
    later = dataclasses.replace(context, monotonic=lambda: time.monotonic() + passed[-1])
    other = Reconciler(later)
    await other.reconcile(key)
    passed.append(300)
    assert await other.reconcile(key) == 30
    deletes = [w for w in settled.writes() if w.verb == "delete"]
    assert [(w.name, w.code) for w in deletes] == [("orphan-0-0", 200)]
    settled.api.patch(pod, {"metadata": {"finalizers": None}}, missing=True)
