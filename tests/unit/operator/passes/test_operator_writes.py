"""Writes that fail or meet something else than expected: what is waited for, told and mended."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web

from rollout_operator.api import names
from rollout_operator.api.objects import Obj
from rollout_operator.core.pass_plan import DeletePod, SetGate
from rollout_operator.core.pods.builder import PodBuilder
from rollout_operator.core.services import pool_services
from rollout_operator.passes.pool_writer import PoolWriter
from rollout_operator.passes.reconcile import Reconciler
from rollout_operator.passes.write_runner import MAX_WRITES_IN_FLIGHT
from tests.support.unit.passlab import (
    KEY,
    PODS,
    POOL,
    PassLab,
    condition,
    pod,
    pool,
    settled_services,
)
from tests.support.unit.poolspecs import GANG, NOW


@pytest.fixture
def writer(lab: PassLab) -> PoolWriter:
    return PoolWriter(lab.ctx, KEY, "ours")


async def test_a_delete_that_failed_changes_nothing_that_is_known(lab: PassLab) -> None:
    lab.api.answer("DELETE", f"{PODS}/math-0-0", {"reason": "no", "message": "no"}, 503)
    lab.ctx.store.upsert_written("pods", known := pod(uid="u"))
    writer = PoolWriter(lab.ctx, KEY, "ours")
    await writer.delete_pod(DeletePod("math-0-0", "u", 0, "a test"))
    assert not writer.changed
    assert lab.pods == [known]
    assert writer.obstacles.undeleted == {"u"}
    going = pod(uid="u", resourceVersion="9", deletionTimestamp="1970-01-12T13:00:00Z")
    lab.api.answer("DELETE", f"{PODS}/math-0-0", going)
    writer = PoolWriter(lab.ctx, KEY, "ours")
    await writer.delete_pod(DeletePod("math-0-0", "u", 0, "a test"))
    assert writer.changed, "the next pass reports it"
    assert lab.pods == [going], "known before the watch shows it"


async def test_a_pod_that_terminates_already_is_no_change(lab: PassLab, writer: PoolWriter) -> None:
    """A finalizer may hold it for ever, and no event would follow."""
    going = pod(uid="u", resourceVersion="9", deletionTimestamp="1970-01-12T13:00:00Z")
    lab.ctx.store.upsert_written("pods", going)
    lab.api.answer("DELETE", f"{PODS}/math-0-0", going)
    await writer.delete_pod(DeletePod("math-0-0", "u", 0, "stuck", forced=True))
    assert not writer.changed


UID_REFUSED = "metadata.uid: Invalid value: field is immutable"


async def test_the_gate_and_labels_of_another_pod_of_that_name_are_no_error(lab: PassLab) -> None:
    path, gate = f"{PODS}/math-0-0/status", SetGate("math-0-0", "u", True, "b", "Serving")
    lab.api.answer("PATCH", path, {"reason": "Invalid", "message": UID_REFUSED}, 422)
    writer = PoolWriter(lab.ctx, KEY, "ours")
    await writer.set_gate(gate)
    await writer.relabel_pod("math-0-0", "u", {})
    assert not writer.obstacles.reported_labels
    lab.api.answer("PATCH", path, {"reason": "Invalid", "message": "status.conditions: no"}, 422)
    writer = PoolWriter(lab.ctx, KEY, "ours")
    await writer.set_gate(gate)
    assert writer.obstacles.rejections == {
        "gate u": "the API server rejected the readiness gate of pod 'math-0-0': status.conditions: no"
    }


async def test_a_gate_says_since_when_its_worker_has_proven_itself(lab: PassLab) -> None:
    lab.api.answer("PATCH", f"{PODS}/math-0-0/status", pod())
    await PoolWriter(lab.ctx, KEY, "ours").set_gate(
        SetGate("math-0-0", "u", True, "b", "Serving", NOW - 60)
    )
    await PoolWriter(lab.ctx, KEY, "ours").set_gate(SetGate("math-0-0", "u", False, "b", "off"))
    [first, second] = [json.loads(body)["status"]["conditions"] for *_, body in lab.api.requests]
    told = [(c["type"], c["status"], c["reason"], c["lastTransitionTime"]) for c in first]
    assert told == [
        ("rollout.dev/serving", "True", "Serving", "1970-01-12T13:46:40Z"),
        ("rollout.dev/proven", "True", "AsExpected", "1970-01-12T13:45:40Z"),
    ]
    assert [(c["type"], c["status"]) for c in second] == [("rollout.dev/serving", "False")]


@pytest.mark.parametrize(
    ("found", "conflict"),
    [
        (pod(owner="an earlier one"), False),
        (pod(owner="a stranger", ownerReferences=[], deletionTimestamp="2026-01-01T00:00:00Z"), False),
        (pod(ownerReferences=[]), True),
        (pod(ownerReferences=[{"controller": True, "kind": "Job", "name": "math", "uid": "x"}]), True),
        (pod(ownerReferences=[{"kind": "RolloutReplica", "name": "math", "uid": "ours"}]), True),
    ],
    ids=["left over", "terminates", "nobody's", "a stranger's", "ours, but not controlled by us"],
)  # fmt: skip
async def test_a_name_that_gets_free_is_no_conflict(
    lab: PassLab, writer: PoolWriter, found: Obj, conflict: bool
) -> None:
    lab.api.answer("POST", PODS, {"reason": "AlreadyExists", "message": "exists"}, 409)
    lab.api.answer("GET", f"{PODS}/math-0-0", found)
    await writer.create_child("pods", {"kind": "Pod", **pod()})
    assert bool(writer.obstacles.conflicts) == conflict
    assert writer.obstacles.awaited == (set() if conflict else {"pod/math-0-0"})
    [known] = lab.pods
    assert known["metadata"] == found["metadata"], "the next pass sees what is there"


async def test_a_pod_of_ours_that_lost_a_label_gets_it_back(
    lab: PassLab, writer: PoolWriter
) -> None:
    """Nobody finds it without: the name is taken, and it looks as if there were no pod."""
    lost = pod()
    del lost["metadata"]["labels"][names.LABEL_POOL]
    lab.api.answer("POST", PODS, {"reason": "AlreadyExists", "message": "exists"}, 409)
    lab.api.answer("GET", f"{PODS}/math-0-0", lost)
    lab.api.answer("PATCH", f"{PODS}/math-0-0/status", pod(resourceVersion="6"))
    await writer.create_child("pods", {"kind": "Pod", **pod()})
    assert json.loads(lab.api.requests[-1][2])["metadata"] == {
        "uid": "uid of math-0-0",
        "labels": names.worker_labels("math", 0, 0),
    }
    assert [p["metadata"]["name"] for p in lab.pods] == ["math-0-0"]
    assert writer.obstacles.conflicts == {}


@pytest.mark.parametrize("again", [False, True], ids=["once", "always"])
async def test_a_label_that_a_policy_changes_is_set_again_or_told(
    lab: PassLab, writer: PoolWriter, again: bool
) -> None:
    """A policy that does so while the pod is created hides it from us, as one that always does."""
    labels = pod()["metadata"]["labels"] | {names.LABEL_MANAGED_BY: "policy"}
    lab.api.answer("POST", PODS, pod(labels=labels), 201)
    mended = pod(resourceVersion="6", **({"labels": labels} if again else {}))
    lab.api.answer("PATCH", f"{PODS}/math-0-0/status", mended)
    await writer.create_child("pods", {"kind": "Pod", **pod()})
    assert [method for method, *_ in lab.api.requests] == ["POST", "PATCH"]
    assert len(lab.pods) == (not again)
    assert writer.relabelled == (not again)
    told = f"pod/math-0-0 is not seen as this pool's: an admission policy or another controller sets its label {names.LABEL_MANAGED_BY} to 'policy'"
    assert told in writer.obstacles.rejections.get("pod/math-0-0", "") or not again
    assert bool(writer.obstacles.rejections) is again


@pytest.mark.parametrize("found", [True, False])
async def test_a_rank_without_labels_is_sought_before_its_gang_is_ended(
    lab: PassLab, found: bool
) -> None:
    lab.has_pool(**GANG | {"engine": {"type": "vllm", "image": "worker:1"}})
    ran = {"name": "worker", "state": {"running": {"startedAt": "1970-01-12T13:00:00Z"}}}
    lab.ctx.store.upsert_written(
        "pods", {**pod(), "status": {"phase": "Running", "containerStatuses": [ran]}}
    )
    member: dict[str, Any] = {"name": "math-0-1", "uid": "uid of math-0-1"}
    gone: Obj = {"reason": "NotFound", "message": "gone"}
    lab.api.answer(
        "GET",
        f"{PODS}/math-0-1",
        pod(**member, labels={}) if found else gone,
        200 if found else 404,
    )
    labels = names.worker_labels("math", 0, 1)
    lab.api.answer(
        "PATCH", f"{PODS}/math-0-1/status", pod(**member, labels=labels, resourceVersion="6")
    )
    going = pod(resourceVersion="9", deletionTimestamp="1970-01-12T13:00:00Z")
    lab.api.answer("DELETE", f"{PODS}/math-0-0", going)
    await lab.reconcile()
    ended = [path for method, path, _ in lab.api.requests if method == "DELETE"]
    assert bool(ended) is not found
    assert len(lab.pods) == 1 + found


@pytest.mark.parametrize("spec", [{}, {"engine": {"type": "unknown"}}], ids=["known", "unreadable"])
async def test_nothing_is_made_for_a_pool_that_is_gone(lab: PassLab, spec: dict[str, Any]) -> None:
    lab.ctx.store.upsert_written("pools", pool(**spec))
    lab.api.answer("PATCH", f"{POOL}/status", {"reason": "NotFound", "message": "gone"}, 404)
    assert await lab.reconcile() == 10.0, "or an API server that starts does not know it"
    assert [method for method, *_ in lab.api.requests] == ["PATCH"]


async def test_a_restart_whose_deletion_fails_counts_once(lab: PassLab) -> None:
    lab.has_pool(replicas=2)
    lab.ctx.store.upsert_written("pods", {**pod(), "status": {"phase": "Failed"}})
    lab.ctx.store.upsert_written("pods", pod(1))
    lab.api.answer("DELETE", f"{PODS}/math-0-0", {"reason": "Busy", "message": "busy"}, 503)
    for _ in range(3):
        await lab.reconcile()
        lab.clock.steady += 5
    lab.api.answer("DELETE", f"{PODS}/math-0-0", {"kind": "Pod"})
    await lab.reconcile()
    assert lab.written[-1]["restarts"] == 1
    assert lab.written[-1]["replacing"] == [{"replica": 0, "restarts": 1}]
    assert [m for m, *_ in lab.api.requests].count("DELETE") == 4


async def test_what_was_refused_is_told_until_it_is_tried_again(lab: PassLab) -> None:
    """A write that the watch has not shown keeps the pass from trying; it mends nothing."""
    lab.has_pool(replicas=2)

    async def create(request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.text())
        if body["metadata"]["name"] == "math-1-0":
            return web.json_response(
                {"reason": "Forbidden", "message": "exceeded quota"}, status=403
            )
        return web.json_response(pod(), status=201)

    lab.api.answers["POST", PODS] = create
    await lab.reconcile(3)
    assert len(lab.pods) == 1
    assert [condition(status, "Degraded") for status in lab.written] == [
        ("False", "AsExpected"),
        ("True", "Rejected"),
    ]


@pytest.mark.parametrize("reason", ["NameConflict", "Rejected"])
async def test_the_next_leader_tells_what_is_in_the_way_until_it_is_gone(
    lab: PassLab, reason: str
) -> None:
    """It has tried nothing yet: that is no recovery, and an alert would begin to wait anew."""
    lab.has_pool(replicas=2)
    taken = {
        "reason": "AlreadyExists" if reason == "NameConflict" else "Forbidden",
        "message": "no",
    }
    lab.api.answer("POST", PODS, taken, 409 if reason == "NameConflict" else 403)
    for replica in (0, 1):
        lab.api.answer("GET", f"{PODS}/math-{replica}-0", pod(replica, ownerReferences=[]))
    await lab.reconcile(3)
    before = len(lab.written)
    lab.reconciler = Reconciler(lab.ctx)
    await lab.reconcile(3)
    told = [condition(status, "Degraded") for status in lab.written]
    assert told == [("False", "AsExpected"), *[("True", reason)] * (len(told) - 1)]
    assert before == len(told), "nothing is news"
    lab.api.answer("POST", PODS, pod(), 201)
    lab.reconciler = Reconciler(lab.ctx)
    await lab.reconcile(3)
    assert condition(lab.written[-1], "Degraded") == ("False", "AsExpected")


async def test_a_pod_is_built_when_its_turn_comes(
    lab: PassLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To build thousands at once would hold the loop, which has other pools to serve."""
    lab.has_pool(replicas=40)
    built = posted = most = 0
    build = PodBuilder.build_pod

    def count_build(self: PodBuilder, *args: Any, **kwargs: Any) -> Obj:
        nonlocal built, most
        built += 1
        most = max(most, built - posted)
        return build(self, *args, **kwargs)

    async def create(request: web.Request) -> web.StreamResponse:
        nonlocal posted
        posted += 1
        return web.json_response(json.loads(await request.text()) | pod(posted), status=201)

    monkeypatch.setattr(PodBuilder, "build_pod", count_build)
    lab.api.answers["POST", PODS] = create
    await lab.reconcile()
    assert (built, posted) == (40, 40)
    assert most <= MAX_WRITES_IN_FLIGHT


async def test_a_refusal_in_ever_other_words_is_not_tried_without_end(lab: PassLab) -> None:
    """Webhooks name the time or the request; that is no news."""
    lab.has_pool(replicas=2)
    tries = 0

    async def create(request: web.Request) -> web.StreamResponse:
        nonlocal tries
        tries += 1
        answer = {"reason": "Forbidden", "message": f"denied, request {tries}"}
        return web.json_response(answer, status=403)

    lab.api.answers["POST", PODS] = create
    waits = []
    for _ in range(5):
        waits.append(await lab.reconcile())
        lab.clock.steady += 2
    assert (waits, tries) == ([0, 8, 6, 4, 2], 1)
    assert [condition(status, "Degraded") for status in lab.written] == [
        ("False", "AsExpected"),
        ("True", "Rejected"),
    ]
    await lab.reconcile(2)
    assert (tries, len(lab.written)) == (2, 2), (
        "the other one is tried, and the sentence holds still"
    )


async def test_a_finalizer_of_somebody_else_holds_nothing_else_up(lab: PassLab) -> None:
    lab.has_pool(replicas=2)
    stuck = pod(deletionTimestamp="1970-01-12T13:00:00Z", deletionGracePeriodSeconds=0)
    lab.ctx.store.upsert_written("pods", stuck)
    lab.ctx.store.upsert_written("pods", {**pod(1), "status": {"phase": "Failed"}})
    going = pod(1, resourceVersion="9", deletionTimestamp="1970-01-12T13:50:00Z")
    lab.api.answer("DELETE", f"{PODS}/math-0-0", stuck)
    lab.api.answer("DELETE", f"{PODS}/math-1-0", going)
    for second in range(0, 100, 5):
        lab.clock.wall += 5
        lab.clock.steady += 5
        await lab.reconcile()
        if second == 10:
            lab.sees("pods", "DELETED", pod(1, resourceVersion="9"))
            lab.api.answer("POST", PODS, pod(1, uid="new", resourceVersion="10"), 201)
    deletes = [
        path.rpartition("/")[2] for method, path, _ in lab.api.requests if method == "DELETE"
    ]
    assert deletes == ["math-1-0", "math-0-0", "math-0-0", "math-0-0"]
    assert [m for m, *_ in lab.api.requests].count("POST") == 1, "the other replica is replaced"


# Services.

SERVICES = "/api/v1/namespaces/rl/services"


async def test_a_service_without_the_labels_by_which_it_is_found_is_mended(lab: PassLab) -> None:
    settled_services(lab.ctx)
    data, _ = pool_services("math", "rl", "ours")
    meta = {**data["metadata"], "uid": "uid of math", "resourceVersion": "8"}
    lab.sees("services", "DELETED", {**data, "metadata": meta})
    stripped = {k: v for k, v in meta.items() if k != "labels"}
    there = {"metadata": stripped, "spec": {**data["spec"], "selector": {"app": "else"}}}
    lab.api.answer("POST", SERVICES, {"reason": "AlreadyExists", "message": "exists"}, 409)
    lab.api.answer("GET", f"{SERVICES}/math", there)
    lab.api.answer(
        "PATCH", f"{SERVICES}/math", {**data, "metadata": {**meta, "resourceVersion": "9"}}
    )
    await PoolWriter(lab.ctx, KEY, "ours").write_services()
    assert [method for method, _, _ in lab.api.requests] == ["POST", "GET", "PATCH"]
    body, selector = json.loads(lab.api.requests[-1][2]), data["spec"]["selector"]
    assert body["metadata"]["labels"] == data["metadata"]["labels"]
    assert body["spec"]["selector"] == {**selector, "app": None}
    assert lab.ctx.store.pool_services(KEY)[0]["spec"]["selector"] == selector
    lab.api.requests.clear()
    await PoolWriter(lab.ctx, KEY, "ours").write_services()
    assert lab.api.requests == []


@pytest.mark.parametrize(
    ("fields", "going"),
    [
        ({"deletionTimestamp": "1970-01-12T13:46:40Z"}, True),
        ({"ownerReferences": [names.controller_reference("math", "an earlier one")]}, True),
        ({"ownerReferences": []}, False),
    ],
    ids=["ours, terminating", "left over", "a stranger's"],
)
async def test_a_service_that_is_in_the_way_is_not_touched(
    lab: PassLab, writer: PoolWriter, fields: Obj, going: bool
) -> None:
    settled_services(lab.ctx)
    data, _ = pool_services("math", "rl", "ours")
    meta = {**data["metadata"], "uid": "another", "resourceVersion": "20", **fields}
    there = {**data, "metadata": meta, "spec": {}}
    lab.ctx.store.upsert_written("services", there)
    lab.api.answer("POST", SERVICES, {"reason": "AlreadyExists", "message": "exists"}, 409)
    lab.api.answer("GET", f"{SERVICES}/math", there)
    await writer.write_services()
    assert [method for method, *_ in lab.api.requests] == ([] if going else ["POST", "GET"])
    assert set(writer.obstacles.conflicts) == (set() if going else {"service/math"})


# One child.


async def test_a_created_pod_is_known_before_the_watch_shows_it(
    lab: PassLab, writer: PoolWriter
) -> None:
    lab.api.answer("POST", PODS, pod(), 201)
    await writer.create_child("pods", {"kind": "Pod", **pod()})
    assert lab.pods == [pod()]
    assert writer.changed, "the next pass reports it"


@pytest.mark.parametrize("hint", [True, False])
async def test_a_refused_pod_is_told_with_the_fix_for_a_missing_account(
    lab: PassLab, writer: PoolWriter, hint: bool
) -> None:
    why = "error looking up service account rl/none" if hint else "exceeded quota"
    lab.api.answer("POST", PODS, {"reason": "Forbidden", "message": why}, 403)
    await writer.create_child("pods", {"kind": "Pod", **pod()})
    said = writer.obstacles.rejections["pod/math-0-0"]
    assert said.startswith(f"the API server rejected pod 'math-0-0': {why}")
    assert ("set spec.serviceAccountName" in said) is hint
    assert lab.pods == []


async def test_a_namesake_that_is_gone_again_is_no_conflict(
    lab: PassLab, writer: PoolWriter
) -> None:
    lab.api.answer("POST", PODS, {"reason": "AlreadyExists", "message": "exists"}, 409)
    lab.api.answer("GET", f"{PODS}/math-0-0", {"reason": "NotFound", "message": "gone"}, 404)
    await writer.create_child("pods", {"kind": "Pod", **pod()})
    assert writer.obstacles.reported_labels == set()


@pytest.mark.parametrize(("status", "reason"), [(404, "NotFound"), (409, "Conflict")])
async def test_a_pod_that_is_gone_or_another_one_is_no_error(
    lab: PassLab, writer: PoolWriter, status: int, reason: str
) -> None:
    for method, path in (("PATCH", f"{PODS}/math-0-0/status"), ("DELETE", f"{PODS}/math-0-0")):
        lab.api.answer(method, path, {"reason": reason, "message": "no"}, status)
    await writer.set_gate(SetGate("math-0-0", "u", True, "b", "Serving"))
    await writer.relabel_pod("math-0-0", "u", {})
    await writer.delete_pod(DeletePod("math-0-0", "u", 7, "a test"))
    assert (writer.relabelled, writer.changed) == (0, False)
    gate, _, delete = (json.loads(body) for *_, body in lab.api.requests)
    assert (gate["apiVersion"], gate["kind"]) == ("v1", "Pod"), "an apply needs both"
    assert gate["metadata"] == {"name": "math-0-0", "namespace": "rl", "uid": "u"}
    assert (delete["preconditions"], delete["gracePeriodSeconds"]) == ({"uid": "u"}, 7)


# Many at once.


async def test_a_failure_among_many_writes_delays_none_of_them(
    lab: PassLab, writer: PoolWriter
) -> None:
    for number in range(30):
        lab.api.delay("DELETE", f"{PODS}/math-{number}-0", {"kind": "Pod"}, 0.02)
    lab.api.answer("DELETE", f"{PODS}/math-0-0", {"reason": "Busy", "message": "busy"}, 503)
    gone = [DeletePod(f"math-{number}-0", f"u{number}", 0, "a test") for number in range(30)]
    await writer.run_all(writer.delete_pod(each) for each in gone)
    assert set(writer.obstacles.api_errors) == {"delete u0"}
    assert len(lab.api.requests) == 30
    assert 1 < lab.api.most_at_once <= MAX_WRITES_IN_FLIGHT


@pytest.mark.parametrize("stops", [None, "suspend", "pause", "deletion"])
async def test_a_pool_of_many_pods_hears_what_happens_while_they_are_made(
    lab: PassLab, stops: str | None
) -> None:
    """Each pass makes some hundreds, and none once the user wants something else."""
    lab.has_pool(replicas=600)
    made = 0

    async def create(request: web.Request) -> web.StreamResponse:
        nonlocal made
        made += 1
        body = json.loads(await request.text())
        if made == 4 and stops == "suspend":
            lab.change(suspend=True)
        elif made == 4 and stops == "pause":
            lab.change(notes={names.ANNOTATION_PAUSED: "true"})
        elif made == 4 and stops == "deletion":
            lab.goes()
        body["metadata"] |= {"uid": f"u{made}", "resourceVersion": str(made)}
        return web.json_response(body | {"status": {"phase": "Pending"}})

    lab.api.answers["POST", PODS] = create
    assert await lab.reconcile() == 0.0
    if stops is not None:
        assert made == 7, "the batch that was under way"
        return
    assert made == 511
    await lab.reconcile()
    assert made == 600
